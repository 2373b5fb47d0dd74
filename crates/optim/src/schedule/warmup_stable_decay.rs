//! `warmup_stable_decay` (WSD): the rate rises, stays, and falls over the last steps. Hu et al., `MiniCPM`, 2024,
//! <https://arxiv.org/abs/2404.06395>; the fall `1-sqrt` is that of Hägele et al., 2024,
//! <https://arxiv.org/abs/2405.18392>.
use super::{ScheduleForm, ScheduleSteps, above, cycles, share, wave};
use std::f64::consts::PI;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_config::arguments::Reader;

/// `warmup_type`, `num_stable_steps`, `num_decay_steps`, `decay_type`, `min_lr_ratio` and `num_cycles`, in this order.
#[derive(Debug)]
pub(super) struct WarmupStableDecay {
    /// The curve on which the rate rises.
    rise: Shape,
    /// Steps during which the rate stays at the peak.
    stable: u64,
    /// Steps during which the rate falls.
    decay: u64,
    /// The curve on which the rate falls.
    fall: Shape,
    /// The lowest rate as a share of the highest.
    floor: f64,
    /// Periods of a fall along a cosine; 0.5 falls once.
    cycles: f64,
}

/// How a warm-up rises and a decay falls.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Linear,
    Cosine,
    OneMinusSqrt,
}

impl ScheduleForm for WarmupStableDecay {
    fn of(args: &mut Reader<'_>, &mut ScheduleSteps { warmup, total, .. }: &mut ScheduleSteps) -> Result<Self> {
        let shapes = [("linear", Shape::Linear), ("cosine", Shape::Cosine), ("1-sqrt", Shape::OneMinusSqrt)];
        let falls = [shapes[1], shapes[0], shapes[2]];
        let Some(decay) = args.count("num_decay_steps", 0)? else {
            return Err(Error::config(
                "train.lr_scheduler_kwargs: lr_scheduler_type = warmup_stable_decay needs num_decay_steps",
            )
            .hint("for example lr_scheduler_kwargs: {num_decay_steps: 100}"));
        };
        let stable = match args.count("num_stable_steps", 0)? {
            Some(steps) => steps,
            None => total.checked_sub(warmup + decay).ok_or_else(|| {
                Error::config(format!(
                    "train.lr_scheduler_kwargs: num_decay_steps = {decay} and a warm-up of {warmup} are more than the run's {}",
                    count(total, "step")
                ))
                .hint("lower num_decay_steps or the warm-up")
            })?,
        };
        Ok(Self {
            rise: args.word("warmup_type", &shapes)?,
            stable,
            decay,
            fall: args.word("decay_type", &falls)?,
            floor: share(args, "min_lr_ratio")?.unwrap_or(0.0),
            cycles: cycles(args)?,
        })
    }

    fn rising(&self, step: u64, run: &ScheduleSteps) -> f64 {
        let progress = step as f64 / run.warmup as f64;
        let risen = match self.rise {
            Shape::Linear => progress,
            Shape::Cosine => 0.5 * (1.0 - (PI * progress).cos()),
            Shape::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
        };
        above(self.floor, risen)
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        let since = step - run.warmup;
        if since < self.stable {
            return 1.0;
        }
        if since >= self.stable + self.decay {
            return self.floor;
        }
        let progress = (since - self.stable) as f64 / (self.decay as f64).max(1.0);
        let factor = match self.fall {
            Shape::Linear => 1.0 - progress,
            Shape::Cosine => wave(self.cycles, progress),
            Shape::OneMinusSqrt => 1.0 - progress.sqrt(),
        };
        above(self.floor, factor)
    }
}

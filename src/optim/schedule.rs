//! Learning rates over optimizer steps, equal to the schedules of `transformers.optimization`.
use crate::config::arguments::Reader;
use crate::config::{LrScheduler, Optim, TrainConfig};
use crate::error::{Error, Result};
use std::f64::consts::PI;

/// How the rate goes over a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Which form, with its arguments.
    pub curve: Curve,
    /// The highest rate.
    pub peak: f64,
    /// Steps in which it rises (from 0, unless the form says otherwise).
    pub warmup: u64,
    /// All steps.
    pub total: u64,
}

/// A schedule's form and arguments, named as in Transformers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Curve {
    /// `constant`, without warm-up.
    Constant,
    /// `constant_with_warmup`.
    ConstantWithWarmup,
    /// The warm-up of schedule-free optimizers: its first step has not rate 0 but `peak / warmup`.
    ScheduleFree,
    /// `linear`.
    Linear,
    /// `cosine` and `cosine_with_min_lr`: so many waves, down to this share of the peak.
    Cosine {
        /// Waves; 0.5 falls once.
        cycles: f64,
        /// The lowest rate by the peak.
        floor: f64,
    },
    /// `cosine_warmup_with_min_lr`: one step ahead, and a warm-up that begins above 0.
    CosineWarmup {
        /// Waves; 0.5 falls once.
        cycles: f64,
        /// The lowest rate by the peak.
        floor: f64,
        /// The first rate by the peak; none: `1 / warmup`.
        start: Option<f64>,
    },
    /// `cosine_with_restarts`.
    Restarts {
        /// Half waves.
        cycles: f64,
    },
    /// `polynomial`.
    Polynomial {
        /// The last rate.
        end: f64,
        /// The exponent.
        power: f64,
    },
    /// `inverse_sqrt`.
    InverseSqrt {
        /// Steps after which the rate has fallen to `1 / sqrt(2)`.
        timescale: f64,
    },
    /// `warmup_stable_decay`.
    StableDecay {
        /// How the rate rises.
        rise: Shape,
        /// Steps at the peak.
        stable: u64,
        /// Steps of the fall.
        decay: u64,
        /// How it falls.
        fall: Shape,
        /// The lowest rate by the peak.
        floor: f64,
        /// Waves of a fall along a cosine; 0.5 falls once.
        cycles: f64,
    },
}

/// How a warm-up rises and a decay falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// On a line.
    Linear,
    /// On a cosine.
    Cosine,
    /// `1 - sqrt(progress)`.
    OneMinusSqrt,
}

impl Schedule {
    /// A schedule with the default arguments of its form.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: the form has an argument without a default.
    pub fn new(form: LrScheduler, peak: f64, warmup: u64, total: u64) -> Result<Self> {
        let train = TrainConfig { lr_scheduler_type: form, learning_rate: peak, ..TrainConfig::default() };
        Self::of(&train, warmup, total)
    }

    /// The schedule of a configuration, over `total` steps of which the first `warmup` rise.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: an argument that the form does not have, one it needs, or a value it cannot have.
    pub fn of(train: &TrainConfig, warmup: u64, total: u64) -> Result<Self> {
        let owner = format!("lr_scheduler_type = {}", train.lr_scheduler_type);
        let mut args = train.lr_scheduler_kwargs.reader("train.lr_scheduler_kwargs", &owner);
        let peak = train.learning_rate;
        let curve = match train.lr_scheduler_type {
            LrScheduler::ConstantWithWarmup if train.optim == Optim::ScheduleFreeAdamW => Curve::ScheduleFree,
            LrScheduler::Constant => Curve::Constant,
            LrScheduler::ConstantWithWarmup => Curve::ConstantWithWarmup,
            LrScheduler::Linear => Curve::Linear,
            LrScheduler::Cosine => Curve::Cosine { cycles: cycles(&mut args, 0.5)?, floor: 0.0 },
            LrScheduler::CosineWithRestarts => {
                Curve::Restarts { cycles: args.count("num_cycles", 1)?.unwrap_or(1) as f64 }
            }
            LrScheduler::CosineWithMinLr => {
                Curve::Cosine { cycles: cycles(&mut args, 0.5)?, floor: least(&mut args, peak)? }
            }
            LrScheduler::CosineWarmupWithMinLr => Curve::CosineWarmup {
                cycles: cycles(&mut args, 0.5)?,
                floor: least(&mut args, peak)?,
                start: share(&mut args, "warmup_lr_rate")?,
            },
            LrScheduler::Polynomial => polynomial(&mut args, peak)?,
            LrScheduler::InverseSqrt => {
                let timescale = args.count("timescale", 1)?.unwrap_or(if warmup == 0 { 10_000 } else { warmup });
                Curve::InverseSqrt { timescale: timescale as f64 }
            }
            LrScheduler::WarmupStableDecay => stable_decay(&mut args, warmup, total)?,
        };
        args.finish()?;
        let warmup = if curve == Curve::Constant { 0 } else { warmup };
        Ok(Self { curve, peak, warmup, total })
    }

    /// The rate of the optimizer step with this number; the first is 0.
    pub fn lr(&self, step: u64) -> f64 {
        self.peak * self.factor(step)
    }

    fn factor(&self, step: u64) -> f64 {
        let (at, warmup, total) = (step as f64, self.warmup as f64, self.total as f64);
        if step < self.warmup {
            let progress = at / warmup;
            return match self.curve {
                Curve::ScheduleFree | Curve::CosineWarmup { start: None, .. } => (at + 1.0) / warmup,
                Curve::CosineWarmup { start: Some(start), .. } => start + (1.0 - start) * at / (warmup - 1.0).max(1.0),
                Curve::StableDecay { rise, floor, .. } => above(floor, rise.rise(progress)),
                _ => progress,
            };
        }
        let span = (total - warmup).max(1.0);
        let progress = (at - warmup) / span;
        let wave = |cycles: f64, progress: f64| 0.5 * (1.0 + (PI * cycles * 2.0 * progress).cos());
        match self.curve {
            Curve::Constant | Curve::ConstantWithWarmup | Curve::ScheduleFree => 1.0,
            Curve::Linear => ((total - at) / span).max(0.0),
            Curve::Cosine { cycles, floor } => above(floor, wave(cycles, progress)),
            Curve::CosineWarmup { cycles, floor, .. } => above(floor, wave(cycles, (at - warmup + 1.0) / span)),
            Curve::Restarts { .. } if progress >= 1.0 => 0.0,
            Curve::Restarts { cycles } => (0.5 * (1.0 + (PI * ((cycles * progress) % 1.0)).cos())).max(0.0),
            Curve::Polynomial { end, .. } if step > self.total => end / self.peak,
            Curve::Polynomial { end, power } => {
                let left = if self.total > self.warmup { 1.0 - progress } else { 0.0 };
                ((self.peak - end) * left.powf(power) + end) / self.peak
            }
            Curve::InverseSqrt { timescale } => 1.0 / ((at + (timescale - warmup)) / timescale).sqrt(),
            Curve::StableDecay { stable, decay, fall, floor, cycles, .. } => {
                let since = step - self.warmup;
                if since < stable {
                    return 1.0;
                }
                if since >= stable + decay {
                    return floor;
                }
                let progress = (since - stable) as f64 / (decay as f64).max(1.0);
                let factor = match fall {
                    Shape::Linear => 1.0 - progress,
                    Shape::Cosine => wave(cycles, progress),
                    Shape::OneMinusSqrt => 1.0 - progress.sqrt(),
                };
                above(floor, factor)
            }
        }
    }
}

/// `factor` brought into `floor..1`.
fn above(floor: f64, factor: f64) -> f64 {
    (factor * (1.0 - floor) + floor).max(0.0)
}

impl Shape {
    fn rise(self, progress: f64) -> f64 {
        match self {
            Self::Linear => progress,
            Self::Cosine => 0.5 * (1.0 - (PI * progress).cos()),
            Self::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
        }
    }
}

fn cycles(args: &mut Reader<'_>, default: f64) -> Result<f64> {
    Ok(args.number("num_cycles", "a number above 0", |number| number > 0.0)?.unwrap_or(default))
}

fn share(args: &mut Reader<'_>, name: &'static str) -> Result<Option<f64>> {
    args.number(name, "a number from 0 to 1", |number| (0.0..=1.0).contains(&number))
}

/// `min_lr` or `min_lr_rate`, as a share of the peak.
fn least(args: &mut Reader<'_>, peak: f64) -> Result<f64> {
    let rate = args.number("min_lr", "a number of at least 0", |number| number >= 0.0)?;
    match (rate, share(args, "min_lr_rate")?) {
        (Some(rate), None) if rate <= peak && peak > 0.0 => Ok(rate / peak),
        (Some(rate), None) => Err(Error::config(format!(
            "train.lr_scheduler_kwargs: min_lr = {rate} is not below train.learning_rate = {peak}"
        ))
        .hint("the schedule falls to it")),
        (None, Some(share)) => Ok(share),
        _ => Err(Error::config("train.lr_scheduler_kwargs: expected one of min_lr and min_lr_rate")
            .hint("for example lr_scheduler_kwargs: {min_lr_rate: 0.1}")),
    }
}

fn polynomial(args: &mut Reader<'_>, peak: f64) -> Result<Curve> {
    let end = args.number("lr_end", "a number of at least 0", |number| number >= 0.0)?.unwrap_or(1e-7);
    let power = args.number("power", "a number above 0", |number| number > 0.0)?.unwrap_or(1.0);
    if peak <= end {
        return Err(Error::config(format!(
            "train.lr_scheduler_kwargs: lr_end = {end} is not below train.learning_rate = {peak}"
        ))
        .hint("the schedule falls to it"));
    }
    Ok(Curve::Polynomial { end, power })
}

fn stable_decay(args: &mut Reader<'_>, warmup: u64, total: u64) -> Result<Curve> {
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
                "train.lr_scheduler_kwargs: num_decay_steps = {decay} and a warm-up of {warmup} are more than the run's {total} steps"
            ))
            .hint("lower num_decay_steps or the warm-up")
        })?,
    };
    Ok(Curve::StableDecay {
        rise: args.word("warmup_type", &shapes)?,
        stable,
        decay,
        fall: args.word("decay_type", &falls)?,
        floor: share(args, "min_lr_ratio")?.unwrap_or(0.0),
        cycles: cycles(args, 0.5)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_start_peak_and_end_as_in_transformers() {
        let at = |form, step| Schedule::new(form, 1.0, 4, 20).unwrap().lr(step);
        for form in [LrScheduler::Linear, LrScheduler::Cosine, LrScheduler::ConstantWithWarmup] {
            assert_eq!((at(form, 0), at(form, 1), at(form, 4)), (0.0, 0.25, 1.0));
        }
        assert_eq!((at(LrScheduler::Constant, 0), at(LrScheduler::ConstantWithWarmup, 19)), (1.0, 1.0));
        assert_eq!((at(LrScheduler::Linear, 12), at(LrScheduler::Linear, 20)), (0.5, 0.0));
        assert!((at(LrScheduler::Cosine, 12) - 0.5).abs() < 1e-12 && at(LrScheduler::Cosine, 20) < 1e-12);
    }

    #[test]
    fn arguments_that_a_form_needs_or_lacks_are_refused() {
        let refused = |form, arguments: &str| {
            let node = crate::config::Node::Str(arguments.into());
            let lr_scheduler_kwargs = crate::config::ConfigValue::from_node(&node).unwrap();
            let train = TrainConfig { lr_scheduler_type: form, lr_scheduler_kwargs, ..TrainConfig::default() };
            Schedule::of(&train, 4, 20).unwrap_err().to_string()
        };
        assert!(refused(LrScheduler::Linear, "num_cycles=2").contains("num_cycles"));
        assert!(refused(LrScheduler::CosineWithRestarts, "num_cycle=2").contains("did you mean num_cycles"));
        assert!(refused(LrScheduler::WarmupStableDecay, "decay_type=linear").contains("num_decay_steps"));
        assert!(refused(LrScheduler::WarmupStableDecay, "num_decay_steps=17").contains("20 steps"));
        assert!(refused(LrScheduler::CosineWithMinLr, "num_cycles=1").contains("min_lr"));
        assert!(refused(LrScheduler::Polynomial, "lr_end=1").contains("not below"));
    }
}

//! `polynomial`: falls to `lr_end` as `(peak - lr_end) (1 - p)^power + lr_end`, divided by the highest rate `peak`.
use super::{ScheduleForm, ScheduleSteps};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arguments::Reader;

/// `lr_end`, the last rate itself (not a share), and `power`.
#[derive(Debug)]
pub(super) struct Polynomial {
    end: f64,
    power: f64,
}

impl ScheduleForm for Polynomial {
    fn of(args: &mut Reader<'_>, run: &mut ScheduleSteps) -> Result<Self> {
        let end = args.number("lr_end", "a number of at least 0", |number| number >= 0.0)?.unwrap_or(1e-7);
        let power = args.number("power", "a number above 0", |number| number > 0.0)?.unwrap_or(1.0);
        if run.peak <= end {
            return Err(Error::config(format!(
                "train.lr_scheduler_kwargs: lr_end = {end} is not below train.learning_rate = {}",
                run.peak
            ))
            .hint("the schedule falls to it"));
        }
        Ok(Self { end, power })
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        if step > run.total {
            return self.end / run.peak;
        }
        let left = if run.total > run.warmup { 1.0 - run.progress(step) } else { 0.0 };
        ((run.peak - self.end) * left.powf(self.power) + self.end) / run.peak
    }
}

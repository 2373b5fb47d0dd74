//! `inverse_sqrt`: falls as `1 / sqrt((step - warmup) / timescale + 1)`, which Transformers has from Google's
//! `big_vision`.
use super::{ScheduleForm, ScheduleSteps};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

/// `timescale`: steps after the warm-up until the rate has fallen to `1 / sqrt(2)`.
#[derive(Debug)]
pub(super) struct InverseSqrt {
    timescale: f64,
}

impl ScheduleForm for InverseSqrt {
    fn of(args: &mut Reader<'_>, run: &mut ScheduleSteps) -> Result<Self> {
        let usual = if run.warmup == 0 { 10_000 } else { run.warmup };
        Ok(Self { timescale: args.count("timescale", 1)?.unwrap_or(usual) as f64 })
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        1.0 / ((step as f64 + (self.timescale - run.warmup as f64)) / self.timescale).sqrt()
    }
}

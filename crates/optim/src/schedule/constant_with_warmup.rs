//! `constant_with_warmup`: the highest rate from the end of warm-up on.
use super::{ScheduleForm, ScheduleSteps};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

#[derive(Debug)]
pub(super) struct ConstantWithWarmup;

impl ScheduleForm for ConstantWithWarmup {
    fn of(_: &mut Reader<'_>, _: &mut ScheduleSteps) -> Result<Self> {
        Ok(Self)
    }

    fn rising(&self, step: u64, run: &ScheduleSteps) -> f64 {
        // The warm-up of schedule-free optimizers begins above 0: what a step of rate 0 found would count in their averages.
        (step as f64 + if run.averages { 1.0 } else { 0.0 }) / run.warmup as f64
    }

    fn after(&self, _step: u64, _run: &ScheduleSteps) -> f64 {
        1.0
    }
}

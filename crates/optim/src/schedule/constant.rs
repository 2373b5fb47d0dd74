//! `constant`: the highest rate in every step. A warm-up is ignored, as in Transformers.
use super::{ScheduleForm, ScheduleSteps};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

#[derive(Debug)]
pub(super) struct Constant;

impl ScheduleForm for Constant {
    fn of(_: &mut Reader<'_>, run: &mut ScheduleSteps) -> Result<Self> {
        run.warmup = 0;
        Ok(Self)
    }

    fn after(&self, _step: u64, _run: &ScheduleSteps) -> f64 {
        1.0
    }
}

//! `linear`: falls on a line to 0, `1 - p`.
use super::{ScheduleForm, ScheduleSteps};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

#[derive(Debug)]
pub(super) struct Linear;

impl ScheduleForm for Linear {
    fn of(_: &mut Reader<'_>, _: &mut ScheduleSteps) -> Result<Self> {
        Ok(Self)
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        ((run.total as f64 - step as f64) / run.span()).max(0.0)
    }
}

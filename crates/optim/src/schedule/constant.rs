//! `constant`: the highest rate, which takes no notice of a warm-up.
use super::{Form, Run};
use tunesmith_config::arguments::Reader;
use tunesmith_base::error::Result;

/// No arguments.
#[derive(Debug)]
pub(super) struct Constant;

impl Form for Constant {
    fn of(_: &mut Reader<'_>, run: &mut Run) -> Result<Self> {
        run.warmup = 0;
        Ok(Self)
    }

    fn after(&self, _step: u64, _run: &Run) -> f64 {
        1.0
    }
}

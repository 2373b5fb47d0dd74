//! `constant`: the highest rate in every step. A warm-up is ignored, as in Transformers.
use super::{Form, Run};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

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

//! `rex`, the reflected exponential: Chen et al., 2021, <https://arxiv.org/abs/2107.04197>. The rate stays high for
//! long and then falls steeply: `(1 - p) / (0.1 + 0.9 (1 - p))`. Equal to Axolotl's `RexLR`, which is one step ahead of
//! the others.
use super::{ScheduleForm, ScheduleSteps, above, lowest};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

/// The lowest rate as a share of the highest.
#[derive(Debug)]
pub(super) struct Rex {
    floor: f64,
}

impl ScheduleForm for Rex {
    fn of(args: &mut Reader<'_>, run: &mut ScheduleSteps) -> Result<Self> {
        Ok(Self { floor: lowest(args, run.peak)?.unwrap_or(0.0) })
    }

    fn rising(&self, step: u64, run: &ScheduleSteps) -> f64 {
        (step as f64 + 1.0) / run.warmup as f64
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        let left = 1.0 - (step as f64 - run.warmup as f64 + 1.0) / run.span();
        if left <= 0.0 { self.floor } else { above(self.floor, left / (0.1 + 0.9 * left)) }
    }
}

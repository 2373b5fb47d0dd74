//! `cosine_warmup_with_min_lr`: as `cosine_with_min_lr`, but one step ahead of it, and its warm-up begins at
//! `warmup_lr_rate` of the highest rate (or one step up a line from 0). Both are so in Transformers.
use super::{ScheduleForm, ScheduleSteps, above, cycles, lowest, one_lowest, share, wave};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

/// `num_cycles`, the lowest rate as a share of the highest, and `warmup_lr_rate`.
#[derive(Debug)]
pub(super) struct CosineWarmupWithMinLr {
    cycles: f64,
    floor: f64,
    /// The first rate as a share of the highest; none begins at `1 / warmup`.
    start: Option<f64>,
}

impl ScheduleForm for CosineWarmupWithMinLr {
    fn of(args: &mut Reader<'_>, run: &mut ScheduleSteps) -> Result<Self> {
        let (cycles, floor) = (cycles(args)?, lowest(args, run.peak)?.ok_or_else(one_lowest)?);
        Ok(Self { cycles, floor, start: share(args, "warmup_lr_rate")? })
    }

    fn rising(&self, step: u64, run: &ScheduleSteps) -> f64 {
        let (at, warmup) = (step as f64, run.warmup as f64);
        match self.start {
            None => (at + 1.0) / warmup,
            Some(start) => start + (1.0 - start) * at / (warmup - 1.0).max(1.0),
        }
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        let progress = (step as f64 - run.warmup as f64 + 1.0) / run.span();
        above(self.floor, wave(self.cycles, progress))
    }
}

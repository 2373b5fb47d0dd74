//! `cosine_with_min_lr`: half a cosine down to `min_lr`, or to the share `min_lr_rate` of the highest rate.
use super::{ScheduleForm, ScheduleSteps, above, cycles, lowest, one_lowest, wave};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

/// `num_cycles` (0.5 falls once), and the lowest rate as a share of the highest.
#[derive(Debug)]
pub(super) struct CosineWithMinLr {
    cycles: f64,
    floor: f64,
}

impl ScheduleForm for CosineWithMinLr {
    fn of(args: &mut Reader<'_>, run: &mut ScheduleSteps) -> Result<Self> {
        Ok(Self { cycles: cycles(args)?, floor: lowest(args, run.peak)?.ok_or_else(one_lowest)? })
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        above(self.floor, wave(self.cycles, run.progress(step)))
    }
}

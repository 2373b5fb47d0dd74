//! `cosine`: half a cosine down to 0, `(1 + cos(2 pi num_cycles p)) / 2` (without restarts; Loshchilov and Hutter,
//! "SGDR", 2017, <https://arxiv.org/abs/1608.03983>).
use super::{ScheduleForm, ScheduleSteps, cycles, wave};
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

/// `num_cycles`: periods of the cosine; 0.5 falls once.
#[derive(Debug)]
pub(super) struct Cosine {
    cycles: f64,
}

impl ScheduleForm for Cosine {
    fn of(args: &mut Reader<'_>, _: &mut ScheduleSteps) -> Result<Self> {
        Ok(Self { cycles: cycles(args)? })
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        wave(self.cycles, run.progress(step)).max(0.0)
    }
}

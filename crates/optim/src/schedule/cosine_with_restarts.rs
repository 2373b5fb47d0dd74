//! `cosine_with_restarts`: `num_cycles` half cosines, each from the highest rate to 0 (Loshchilov and Hutter, "SGDR",
//! 2017, <https://arxiv.org/abs/1608.03983>): `(1 + cos(pi (num_cycles p mod 1))) / 2`.
use super::{ScheduleForm, ScheduleSteps};
use std::f64::consts::PI;
use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;

/// `num_cycles`: how often the rate falls.
#[derive(Debug)]
pub(super) struct CosineWithRestarts {
    cycles: f64,
}

impl ScheduleForm for CosineWithRestarts {
    fn of(args: &mut Reader<'_>, _: &mut ScheduleSteps) -> Result<Self> {
        Ok(Self { cycles: args.count("num_cycles", 1)?.unwrap_or(1) as f64 })
    }

    fn after(&self, step: u64, run: &ScheduleSteps) -> f64 {
        let progress = run.progress(step);
        if progress >= 1.0 { 0.0 } else { (0.5 * (1.0 + (PI * ((self.cycles * progress) % 1.0)).cos())).max(0.0) }
    }
}

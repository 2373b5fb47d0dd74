//! `constant` and `constant_with_warmup`.
use super::{Form, Run};

/// The highest rate from the end of warm-up on.
#[derive(Debug)]
pub(super) struct Constant;

impl Constant {
    /// `constant`, which takes no notice of a warm-up.
    pub(super) const fn at_once(run: &mut Run) -> Self {
        run.warmup = 0;
        Self
    }
}

impl Form for Constant {
    fn after(&self, _step: u64, _run: &Run) -> f64 {
        1.0
    }
}

/// The warm-up of schedule-free optimizers: its first step has not rate 0 but `peak / warmup`.
#[derive(Debug)]
pub(super) struct ScheduleFree;

impl Form for ScheduleFree {
    fn rising(&self, step: u64, run: &Run) -> f64 {
        (step as f64 + 1.0) / run.warmup as f64
    }

    fn after(&self, _step: u64, _run: &Run) -> f64 {
        1.0
    }
}

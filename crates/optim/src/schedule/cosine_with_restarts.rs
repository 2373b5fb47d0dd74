//! `cosine_with_restarts`: half waves, each from the top.
use super::{Form, Run};
use tunesmith_config::arguments::Reader;
use tunesmith_base::error::Result;
use std::f64::consts::PI;

/// So many half waves.
#[derive(Debug)]
pub(super) struct CosineWithRestarts {
    cycles: f64,
}

impl Form for CosineWithRestarts {
    fn of(args: &mut Reader<'_>, _: &mut Run) -> Result<Self> {
        Ok(Self { cycles: args.count("num_cycles", 1)?.unwrap_or(1) as f64 })
    }

    fn after(&self, step: u64, run: &Run) -> f64 {
        let progress = run.progress(step);
        if progress >= 1.0 { 0.0 } else { (0.5 * (1.0 + (PI * ((self.cycles * progress) % 1.0)).cos())).max(0.0) }
    }
}

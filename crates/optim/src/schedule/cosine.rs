//! `cosine`: half a cosine down to 0.
use super::{Form, Run, cycles, wave};
use tunesmith_config::arguments::Reader;
use tunesmith_base::error::Result;

/// So many waves; 0.5 falls once.
#[derive(Debug)]
pub(super) struct Cosine {
    cycles: f64,
}

impl Form for Cosine {
    fn of(args: &mut Reader<'_>, _: &mut Run) -> Result<Self> {
        Ok(Self { cycles: cycles(args)? })
    }

    fn after(&self, step: u64, run: &Run) -> f64 {
        wave(self.cycles, run.progress(step)).max(0.0)
    }
}

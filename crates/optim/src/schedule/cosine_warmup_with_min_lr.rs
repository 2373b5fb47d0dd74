//! `cosine_warmup_with_min_lr`: one step ahead of `cosine_with_min_lr`, and with a warm-up that begins above 0.
use super::{Form, Run, above, cycles, lowest, one_lowest, share, wave};
use tunesmith_config::arguments::Reader;
use tunesmith_base::error::Result;

/// Its arguments.
#[derive(Debug)]
pub(super) struct CosineWarmupWithMinLr {
    cycles: f64,
    floor: f64,
    /// The first rate by the peak; none: `1 / warmup`.
    start: Option<f64>,
}

impl Form for CosineWarmupWithMinLr {
    fn of(args: &mut Reader<'_>, run: &mut Run) -> Result<Self> {
        let (cycles, floor) = (cycles(args)?, lowest(args, run.peak)?.ok_or_else(one_lowest)?);
        Ok(Self { cycles, floor, start: share(args, "warmup_lr_rate")? })
    }

    fn rising(&self, step: u64, run: &Run) -> f64 {
        let (at, warmup) = (step as f64, run.warmup as f64);
        match self.start {
            None => (at + 1.0) / warmup,
            Some(start) => start + (1.0 - start) * at / (warmup - 1.0).max(1.0),
        }
    }

    fn after(&self, step: u64, run: &Run) -> f64 {
        let progress = (step as f64 - run.warmup as f64 + 1.0) / run.span();
        above(self.floor, wave(self.cycles, progress))
    }
}

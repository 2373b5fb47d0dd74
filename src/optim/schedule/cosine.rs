//! `cosine`, `cosine_with_min_lr`, `cosine_warmup_with_min_lr` and `cosine_with_restarts`.
use super::{Form, Run, above, cycles, share, wave};
use crate::config::arguments::Reader;
use crate::error::{Error, Result};
use std::f64::consts::PI;

/// So many waves (0.5 falls once), down to a share of the peak.
#[derive(Debug)]
pub(super) struct Cosine {
    cycles: f64,
    floor: f64,
}

impl Cosine {
    pub(super) fn of(args: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { cycles: cycles(args)?, floor: 0.0 })
    }

    pub(super) fn with_floor(args: &mut Reader<'_>, run: &Run) -> Result<Self> {
        Ok(Self { cycles: cycles(args)?, floor: least(args, run.peak)? })
    }
}

impl Form for Cosine {
    fn after(&self, step: u64, run: &Run) -> f64 {
        above(self.floor, wave(self.cycles, run.progress(step)))
    }
}

/// One step ahead, and with a warm-up that begins above 0.
#[derive(Debug)]
pub(super) struct Warmup {
    cycles: f64,
    floor: f64,
    /// The first rate by the peak; none: `1 / warmup`.
    start: Option<f64>,
}

impl Warmup {
    pub(super) fn of(args: &mut Reader<'_>, run: &Run) -> Result<Self> {
        Ok(Self { cycles: cycles(args)?, floor: least(args, run.peak)?, start: share(args, "warmup_lr_rate")? })
    }
}

impl Form for Warmup {
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

/// So many half waves, each from the top.
#[derive(Debug)]
pub(super) struct Restarts {
    cycles: f64,
}

impl Restarts {
    pub(super) fn of(args: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { cycles: args.count("num_cycles", 1)?.unwrap_or(1) as f64 })
    }
}

impl Form for Restarts {
    fn after(&self, step: u64, run: &Run) -> f64 {
        let progress = run.progress(step);
        if progress >= 1.0 { 0.0 } else { (0.5 * (1.0 + (PI * ((self.cycles * progress) % 1.0)).cos())).max(0.0) }
    }
}

/// `min_lr` or `min_lr_rate`, as a share of the peak.
fn least(args: &mut Reader<'_>, peak: f64) -> Result<f64> {
    let rate = args.number("min_lr", "a number of at least 0", |number| number >= 0.0)?;
    match (rate, share(args, "min_lr_rate")?) {
        (Some(rate), None) if rate <= peak && peak > 0.0 => Ok(rate / peak),
        (Some(rate), None) => Err(Error::config(format!(
            "train.lr_scheduler_kwargs: min_lr = {rate} is not below train.learning_rate = {peak}"
        ))
        .hint("the schedule falls to it")),
        (None, Some(share)) => Ok(share),
        _ => Err(Error::config("train.lr_scheduler_kwargs: expected one of min_lr and min_lr_rate")
            .hint("for example lr_scheduler_kwargs: {min_lr_rate: 0.1}")),
    }
}

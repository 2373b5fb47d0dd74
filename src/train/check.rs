//! One measured pass of a configuration's largest batch, for `memory-check`.
use super::gauge::{Gauge, Line, Measured};
use super::prepare::{self, Parts};
use super::probe::Asked;
use super::progress::Observer;
use super::{engine, load, settle};
use crate::config::{Checkpointing, Config, Resolved};
use crate::data;
use crate::error::Result;
use crate::memory::{self, Budget, limits};

/// What the largest pass of a run holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Largest {
    /// The pass, with what the run holds beside it.
    pub pass: Measured,
    /// Bytes of the model and the data before any pass.
    pub loaded: u64,
    /// Bytes of the optimizer's state and averages, and of the copy from which checkpoints are written.
    pub optimizer: u64,
    /// Bytes by tokens, from this pass and one of half its length.
    pub line: Option<Line>,
    /// What may be held.
    pub budget: Option<u64>,
    /// The configuration as the run would use it, sizes that are left to measurement aside.
    pub config: Config,
}

/// Loads what `resolved` trains and measures the largest pass that its data can make; with `batch_size: auto` that of one
/// row, or of `max_tokens_per_pass`. Writes nothing but the cache of tokens.
///
/// # Errors
/// Those of preparing and loading.
pub fn largest(resolved: &Resolved, observer: &dyn Observer) -> Result<Largest> {
    let budget = resolved.config.train.memory_budget.map(|bytes| bytes.0).or_else(limits::usable);
    let _budget = budget.map(Budget::new);
    memory::guarded(|| {
        engine::choose(&resolved.config);
        let parts = prepare::parts(resolved, observer, |_, _| Ok(None))?;
        let Parts { arch, weights, config, stack, adapter, .. } = &parts;
        let dataset = data::load(config, &parts.model_dir, arch.vocab_size, observer)?;
        let sampler = dataset.sampler(config, 1);
        let mut model = load::fresh(arch, weights.as_ref(), config, stack, adapter.as_ref())?;
        model.params.zero_grads();
        let loaded = memory::live();
        let mut gauge = Gauge::new(&mut model, &dataset.train, &sampler, settle::later(&parts));
        let asked = Asked::of(config, 1);
        let lengths = gauge.lengths();
        let (longest, rows) = (lengths.first().copied().unwrap_or(0), asked.batch_size.or(1));
        let whole: usize = lengths.iter().cycle().take(rows).sum();
        let tokens = asked.max_tokens_per_pass.map_or(whole, |limit| whole.min(limit.max(longest)));
        let checkpointing = match asked.checkpointing {
            Checkpointing::Auto => Checkpointing::CHEAP,
            given @ Checkpointing::Blocks { .. } => given,
        };
        let pass = gauge.pass(tokens, checkpointing)?;
        gauge.pass((tokens / 2).max(1), checkpointing)?;
        let line = Line::through(&gauge.passes);
        drop(gauge);
        Ok(Largest { pass, loaded, optimizer: settle::later(&parts), line, budget, config: parts.config.clone() })
    })
}

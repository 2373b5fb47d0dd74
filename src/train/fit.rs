//! Steps and validations within the memory budget. What does not fit is done again with the same rows in smaller passes;
//! that stays so for the rest of the run, and for what is resumed from it. What one rank has no room for, all cut alike.
use super::feed;
use super::gauge::Gauge;
use super::progress::Event;
use super::session::Session;
use super::step::{Attempt, StepStats, attempt};
use crate::config::{Checkpointing, ConfigValue as _};
use crate::data::{Batch, Step};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::plan::{grouped, human_bytes};

/// Sequences in a batch.
const fn sequences(batch: &Batch) -> usize {
    batch.cu_seqlens.len().saturating_sub(1)
}

impl Session<'_> {
    /// The most tokens of a pass: what the configuration says, or less where memory asked for it.
    pub(super) fn pass_limit(&self) -> Option<usize> {
        let configured = self.prepared.config.train.max_tokens_per_pass;
        self.state.max_tokens_per_pass.into_iter().chain(configured).min()
    }

    /// One optimizer step over `rows`. A pass that does not fit is cut in half, and the whole step done again: nothing has
    /// been updated yet, and the step's loss and gradient do not depend on the cuts.
    ///
    /// # Errors
    /// Those of [`attempt`]; [`Kind::Memory`]: a single row does not fit.
    pub(super) fn step_within(&mut self, rows: &Step, rate: f64) -> Result<StepStats> {
        loop {
            let batches = feed::batches_of(&self.prepared.dataset.train, rows, self.pass_limit(), self.comm.world())?;
            let max_grad_norm = self.prepared.config.train.max_grad_norm;
            match attempt(&mut self.model, &mut self.optimizer, &*self.comm, &batches, rate, max_grad_norm)? {
                Attempt::Done(stats) => return Ok(stats),
                Attempt::TooLarge { micro_batch, error } => {
                    // Ranks that are threads share the budget: what lies idle here may be what another lacks.
                    self.model.release();
                    if let Some(index) = micro_batch {
                        self.give_way(&batches[index], error, true)?;
                    }
                    self.agree_on_passes()?;
                }
            }
        }
    }

    /// Takes over what another rank had to cut.
    ///
    /// # Errors
    /// [`Kind::Peer`]: a rank is gone.
    pub(super) fn agree_on_passes(&mut self) -> Result<()> {
        let full = u64::from(self.prepared.config.train.gradient_checkpointing == Checkpointing::FULL);
        let own = [self.state.max_tokens_per_pass.map_or(u64::MAX, |most| most as u64), full];
        let all = self.comm.collect(&own)?;
        let (limits, fulls) = (all.iter().step_by(2), all.iter().skip(1).step_by(2));
        let least = limits.copied().min().filter(|&most| most < u64::MAX);
        self.state.max_tokens_per_pass = least.map(|most| most as usize);
        if full == 0 && fulls.copied().max() == Some(1) {
            self.keep_in_blocks(Checkpointing::FULL);
        }
        Ok(())
    }

    /// The sums of the validation rows' losses, weights and label tokens.
    ///
    /// # Errors
    /// Those of the engine; [`Kind::Memory`]: a single row does not fit.
    pub(super) fn loss_within(&mut self, rows: &[usize]) -> Result<(f64, f64, u64)> {
        loop {
            let Some(validation) = &self.prepared.dataset.validation else { return Ok((0.0, 0.0, 0)) };
            let batches = feed::batches(validation, &vec![vec![rows.to_vec()]], self.pass_limit())?;
            let (mut sum, mut weight, mut label_tokens) = (0.0, 0.0, 0);
            let mut failed = None;
            for batch in &batches {
                match self.model.loss(batch) {
                    Ok(loss) => sum += loss,
                    Err(error) if error.kind() == Kind::Memory => {
                        failed = Some((batch, error));
                        break;
                    }
                    Err(error) => return Err(error),
                }
                weight += batch.label_weight();
                label_tokens += batch.label_tokens() as u64;
            }
            match failed {
                None => return Ok((sum, weight, label_tokens)),
                Some((batch, error)) => self.give_way(batch, error, false)?,
            }
        }
    }

    /// Makes passes smaller than `batch`, or blocks keep less; says so once for each change.
    fn give_way(&mut self, batch: &Batch, error: Error, training: bool) -> Result<()> {
        self.model.release();
        let (tokens, step) = (batch.tokens.len(), self.state.step + u64::from(training));
        let budget = human_bytes(memory::budget().unwrap_or(u64::MAX));
        let what = if training { "step" } else { "the validation after step" };
        let found = format!(
            "{what} {step}: a pass of {} tokens does not fit into the memory budget of {budget}",
            grouped(tokens as u64)
        );
        if sequences(batch) > 1 {
            let limit = (tokens / 2).max(1);
            self.state.max_tokens_per_pass = Some(limit);
            self.observer.event(&Event::Notice(&format!(
                "{found}; it is done again with the same rows, from here on in passes of at most {} tokens",
                grouped(limit as u64)
            )));
            return Ok(());
        }
        let config = &self.prepared.config;
        let auto = self.resolved.config.train.gradient_checkpointing == Checkpointing::Auto;
        if training && auto && config.train.gradient_checkpointing != Checkpointing::FULL {
            self.keep_in_blocks(Checkpointing::FULL);
            self.observer.event(&Event::Notice(&format!(
                "{found}, and is one row; it is done again, from here on with train.gradient_checkpointing: true"
            )));
            return Ok(());
        }
        if !training {
            return Err(error.context(found).hint(format!(
                "what helps: shorter validation rows (model.max_seq_len below {tokens}); or a larger train.memory_budget"
            )));
        }
        // The optimizer's state is held already: nothing comes later.
        let Self { model, prepared, .. } = self;
        let mut gauge = Gauge::alone(model, (&prepared.dataset.train, &prepared.sampler), prepared.together);
        let (config, weights) = (&prepared.config, prepared.weights.as_ref());
        let error = gauge.too_long(tokens, config.train.gradient_checkpointing, (config, weights))?;
        Err(error.context(format!("step {step}")))
    }

    /// From here on blocks keep this, also after a resume.
    fn keep_in_blocks(&mut self, checkpointing: Checkpointing) {
        self.model.set_checkpointing(checkpointing);
        self.prepared.config.train.gradient_checkpointing = checkpointing;
        self.state.gradient_checkpointing = Some(checkpointing.to_json());
    }
}

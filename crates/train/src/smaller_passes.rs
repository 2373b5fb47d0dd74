//! Keeps steps and validations within the memory budget. A step that does not fit is repeated with the same rows in smaller
//! passes. The smaller limit holds for the rest of the run, for all ranks, and after a resume.
use super::autobatch::measure_pass::PassMeasurer;
use super::micro_batches;
use super::session::Session;
use super::step::{Attempt, StepStats, attempt};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_config::{Checkpointing, ConfigValue as _};
use tunesmith_data::{Batch, Step};
use tunesmith_device::{Late, memory};
use tunesmith_model::Model;
use tunesmith_plan::{grouped, human_bytes};
use tunesmith_telemetry::progress::Event;

const fn sequences(batch: &Batch) -> usize {
    batch.cu_seqlens.len().saturating_sub(1)
}

impl Session<'_> {
    /// The maximum tokens of a pass: as planned, or less once memory has run out.
    pub(crate) fn pass_limit(&self) -> Option<usize> {
        let configured = self.plan.batch.max_tokens_per_pass;
        self.state.max_tokens_per_pass.into_iter().chain(configured).min()
    }

    /// Runs one optimizer step over `rows`. If a pass does not fit, halves the pass limit and repeats the whole step. Nothing
    /// was updated by then, and the loss and gradient of the step do not depend on the split.
    ///
    /// # Errors
    /// Those of [`attempt`]; [`Kind::Memory`]: a single row does not fit.
    pub(crate) fn step_within(&mut self, rows: &Step, rate: f64) -> Result<Late<StepStats>> {
        loop {
            let batches =
                micro_batches::batches_of_rank(&self.dataset.train, rows, self.pass_limit(), self.comm.world())?;
            if self.dataset.train.has_pictures() && self.state.step + 1 < self.plan.steps.total_steps {
                micro_batches::read_ahead(&self.dataset.train, &self.sampler.peek(), self.comm.world());
            }
            let max_grad_norm = self.plan.optimizer.max_grad_norm;
            match attempt(
                &mut self.model,
                &mut self.optimizer,
                &*self.comm,
                &mut self.sharing,
                &batches,
                rate,
                max_grad_norm,
            )? {
                Attempt::Done(stats) => return Ok(stats),
                Attempt::TooLarge { micro_batch, error } => {
                    // Ranks of one process share the budget, so idle buffers of one may be missing at another.
                    self.model.release();
                    if let Some(index) = micro_batch {
                        self.shrink_passes(&batches[index], error, true)?;
                    }
                    self.agree_on_passes()?;
                }
            }
        }
    }

    /// Adopts the smallest pass limit and the checkpointing of all ranks, and reports a change.
    ///
    /// # Errors
    /// [`Kind::Peer`]: a rank is gone.
    pub(crate) fn agree_on_passes(&mut self) -> Result<()> {
        let full = self.checkpointing == Checkpointing::FULL;
        let own = self.state.max_tokens_per_pass;
        let all = self.comm.collect(&[own.map_or(u64::MAX, |most| most as u64), u64::from(full)])?;
        let least = all.iter().step_by(2).copied().min().unwrap_or(u64::MAX);
        let mut taken = Vec::new();
        if own.is_none_or(|own| least < own as u64) && least < u64::MAX {
            self.state.max_tokens_per_pass = Some(least as usize);
            taken.push(format!("passes of at most {} tokens", grouped(least)));
        }
        if !full && all.iter().skip(1).step_by(2).any(|&full| full == 1) {
            self.set_checkpointing(Checkpointing::FULL);
            taken.push("train.gradient_checkpointing: true".to_owned());
        }
        if !taken.is_empty() {
            let text =
                format!("another rank has no memory for its pass; from now on all ranks use {}", taken.join(" and "));
            self.observer.event(&Event::Notice(&text));
        }
        Ok(())
    }

    /// The sums of losses, of weights, and of label tokens over the validation `rows`.
    ///
    /// # Errors
    /// Those of the engine; [`Kind::Memory`]: a single row does not fit.
    pub(crate) fn loss_within(&mut self, rows: &[usize]) -> Result<(f64, f64, u64)> {
        let measure =
            |model: &Model, batch: &Batch| Ok((model.loss(batch)?, batch.label_weight(), batch.label_tokens() as u64));
        let found = self.passes_within(rows, &measure)?;
        Ok(found.into_iter().fold((0.0, 0.0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1, sum.2 + it.2)))
    }

    /// The outputs of the classification head for the validation `rows`: `[rows, outputs]`.
    ///
    /// # Errors
    /// As [`Session::loss_within`].
    pub(crate) fn scores_within(&mut self, rows: &[usize]) -> Result<Vec<f32>> {
        Ok(self.passes_within(rows, &|model, batch| model.logits(batch, &batch.ends()))?.concat())
    }

    /// Calls `measure` for each pass over the validation rows. Returns the results in order.
    fn passes_within<T>(&mut self, rows: &[usize], measure: &dyn Fn(&Model, &Batch) -> Result<T>) -> Result<Vec<T>> {
        loop {
            let Some(validation) = &self.dataset.validation else { return Ok(Vec::new()) };
            let batches = micro_batches::batches(validation, &vec![vec![rows.to_vec()]], self.pass_limit())?;
            let mut found = Vec::with_capacity(batches.len());
            let mut failed = None;
            for batch in &batches {
                match measure(&self.model, batch) {
                    Ok(measured) => found.push(measured),
                    Err(error) if error.kind() == Kind::Memory => {
                        failed = Some((batch, error));
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
            match failed {
                None => return Ok(found),
                Some((batch, error)) => self.shrink_passes(batch, error, false)?,
            }
        }
    }

    /// Lowers the pass limit below `batch`, or else lets blocks recompute. Reports each change once.
    fn shrink_passes(&mut self, batch: &Batch, error: Error, training: bool) -> Result<()> {
        self.model.release();
        let (tokens, step) = (batch.tokens.len(), self.state.step + u64::from(training));
        let budget = human_bytes(memory::budget(self.model.device()).unwrap_or(u64::MAX));
        let what = if training { "step" } else { "the validation after step" };
        let found = format!(
            "{what} {step}: a pass of {} tokens does not fit into the memory budget of {budget}",
            grouped(tokens as u64)
        );
        if sequences(batch) > 1 {
            let limit = (tokens / 2).max(1);
            self.state.max_tokens_per_pass = Some(limit);
            self.observer.event(&Event::Notice(&format!(
                "{found}; repeating it with the same rows, from now on in passes of at most {} tokens",
                grouped(limit as u64)
            )));
            return Ok(());
        }
        let may_recompute = self.plan.chosen.checkpointing && self.checkpointing != Checkpointing::FULL;
        if training && may_recompute {
            self.set_checkpointing(Checkpointing::FULL);
            self.observer.event(&Event::Notice(&format!(
                "{found}, and is one row; repeating it, from now on with train.gradient_checkpointing: true"
            )));
            return Ok(());
        }
        if self.model.shards().is_sharded() && training {
            // Sharded weights need the other ranks for a pass, so this rank alone cannot measure.
            let help =
                "shorter rows (model.max_seq_len), train.gradient_checkpointing: true, or a larger train.memory_budget";
            return Err(error.context(found).hint(format!("use {help}")));
        }
        if !training {
            return Err(error.context(found).hint(format!(
                "use shorter validation rows (model.max_seq_len below {tokens}); or a larger train.memory_budget"
            )));
        }
        // The optimizer's state is already allocated, so no later bytes are added.
        let Self { model, source, dataset, sampler, plan, checkpointing, .. } = self;
        let mut measurer = PassMeasurer::alone(model, &dataset.train, sampler, plan.ranks.in_process);
        let error = measurer.too_long(tokens, *checkpointing, &source.memory())?;
        Err(error.context(format!("step {step}")))
    }

    /// Changes what blocks save, also after a resume.
    fn set_checkpointing(&mut self, checkpointing: Checkpointing) {
        self.model.set_checkpointing(checkpointing);
        self.checkpointing = checkpointing;
        self.state.gradient_checkpointing = Some(checkpointing.to_json());
    }
}

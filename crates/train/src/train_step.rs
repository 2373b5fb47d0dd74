//! One optimizer step of a session: data, update, averages, metrics.
use std::time::Instant;

use super::session::Session;
use super::step::UnsettledStep;
use tunesmith_base::error::{Kind, Result};
use tunesmith_optim::LossScaler;
use tunesmith_parallel::timeline::Timeline;
use tunesmith_telemetry::metrics::{MetricsLine, StepLine, finite};
use tunesmith_telemetry::progress::Event;
use tunesmith_telemetry::{machine, norms};

impl Session<'_> {
    /// Runs one optimizer step, and records its metrics once its results are there: at the latest in the next step.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Numeric`]: too many steps in a row were not finite, or the values of ranks differ. Errors of the
    /// engine and the disk.
    pub fn step(&mut self) -> Result<()> {
        let began = Instant::now();
        let rows = self.sampler.next_step();
        let rate = self.plan.schedule.lr(self.state.step);
        let shown = self.plan.logging.timeline_step == Some(self.state.step + 1);
        self.sharing.timeline = shown.then(Timeline::default);
        let every = self.plan.replica_check_steps;
        // Ranks with shards have no values in common to compare.
        let copies = !self.sharing.shares_values();
        let compares = copies && every > 0 && (self.state.step + 1).is_multiple_of(every);
        self.sharing.compares = compares.then_some(self.state.step + 1);
        let updates = self.optimizer.step;
        let done = self.step_within(&rows, rate);
        #[cfg(test)]
        let done = done.map(tests::delay);
        // The results of the step before are there by now. They are recorded even if this step failed.
        self.settle()?;
        let stats = match done {
            Err(error) if error.kind() == Kind::Numeric => return Err(self.end_on_all_ranks(error)),
            done => done?,
        };
        if let Some(timeline) = self.sharing.timeline.take() {
            self.observer.event(&Event::Notice(&timeline.text(self.state.step + 1)));
        }
        let updated = self.optimizer.step > updates;
        if let Some(ema) = self.ema.as_mut().filter(|_| updated) {
            ema.update(self.model.params.values(), self.optimizer.step);
        }
        self.state.step += 1;
        self.state.epoch = self.sampler.epoch();
        let ready = stats.is_ready();
        self.unsettled = Some(UnsettledStep {
            stats,
            learning_rate: rate,
            took: began.elapsed(),
            peak_bytes: machine::peak_bytes(self.model.device()),
            loss_scale: self.optimizer.scaler.as_ref().map(LossScaler::scale),
        });
        if ready || self.needs_results() {
            self.settle()?;
        }
        self.record_norms()?;
        if self.state.nonfinite_in_a_row >= self.plan.max_nonfinite_steps {
            return Err(self.diverged(None));
        }
        Ok(())
    }

    /// Whether the results of the last step must be recorded before the next one begins. They must if this step may be the
    /// non-finite one that ends the run, or if the ranks exchange their results. All ranks decide the same.
    fn needs_results(&self) -> bool {
        self.state.nonfinite_in_a_row + 1 >= self.plan.max_nonfinite_steps
            || self.comm.world().size > 1 && self.is_shown()
    }

    /// Whether the last step is one that is logged.
    fn is_shown(&self) -> bool {
        self.state.step.is_multiple_of(self.plan.logging.steps) || self.state.step == self.plan.steps.total_steps
    }

    /// Waits for the results of the last step and records them, unless that is done already. Everything that depends on the
    /// results calls this first: a checkpoint, an evaluation, the end of the run.
    ///
    /// # Errors
    /// Those of the disk; [`tunesmith_base::Kind::Peer`].
    pub fn settle(&mut self) -> Result<()> {
        let Some(UnsettledStep { stats, learning_rate, took, peak_bytes, loss_scale }) = self.unsettled.take() else {
            return Ok(());
        };
        let stats = stats.wait();
        self.state.tokens += stats.tokens;
        self.state.label_tokens += stats.label_tokens;
        // An overflow that lowers the loss scale is normal; the optimizer counts it.
        let nonfinite = stats.skipped && !stats.overflow;
        self.state.nonfinite_total += u64::from(nonfinite);
        self.state.nonfinite_in_a_row = if nonfinite { self.state.nonfinite_in_a_row + 1 } else { 0 };
        self.overflows_in_a_row = if stats.overflow { self.overflows_in_a_row + 1 } else { 0 };
        let step = self.state.step;
        let loss = finite(stats.loss);
        self.pace.advance(stats.tokens, loss, took);
        self.done.steps += 1;
        self.done.tokens += stats.tokens;
        self.done.stepping += took;
        let counts = self.source.arch.score.as_ref().is_some_and(|head| !head.is_number());
        let share = |[right, rows]: [u64; 2]| (counts && rows > 0).then(|| right as f64 / rows as f64);
        let found = [stats.right, stats.label_tokens];
        self.right_of_rows = [self.right_of_rows[0] + found[0], self.right_of_rows[1] + found[1]];
        let line = StepLine {
            step,
            epoch: self.state.epoch,
            loss,
            accuracy: share(found),
            learning_rate,
            grad_norm: finite(stats.grad_norm),
            label_tokens: stats.label_tokens,
            tokens: stats.tokens,
            tokens_per_second: stats.tokens as f64 / took.as_secs_f64().max(1e-9),
            peak_bytes,
            loss_scale,
        };
        self.write(&MetricsLine::Step(line.clone()))?;
        let shown = self.is_shown();
        let by_rank = if shown { self.by_rank(stats.rank_loss, line.peak_bytes)? } else { Vec::new() };
        // The accuracy since the last step that was shown, because one step has too few rows.
        let accuracy = share(self.right_of_rows);
        if shown {
            self.right_of_rows = [0; 2];
        }
        // TensorBoard expands the first groups of the alphabet, so `eval` and `train` contain only the losses.
        if let Some(events) = self.events.as_mut().filter(|_| shown) {
            if let Some(accuracy) = accuracy {
                events.scalars(step, &[("train/accuracy", accuracy)])?;
            }
            let by_rank: Vec<(&str, f64)> = by_rank.iter().map(|(tag, value)| (&**tag, *value)).collect();
            events.scalars(step, &by_rank)?;
            events.scalars(
                step,
                &[
                    ("train/loss", stats.loss),
                    ("train/learning_rate", learning_rate),
                    ("train/grad_norm", stats.grad_norm),
                    ("train/tokens_per_second", line.tokens_per_second),
                    ("train/epoch", line.epoch),
                    ("train/peak_bytes", line.peak_bytes as f64),
                ],
            )?;
        }
        self.observer.event(&Event::Step { line: &line, pace: &self.pace, skipped: stats.skipped });
        Ok(())
    }

    /// Writes the norms of the trained tensors as they are now to TensorBoard, about fifty times a run.
    fn record_norms(&mut self) -> Result<()> {
        let (step, total) = (self.state.step, self.plan.steps.total_steps);
        if let Some(events) = &mut self.events
            && !self.sharing.shares_values()
            && (step == 1 || step == total || step.is_multiple_of((total / 50).max(1)))
        {
            for (tag, norms) in norms::by_kind(&self.model.params) {
                events.histogram(step, &tag, &norms)?;
            }
        }
        Ok(())
    }

    /// The loss and the memory of each rank at a step, as points for TensorBoard; empty with one rank.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn by_rank(&self, loss: f64, peak_bytes: u64) -> Result<Vec<(String, f64)>> {
        if self.comm.world().size == 1 {
            return Ok(Vec::new());
        }
        let all = self.comm.collect(&[loss, peak_bytes as f64])?;
        let points = all.chunks_exact(2).enumerate().flat_map(|(rank, values)| {
            [(format!("world/loss_rank_{rank}"), values[0]), (format!("world/peak_bytes_rank_{rank}"), values[1])]
        });
        Ok(points.collect())
    }
}

#[cfg(test)]
mod tests;

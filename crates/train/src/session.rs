//! A run with its model loaded: the state between two optimizer steps, and how it steps, evaluates, records and saves.
use std::path::Path;
use std::time::{Duration, Instant};

use super::lock::DirLock;
use super::predict::{Predictor, Scores};
use super::prepare::Prepared;
use super::ranks;
use super::signals::Stop;
use super::step::StepStats;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_checkpoint::{Background, Stamp, TrainState, Written};
use tunesmith_comm::Collectives;
use tunesmith_config::{Config, EvalStrategy, Resolved, SaveStrategy, greater_is_better};
use tunesmith_data::Split;
use tunesmith_eval::metrics::Likelihood;
use tunesmith_model::Model;
use tunesmith_optim::{Ema, LossScaler, Optimizer};
use tunesmith_parallel::ddp_zero::Sharing;
use tunesmith_parallel::fsdp::Gatherer;
use tunesmith_parallel::timeline::Timeline;
use tunesmith_telemetry::metrics::{EvalLine, Line, Metrics, StepLine, finite};
use tunesmith_telemetry::progress::{Event, Observer, Pace};
use tunesmith_telemetry::tensorboard::EventWriter;
use tunesmith_telemetry::{machine, norms};

/// Why a run stops whose output directory has gone.
pub const GONE: &str = "the output directory has gone";

/// What a run holds while it goes.
pub struct Session<'a> {
    /// The configuration and its sources.
    pub resolved: &'a Resolved,
    /// Whether to stop.
    pub stop: &'a Stop,
    /// Who is told.
    pub observer: &'a dyn Observer,
    /// Data, order, schedule.
    pub prepared: Prepared,
    /// The way to the other ranks.
    pub comm: Box<dyn Collectives>,
    /// How the frozen weights are shared with them, if they are.
    pub gatherer: Option<Gatherer>,
    /// The model with its trained values.
    pub model: Model,
    /// The optimizer with its state.
    pub optimizer: Optimizer,
    /// The moving average of the weights, if there is one; of what this rank keeps the state of.
    pub ema: Option<Ema>,
    /// Which rank keeps what.
    pub sharing: Sharing,
    /// Where the run stands between two steps.
    pub state: TrainState,
    /// Writes checkpoints beside the steps.
    pub saver: Background,
    /// The step of the last checkpoint that is durable.
    pub saved: u64,
    /// The step of the last checkpoint that was begun.
    pub begun: u64,
    /// Steps in a row that overflowed and lowered the loss scale.
    pub overflows_in_a_row: u64,
    /// A checkpoint was due while steps were being skipped: it is written after the first step that counts.
    pub save_is_owed: bool,
    /// `metrics.jsonl`, once writing has begun.
    pub metrics: Option<Metrics>,
    /// What was found in the place of one of the run's files.
    pub displaced: Option<String>,
    /// The event file.
    pub events: Option<EventWriter>,
    /// Of a classification the rows whose label was found, and all rows, since the last step that was logged.
    pub found: [u64; 2],
    /// Speed and remaining time.
    pub pace: Pace,
    /// What this process has done.
    pub done: Done,
    /// The stamp of the checkpoints.
    pub stamp: Stamp,
}

/// Work of this process, steps before a resume not counted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Done {
    /// Optimizer steps.
    pub steps: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Wall time before step 1.
    pub preparing: Duration,
    /// Wall time of the steps.
    pub stepping: Duration,
    /// Wall time of evaluations.
    pub evaluating: Duration,
    /// Wall time of checkpoints in which no step was made.
    pub saving: Duration,
    /// Time of writing them, beside the steps or not.
    pub writing: Duration,
    /// Time of hashing them, the base weights, and the checkpoint that the run goes on from.
    pub hashing: Duration,
}

impl Session<'_> {
    fn config(&self) -> &Config {
        &self.prepared.config
    }

    /// One optimizer step: data, update, the line in the metrics.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Numeric`] after too many steps in a row that were not finite, or a run of such steps only; the disk.
    pub fn step(&mut self) -> Result<()> {
        let began = Instant::now();
        let rows = self.prepared.sampler.next_step();
        let rate = self.prepared.schedule.lr(self.state.step);
        let shown = self.config().logging.timeline_step == Some(self.state.step + 1);
        self.sharing.timeline = shown.then(Timeline::default);
        let every = self.config().train.replica_check_steps;
        // Where every rank has values of its own there is nothing to compare.
        let copies = !self.sharing.shares_values();
        let compares = copies && every > 0 && (self.state.step + 1).is_multiple_of(every);
        self.sharing.compares = compares.then_some(self.state.step + 1);
        let stats = match self.step_within(&rows, rate) {
            Err(error) if error.kind() == Kind::Numeric => return Err(self.last_word(error)),
            stats => stats?,
        };
        if let Some(timeline) = self.sharing.timeline.take() {
            self.observer.event(&Event::Notice(&timeline.text(self.state.step + 1)));
        }
        if let Some(ema) = self.ema.as_mut().filter(|_| !stats.skipped) {
            ema.update(self.model.params.values(), self.optimizer.step);
        }
        self.state.step += 1;
        self.state.epoch = self.prepared.sampler.epoch();
        self.state.tokens += stats.tokens;
        self.state.label_tokens += stats.label_tokens;
        // What a lower loss scale answers is no failure; the optimizer counts it.
        let nonfinite = stats.skipped && !stats.overflow;
        self.state.nonfinite_total += u64::from(nonfinite);
        self.state.nonfinite_in_a_row = if nonfinite { self.state.nonfinite_in_a_row + 1 } else { 0 };
        self.record(&stats, rate, began.elapsed())?;
        self.overflows_in_a_row = if stats.overflow { self.overflows_in_a_row + 1 } else { 0 };
        if self.state.nonfinite_in_a_row >= self.config().train.max_nonfinite_steps as u64 {
            return Err(self.diverged(None));
        }
        Ok(())
    }

    /// Takes note of a checkpoint that was being written and is durable by now.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: it could not be written; the older ones stand.
    pub fn collect(&mut self) -> Result<()> {
        let written = self.saver.poll();
        self.note(written)
    }

    /// Looks whether the output directory is still there. Where it has gone a new one is made, and the run is asked to stop:
    /// what it knows by now is saved there.
    ///
    /// # Errors
    /// A new one cannot be made.
    pub fn output_has_gone(&mut self) -> Result<bool> {
        let Some(lock) = self.prepared.lock.as_mut().filter(|lock| !lock.is_there()) else { return Ok(false) };
        let fail =
            |error: Error| error.context("the output directory was removed or moved, and no new one can be made");
        lock.refuse_link()?;
        let mut new = DirLock::acquire(&self.prepared.parts.config.train.output_dir).map_err(fail)?;
        new.keep();
        *lock = new;
        self.stop.request(GONE);
        // What was being written has gone, too.
        let _ = self.saver.join();
        if !self.sharing.shares_state() {
            // What was saved has gone with it. Ranks that save together have to agree on that, and do so at their next save.
            (self.begun, self.saved) = (0, 0);
        }
        Ok(true)
    }

    /// Waits for the checkpoint that is being written.
    ///
    /// # Errors
    /// As [`Session::collect`].
    pub fn settle(&mut self) -> Result<()> {
        let began = Instant::now();
        let written = self.saver.join();
        self.done.saving += began.elapsed();
        self.note(written)
    }

    /// Takes note of what has been written.
    ///
    /// # Errors
    /// The failure that it is, with what is there all the same.
    pub fn note(&mut self, written: Result<Option<Written>>) -> Result<()> {
        let written = written.map_err(|error| {
            error.context(match self.saved {
                0 => "a checkpoint could not be written, and there is none before it".to_owned(),
                saved => format!("a checkpoint could not be written; that of step {saved} stands"),
            })
        })?;
        if let Some(Written { dir, step, took, hashing, kept }) = written {
            self.saved = step;
            self.done.writing += took;
            self.done.hashing += hashing;
            self.observer.event(&Event::Saved(&dir));
            self.tell_kept(&dir, kept.as_deref());
        }
        Ok(())
    }

    /// Says where what stood in the way of `dir` stays.
    pub fn tell_kept(&self, dir: &Path, kept: Option<&Path>) {
        if let Some(kept) = kept {
            let (dir, kept) = (dir.display(), kept.display());
            let text = format!("{dir} held files that tunesmith did not write: they stay in {kept}");
            self.observer.event(&Event::Notice(&text));
        }
    }

    /// What ends all ranks at the same step: once the checkpoint that is being written is durable, and all have come as
    /// far; a launcher ends the others when one has left. Says what is saved.
    pub fn last_word(&mut self, error: Error) -> Error {
        let settled = self.settle();
        // Who is gone changes nothing here.
        let _ = self.comm.barrier();
        let saved = match (settled, self.saved) {
            (Err(error), _) => error.message().to_owned(),
            (Ok(()), 0) => "no checkpoint was written".to_owned(),
            (Ok(()), saved) => format!("the last checkpoint is that of step {saved}"),
        };
        error.with_more(&saved)
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.write(line))
    }

    fn record(&mut self, stats: &StepStats, learning_rate: f64, took: Duration) -> Result<()> {
        let step = self.state.step;
        let loss = finite(stats.loss);
        self.pace.advance(stats.tokens, loss, took);
        self.done.steps += 1;
        self.done.tokens += stats.tokens;
        self.done.stepping += took;
        let counts = self.prepared.arch.score.as_ref().is_some_and(|head| !head.is_number());
        let share = |[right, rows]: [u64; 2]| (counts && rows > 0).then(|| right as f64 / rows as f64);
        let found = [stats.right, stats.label_tokens];
        self.found = [self.found[0] + found[0], self.found[1] + found[1]];
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
            peak_bytes: machine::peak_bytes(),
            loss_scale: self.optimizer.scaler.as_ref().map(LossScaler::scale),
        };
        self.write(&Line::Step(line.clone()))?;
        let total = self.prepared.batches.total_steps;
        let shown = step.is_multiple_of(self.config().train.logging_steps) || step == total;
        let by_rank = if shown { self.by_rank(stats.rank_loss, line.peak_bytes)? } else { Vec::new() };
        // Since the last step that was shown: a step has too few rows to say much.
        let accuracy = share(self.found);
        if shown {
            self.found = [0; 2];
        }
        // TensorBoard opens on the first groups of the alphabet: `eval` and `train` hold the losses alone.
        if let Some(events) = self.events.as_mut().filter(|_| shown) {
            if let Some(accuracy) = accuracy {
                events.scalars(step, &[("training/accuracy", accuracy)])?;
            }
            let by_rank: Vec<(&str, f64)> = by_rank.iter().map(|(tag, value)| (&**tag, *value)).collect();
            events.scalars(step, &by_rank)?;
            events.scalars(
                step,
                &[
                    ("train/loss", stats.loss),
                    ("training/learning_rate", learning_rate),
                    ("training/grad_norm", stats.grad_norm),
                    ("training/tokens_per_second", line.tokens_per_second),
                    ("training/epoch", line.epoch),
                    ("training/peak_bytes", line.peak_bytes as f64),
                ],
            )?;
        }
        if let Some(events) = &mut self.events
            && !self.sharing.shares_values()
            && (step == 1 || step == total || step.is_multiple_of((total / 50).max(1)))
        {
            for (tag, norms) in norms::by_kind(&self.model.params) {
                events.histogram(step, &tag, &norms)?;
            }
        }
        self.observer.event(&Event::Step { line: &line, pace: &self.pace, skipped: stats.skipped });
        Ok(())
    }

    /// Whether an evaluation belongs after the step that was done last, and has not been made.
    pub fn evaluation_is_due(&self) -> bool {
        let (step, batches) = (self.state.step, &self.prepared.batches);
        if step == 0 || self.state.evaluated_step == step || self.prepared.dataset.validation.is_none() {
            return false;
        }
        let train = &self.config().train;
        match train.eval_strategy {
            EvalStrategy::No => false,
            _ if train.final_eval && step == batches.total_steps => true,
            EvalStrategy::Steps => train.eval_steps.is_some_and(|every| step.is_multiple_of(every)),
            EvalStrategy::Epoch => batches.ends_epoch(step),
        }
    }

    /// The loss on the validation split, batch by batch, with the scores of answers where they are asked for, and what
    /// follows from it. Gives up without a result when the run is asked to stop: the evaluation is then made after the
    /// resume.
    ///
    /// # Errors
    /// The engine or the disk.
    pub fn evaluate(&mut self) -> Result<()> {
        let Some(validation) = &self.prepared.dataset.validation else { return Ok(()) };
        let (began, rows) = (Instant::now(), validation.len() as u64);
        self.observer.event(&Event::Evaluating { rows });
        let found = self.published(|session, _| session.validate())?;
        // Validation rows may be longer than any to train on: what was sized for them goes.
        self.model.release();
        let Some(Validation { loss, label_tokens, mut scores, confusion }) = found else { return Ok(()) };
        let step = self.state.step;
        // Before step 1 there are no weights of this run to be the best; those of a diverging run are not saved.
        let counts = step > 0 && !self.is_diverging();
        self.state.evaluated_step = step;
        let best = counts && {
            let measure = Measure::of(self.config());
            // Only the first rank has scores; what it found holds for all.
            let mut value = [if self.writes() { measure.value(loss, &scores)? } else { 0.0 }];
            self.comm.broadcast(&mut value, 0)?;
            let [value] = value;
            judge(&mut self.state, &measure, value, self.resolved.config.train.early_stopping_threshold)
        };
        // What these rows leave undefined JSON has no word for.
        scores.retain(|_, score| score.is_finite());
        let line = EvalLine {
            step,
            epoch: self.state.epoch,
            eval_loss: finite(loss),
            eval_label_tokens: label_tokens,
            eval_rows: rows,
            eval_seconds: began.elapsed().as_secs_f64(),
            eval_scores: scores,
            eval_confusion: confusion,
        };
        self.done.evaluating += began.elapsed();
        self.write(&Line::Eval(line.clone()))?;
        if let Some(events) = &mut self.events {
            events.scalars(step, &[("eval/loss", loss), ("validation/seconds", line.eval_seconds)])?;
            for (name, score) in &line.eval_scores {
                events.scalars(step, &[(&format!("validation/{name}"), *score)])?;
            }
        }
        self.observer.event(&Event::Eval { line: &line, best });
        Ok(())
    }

    /// Everything that evaluations will do, on a batch and a row, before step 1: what would fail after hours fails now.
    ///
    /// # Errors
    /// The engine, the disk, or [`tunesmith_base::Kind::Config`]: nothing measures `train.metric_for_best_model`.
    pub fn try_evaluation(&mut self) -> Result<()> {
        let train = &self.config().train;
        let rows = match &self.prepared.dataset.validation {
            Some(validation) if train.eval_strategy != EvalStrategy::No => validation.len().min(train.eval_batch_size),
            _ => return Ok(()),
        };
        self.observer.event(&Event::Phase("trying an evaluation"));
        let rows: Vec<usize> = (0..rows).collect();
        let head = self.prepared.arch.score.clone();
        let tried = match &head {
            Some(head) => self.try_scores(head, &rows),
            None => self.loss_within(&rows).map(drop),
        };
        let failed = match tried {
            Err(error) if error.kind() == Kind::Memory => Some(error),
            tried => tried.map(|()| None)?,
        };
        self.model.stand_by()?;
        ranks::all_have_room(&*self.comm, failed)?;
        self.agree_on_passes()?;
        if head.is_some() {
            return Ok(());
        }
        let mut scores = self.likelihood(1.0, 1)?;
        if let Some(predictor) = Predictor::new(&self.prepared, self.writes())? {
            let Some(found) = predictor.trial(&self.model, self.stop, &*self.comm)? else { return Ok(()) };
            if found.is_empty() {
                self.observer.event(&Event::Notice(
                    "no validation row has a prompt before its answer: train.predict_with_generate has nothing to ask, \
                     evaluations measure the loss alone",
                ));
            }
            scores.extend(found);
        }
        // The first rank alone has scores.
        if self.writes() { Measure::of(self.config()).value(0.0, &scores).map(drop) } else { Ok(()) }
    }

    /// What the loss says of the references by another name: the perplexity by token, and by byte of their text, which can
    /// be compared between tokenizers.
    fn likelihood(&self, loss: f64, label_tokens: u64) -> Result<Scores> {
        if !self.writes() {
            return Ok(Scores::new());
        }
        let bytes = self.prepared.dataset.validation_bytes()?;
        let sums = Likelihood { nll: loss * label_tokens as f64, tokens: label_tokens, right: 0, bytes };
        let scores = [("perplexity", sums.perplexity()), ("byte_perplexity", sums.byte_perplexity())];
        Ok(scores
            .into_iter()
            .filter(|(_, score)| score.is_finite())
            .map(|(name, score)| (name.to_owned(), score))
            .collect())
    }

    /// The validation split measured; nothing when the run is asked to stop.
    fn validate(&mut self) -> Result<Option<Validation>> {
        if let Some(head) = self.prepared.arch.score.clone() {
            return self.validate_scores(&head);
        }
        let Some((loss, label_tokens)) = self.validation_loss()? else { return Ok(None) };
        let likelihood = self.likelihood(loss, label_tokens)?;
        let found = |scores: Scores| {
            let scores = likelihood.into_iter().chain(scores).collect();
            Validation { loss, label_tokens, scores, confusion: Vec::new() }
        };
        let Some(predictor) = Predictor::new(&self.prepared, self.writes())? else {
            return Ok(Some(found(Scores::new())));
        };
        // What the loss was walked in makes room for caches.
        self.model.release();
        let scores = predictor.evaluate(&self.model, self.stop, &*self.comm)?;
        Ok(scores.map(found))
    }

    /// The mean loss of the validation split and its label tokens; nothing when the run is asked to stop.
    fn validation_loss(&mut self) -> Result<Option<(f64, u64)>> {
        let count = self.prepared.dataset.validation.as_ref().map_or(0, Split::len);
        let at_once = self.config().train.eval_batch_size;
        let (mut sum, mut weight, mut label_tokens, mut gave_up, mut failed) = (0.0, 0.0, 0, 0u64, None);
        let world = self.comm.world();
        // Each rank every so many batches; the sums are put together at the end.
        for start in (0..count).step_by(at_once).skip(world.rank).step_by(world.size) {
            if self.stop.requested().is_some() {
                gave_up = 1;
                break;
            }
            let rows: Vec<usize> = (start..count.min(start + at_once)).collect();
            let of_these = match self.loss_within(&rows) {
                Err(error) if error.kind() == Kind::Memory => {
                    failed = Some(error);
                    break;
                }
                of_these => of_these?,
            };
            (sum, weight, label_tokens) = (sum + of_these.0, weight + of_these.1, label_tokens + of_these.2);
        }
        self.model.stand_by()?;
        ranks::all_have_room(&*self.comm, failed)?;
        let (mut sums, mut counts) = ([sum, weight], [label_tokens, gave_up]);
        self.comm.all_reduce(&mut sums)?;
        self.comm.all_reduce(&mut counts)?;
        self.agree_on_passes()?;
        let ([sum, weight], [label_tokens, gave_up]) = (sums, counts);
        let loss = if weight > 0.0 { sum / weight } else { 0.0 };
        Ok((gave_up == 0).then_some((loss, label_tokens)))
    }

    /// Whether early stopping ends the run here.
    pub fn is_stale(&self) -> bool {
        let patience = self.config().train.early_stopping_patience as u64;
        patience > 0 && self.state.evaluations_without_improvement >= patience
    }

    /// Whether a checkpoint belongs after the step that was done last.
    pub fn save_is_due(&self) -> bool {
        let (step, train) = (self.state.step, &self.config().train);
        let best = train.load_best_model_at_end && self.state.best_step == Some(step);
        best || match train.save_strategy {
            SaveStrategy::No => false,
            SaveStrategy::Steps => step.is_multiple_of(train.save_steps),
            SaveStrategy::Epoch => self.prepared.batches.ends_epoch(step),
        }
    }
}

/// What a validation found.
pub struct Validation {
    /// The mean loss.
    pub loss: f64,
    /// Over so many label tokens.
    pub label_tokens: u64,
    /// Of the answers, or of a head of scores.
    pub scores: Scores,
    /// `[label][found]` of a classification.
    pub confusion: Vec<Vec<u64>>,
}

/// What makes one checkpoint better than another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Measure {
    /// `loss`, or the name of a score.
    name: String,
    greater: bool,
}

impl Measure {
    fn of(config: &Config) -> Self {
        let name = &config.train.metric_for_best_model;
        let name = name.strip_prefix("eval_").unwrap_or(name).to_owned();
        let greater = config.train.greater_is_better.unwrap_or_else(|| greater_is_better(&name));
        Self { name, greater }
    }

    /// Its value in an evaluation.
    fn value(&self, loss: f64, scores: &Scores) -> Result<f64> {
        if self.name == "loss" {
            return Ok(loss);
        }
        scores.get(&self.name).copied().ok_or_else(|| {
            let known: Vec<String> = ["loss"].into_iter().map(str::to_owned).chain(scores.keys().cloned()).collect();
            Error::config(format!(
                "train.metric_for_best_model = {}: no such measure, evaluations have {}",
                self.name,
                known.join(", ")
            ))
            .hint("answers are scored with train.predict_with_generate: true, by what eval.metrics names")
        })
    }
}

/// Takes an evaluation into account; says whether it is the best so far.
fn judge(state: &mut TrainState, measure: &Measure, value: f64, threshold: f64) -> bool {
    state.evaluated_step = state.step;
    if state.best_metric_name.as_deref().unwrap_or("loss") != measure.name {
        // A resumed run that measures something else starts to compare anew.
        (state.best_metric, state.best_step) = (None, None);
        state.evaluations_without_improvement = 0;
    }
    state.best_metric_name = Some(measure.name.clone());
    let better = |margin: f64| {
        value.is_finite()
            && state
                .best_metric
                .is_none_or(|best| if measure.greater { value > best + margin } else { value < best - margin })
    };
    let (improved, best) = (better(threshold), better(0.0));
    state.evaluations_without_improvement = if improved { 0 } else { state.evaluations_without_improvement + 1 };
    if best {
        (state.best_metric, state.best_step) = (Some(value), Some(state.step));
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_evaluations_without_enough_improvement() {
        let mut state = TrainState::default();
        let measure = Measure { name: "loss".into(), greater: false };
        let mut judge = |step, loss| {
            state.step = step;
            let best = judge(&mut state, &measure, loss, 0.1);
            (best, state.evaluations_without_improvement, state.best_step)
        };
        assert_eq!(judge(10, 1.0), (true, 0, Some(10)));
        assert_eq!(judge(20, 0.95), (true, 1, Some(20)), "lower, but not by the threshold");
        assert_eq!(judge(30, 0.97), (false, 2, Some(20)));
        assert_eq!(judge(40, f64::NAN), (false, 3, Some(20)));
        assert_eq!(judge(50, 0.5), (true, 0, Some(50)));
    }

    #[test]
    fn scores_rise_and_another_measure_starts_anew() {
        let mut state = TrainState { best_metric: Some(0.3), best_step: Some(5), ..TrainState::default() };
        let measure = Measure { name: "exact_match".into(), greater: true };
        let mut judge = |step, score| {
            state.step = step;
            let best = judge(&mut state, &measure, score, 0.0);
            (best, state.best_step)
        };
        assert_eq!(judge(10, 0.1), (true, Some(10)), "0.3 was a loss");
        assert_eq!(judge(20, 0.4), (true, Some(20)));
        assert_eq!(judge(30, 0.4), (false, Some(20)));
        assert!(measure.value(1.0, &Scores::new()).unwrap_err().message().contains("exact_match"));
    }
}

//! Validation during training: the loss, the metrics of generations or of a classification, and the best checkpoint.
use std::time::Instant;

use super::best_metric;
use super::predict::{Predictor, Scores};
use super::room::all_have_room;
use super::session::Session;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_config::arch::ScoreHead;
use tunesmith_data::Split;
use tunesmith_eval::metrics::Likelihood;
use tunesmith_eval::metrics::scored::{self, Bootstrap, Scored};
use tunesmith_telemetry::metrics::{EvalLine, MetricsLine, finite};
use tunesmith_telemetry::progress::Event;

/// The result of one validation.
pub struct Validation {
    pub loss: f64,
    /// Number of label tokens that the loss is the mean over.
    pub label_tokens: u64,
    /// Metrics of the generations or of the classification.
    pub scores: Scores,
    /// Number of rows, `[label][predicted label]`; empty unless the task is a classification.
    pub confusion: Vec<Vec<u64>>,
}

impl Session<'_> {
    /// Whether an evaluation is due after the last step and was not done yet.
    pub fn evaluation_is_due(&self) -> bool {
        let (step, steps) = (self.state.step, &self.plan.steps);
        let Some(evaluation) = &self.plan.evaluation else { return false };
        if step == 0 || self.state.evaluated_step == step {
            return false;
        }
        (evaluation.at_end && step == steps.total_steps) || evaluation.when.is_due(step, steps)
    }

    /// Computes the loss and the metrics of the validation split, writes them, and updates the best metric. Stops without a
    /// result if the run is asked to stop; the resumed run then repeats the evaluation.
    ///
    /// # Errors
    /// Those of the engine and the disk.
    pub fn evaluate(&mut self) -> Result<()> {
        let Some(evaluation) = &self.plan.evaluation else { return Ok(()) };
        let metric = evaluation.metric.clone();
        let (began, rows) = (Instant::now(), self.dataset.validation.as_ref().map_or(0, Split::len) as u64);
        self.observer.event(&Event::Evaluating { rows });
        let found = self.published(|session, _| session.validate())?;
        // Frees buffers for validation rows, which may be longer than all training rows.
        self.model.release();
        let Some(Validation { loss, label_tokens, mut scores, confusion }) = found else { return Ok(()) };
        let step = self.state.step;
        // Weights before step 1 and those of a diverging run are not saved, so they cannot be the best.
        let counts = step > 0 && !self.is_diverging();
        self.state.evaluated_step = step;
        let best = counts && {
            // Only the first rank has scores; it sends the value to the others.
            let mut value = [if self.writes() { best_metric::value(&metric, loss, &scores)? } else { 0.0 }];
            self.comm.broadcast(&mut value, 0)?;
            let [value] = value;
            best_metric::update(&mut self.state, &metric, value, self.plan.early_stopping.threshold)
        };
        // JSON has no NaN; a metric is NaN if these rows leave it undefined.
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
        self.write(&MetricsLine::Eval(line.clone()))?;
        if let Some(events) = &mut self.events {
            events.scalars(step, &[("eval/loss", loss), ("eval/seconds", line.eval_seconds)])?;
            for (name, score) in &line.eval_scores {
                events.scalars(step, &[(&format!("eval/{name}"), *score)])?;
            }
        }
        self.observer.event(&Event::Eval { line: &line, best });
        Ok(())
    }

    /// Tries an evaluation on one batch and one row before step 1, so that it does not fail only after hours.
    ///
    /// # Errors
    /// Those of the engine and the disk. [`tunesmith_base::Kind::Config`]: evaluations do not compute
    /// `train.metric_for_best_model`.
    pub fn try_evaluation(&mut self) -> Result<()> {
        let Some(evaluation) = &self.plan.evaluation else { return Ok(()) };
        let rows = self.dataset.validation.as_ref().map_or(0, Split::len).min(evaluation.batch_size);
        self.observer.event(&Event::Phase("trying an evaluation"));
        let rows: Vec<usize> = (0..rows).collect();
        let head = self.source.arch.score.clone();
        let tried = match &head {
            Some(head) => self.try_classification(head, &rows),
            None => self.loss_within(&rows).map(drop),
        };
        let failed = match tried {
            Err(error) if error.kind() == Kind::Memory => Some(error),
            tried => tried.map(|()| None)?,
        };
        self.model.stand_by()?;
        // Frees buffers for validation rows, which may be longer than all training rows.
        self.model.release();
        all_have_room(&*self.comm, failed)?;
        self.agree_on_passes()?;
        if head.is_some() {
            return Ok(());
        }
        let mut scores = self.likelihood(1.0, 1)?;
        if let Some(predictor) = self.predictor() {
            let Some(found) = predictor.trial(&self.model, self.stop, &*self.comm)? else { return Ok(()) };
            if found.is_empty() {
                self.observer.event(&Event::Notice(
                    "no validation row has a prompt before its answer: train.predict_with_generate has no effect, \
                     evaluations compute only the loss",
                ));
            }
            scores.extend(found);
        }
        // Only the first rank has scores.
        match &self.plan.evaluation {
            Some(evaluation) if self.writes() => best_metric::value(&evaluation.metric, 0.0, &scores).map(drop),
            _ => Ok(()),
        }
    }

    /// The perplexity per token and per byte of the references, computed from the loss. The perplexity per byte can be
    /// compared between tokenizers.
    fn likelihood(&self, loss: f64, label_tokens: u64) -> Result<Scores> {
        if !self.writes() {
            return Ok(Scores::new());
        }
        let bytes = self.dataset.validation_bytes()?;
        let tokens = label_tokens as f64;
        let sums = Likelihood { nll: loss * tokens, weight: tokens, tokens: label_tokens, right: 0, bytes };
        let scores = [("perplexity", sums.perplexity()), ("byte_perplexity", sums.byte_perplexity())];
        Ok(scores
            .into_iter()
            .filter(|(_, score)| score.is_finite())
            .map(|(name, score)| (name.to_owned(), score))
            .collect())
    }

    /// Generates and scores, with `train.predict_with_generate`. Only the first rank scores.
    fn predictor(&self) -> Option<Predictor<'_>> {
        let plan = self.plan.evaluation.as_ref()?.generation.as_ref()?;
        let validation = self.dataset.validation.as_ref()?;
        Some(Predictor::new(plan, &self.dataset, validation, self.plan.seed, self.writes()))
    }

    /// The result of a validation; `None` if the run is asked to stop.
    fn validate(&mut self) -> Result<Option<Validation>> {
        if let Some(head) = self.source.arch.score.clone() {
            return self.validate_classification(&head);
        }
        let Some((loss, label_tokens)) = self.validation_loss()? else { return Ok(None) };
        let likelihood = self.likelihood(loss, label_tokens)?;
        let found = |scores: Scores| {
            let scores = likelihood.into_iter().chain(scores).collect();
            Validation { loss, label_tokens, scores, confusion: Vec::new() }
        };
        let Some(predictor) = self.predictor() else {
            return Ok(Some(found(Scores::new())));
        };
        // Frees the buffers of the loss, so that the key/value cache fits.
        self.model.release();
        let scores = predictor.evaluate(&self.model, self.stop, &*self.comm)?;
        Ok(scores.map(found))
    }

    /// The mean loss of the validation split and its label tokens; `None` if the run is asked to stop.
    fn validation_loss(&mut self) -> Result<Option<(f64, u64)>> {
        let (mut sums, mut label_tokens) = ([0.0, 0.0], [0]);
        let done = self.for_own_batches(|session, rows| {
            let (loss, weight, tokens) = session.loss_within(rows)?;
            sums = [sums[0] + loss, sums[1] + weight];
            label_tokens[0] += tokens;
            Ok(())
        })?;
        if !done {
            return Ok(None);
        }
        self.comm.all_reduce(&mut sums)?;
        self.comm.all_reduce(&mut label_tokens)?;
        let ([sum, weight], [label_tokens]) = (sums, label_tokens);
        let loss = if weight > 0.0 { sum / weight } else { 0.0 };
        Ok(Some((loss, label_tokens)))
    }

    /// Calls `measure` with the rows of each validation batch of this rank: batches go to the ranks in turn. All ranks return
    /// together: false if any is asked to stop.
    ///
    /// # Errors
    /// Those of `measure`; [`Kind::Memory`]: a row does not fit on some rank.
    fn for_own_batches(&mut self, mut measure: impl FnMut(&mut Self, &[usize]) -> Result<()>) -> Result<bool> {
        let count = self.dataset.validation.as_ref().map_or(0, Split::len);
        let at_once = self.plan.evaluation.as_ref().map_or(1, |evaluation| evaluation.batch_size);
        let (world, mut gave_up, mut failed) = (self.comm.world(), [0u64], None);
        for start in (0..count).step_by(at_once).skip(world.rank).step_by(world.size) {
            if self.stop.requested().is_some() {
                gave_up = [1];
                break;
            }
            let rows: Vec<usize> = (start..count.min(start + at_once)).collect();
            match measure(self, &rows) {
                Err(error) if error.kind() == Kind::Memory => {
                    failed = Some(error);
                    break;
                }
                measured => measured?,
            }
        }
        self.model.stand_by()?;
        all_have_room(&*self.comm, failed)?;
        self.comm.all_reduce(&mut gave_up)?;
        self.agree_on_passes()?;
        Ok(gave_up == [0])
    }

    /// Whether early stopping ends the run here.
    pub fn stops_early(&self) -> bool {
        let patience = self.plan.early_stopping.patience;
        patience > 0 && self.state.evaluations_without_improvement >= patience
    }

    /// The loss and the metrics of a classification or regression; `None` if the run is asked to stop. Every rank gets the
    /// outputs of all rows.
    fn validate_classification(&mut self, head: &ScoreHead) -> Result<Option<Validation>> {
        let Some(count) = self.dataset.validation.as_ref().map(Split::len) else { return Ok(None) };
        let mut outputs = vec![0.0f32; count * head.outputs()];
        let done = self.for_own_batches(|session, rows| {
            let found = session.scores_within(rows)?;
            outputs[rows[0] * head.outputs()..][..found.len()].copy_from_slice(&found);
            Ok(())
        })?;
        if !done {
            return Ok(None);
        }
        self.comm.all_reduce(&mut outputs)?;
        let Some(validation) = &self.dataset.validation else { return Ok(None) };
        let scored = Scored::of_rows(head, validation, &outputs)?;
        let scores = scored.scores(Bootstrap::NONE).into_iter();
        let mut scores: Scores = scores.map(|score| (score.name, score.value)).collect();
        let loss = scores.remove("loss").unwrap_or_default();
        Ok(Some(Validation { loss, label_tokens: count as u64, scores, confusion: scored.confusion() }))
    }

    /// Tries a validation on a few rows, and checks that it computes `train.metric_for_best_model`.
    fn try_classification(&mut self, head: &ScoreHead, rows: &[usize]) -> Result<()> {
        self.scores_within(rows)?;
        let Some(evaluation) = &self.plan.evaluation else { return Ok(()) };
        let (wanted, names) = (&evaluation.metric.name, scored::names(head));
        if names.iter().any(|name| name == wanted) {
            return Ok(());
        }
        let names = names.join(", ");
        Err(Error::config(format!("train.metric_for_best_model = {wanted}: no such metric; evaluations have {names}")))
    }
}

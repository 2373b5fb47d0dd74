//! Validation during training: the loss, the metrics of generated answers or of a classification, and the best checkpoint.
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
use tunesmith_telemetry::metrics::{EvalLine, Line, finite};
use tunesmith_telemetry::progress::Event;

pub struct Validation {
    pub loss: f64,
    /// Over so many label tokens.
    pub label_tokens: u64,
    /// Of the answers, or of a head of scores.
    pub scores: Scores,
    pub confusion: Vec<Vec<u64>>,
}

impl Session<'_> {
    /// Whether an evaluation belongs after the step that was done last, and has not been made.
    pub fn evaluation_is_due(&self) -> bool {
        let (step, steps) = (self.state.step, &self.plan.steps);
        let Some(evaluation) = &self.plan.evaluation else { return false };
        if step == 0 || self.state.evaluated_step == step {
            return false;
        }
        (evaluation.at_end && step == steps.total_steps) || evaluation.when.is_due(step, steps)
    }

    /// The loss on the validation split, batch by batch, with the scores of answers where they are asked for, and what
    /// follows from it. Gives up without a result when the run is asked to stop: the evaluation is then made after the
    /// resume.
    ///
    /// # Errors
    /// The engine or the disk.
    pub fn evaluate(&mut self) -> Result<()> {
        let Some(evaluation) = &self.plan.evaluation else { return Ok(()) };
        let metric = evaluation.metric.clone();
        let (began, rows) = (Instant::now(), self.dataset.validation.as_ref().map_or(0, Split::len) as u64);
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
            // Only the first rank has scores; what it found holds for all.
            let mut value = [if self.writes() { best_metric::value(&metric, loss, &scores)? } else { 0.0 }];
            self.comm.broadcast(&mut value, 0)?;
            let [value] = value;
            best_metric::update(&mut self.state, &metric, value, self.plan.early_stopping.threshold)
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
                    "no validation row has a prompt before its answer: train.predict_with_generate has nothing to ask, \
                     evaluations measure the loss alone",
                ));
            }
            scores.extend(found);
        }
        // The first rank alone has scores.
        match &self.plan.evaluation {
            Some(evaluation) if self.writes() => best_metric::value(&evaluation.metric, 0.0, &scores).map(drop),
            _ => Ok(()),
        }
    }

    /// What the loss says of the references by another name: the perplexity by token, and by byte of their text, which can
    /// be compared between tokenizers.
    fn likelihood(&self, loss: f64, label_tokens: u64) -> Result<Scores> {
        if !self.writes() {
            return Ok(Scores::new());
        }
        let bytes = self.dataset.validation_bytes()?;
        let sums = Likelihood { nll: loss * label_tokens as f64, tokens: label_tokens, right: 0, bytes };
        let scores = [("perplexity", sums.perplexity()), ("byte_perplexity", sums.byte_perplexity())];
        Ok(scores
            .into_iter()
            .filter(|(_, score)| score.is_finite())
            .map(|(name, score)| (name.to_owned(), score))
            .collect())
    }

    /// Generates and scores answers, where the plan asks for it. Only the first rank scores.
    fn predictor(&self) -> Option<Predictor<'_>> {
        let plan = self.plan.evaluation.as_ref()?.generation.as_ref()?;
        let validation = self.dataset.validation.as_ref()?;
        Some(Predictor::new(plan, &self.dataset, validation, self.plan.seed, self.writes()))
    }

    /// The validation split measured; nothing when the run is asked to stop.
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
        // What the loss was walked in makes room for caches.
        self.model.release();
        let scores = predictor.evaluate(&self.model, self.stop, &*self.comm)?;
        Ok(scores.map(found))
    }

    /// The mean loss of the validation split and its label tokens; nothing when the run is asked to stop.
    fn validation_loss(&mut self) -> Result<Option<(f64, u64)>> {
        let count = self.dataset.validation.as_ref().map_or(0, Split::len);
        let at_once = self.plan.evaluation.as_ref().map_or(1, |evaluation| evaluation.batch_size);
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
        all_have_room(&*self.comm, failed)?;
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
        let patience = self.plan.early_stopping.patience;
        patience > 0 && self.state.evaluations_without_improvement >= patience
    }

    /// The loss on the validation split and the measures of the task; nothing when the run is asked to stop. Each rank
    /// scores every so many batches, and all rows' scores come together on all ranks.
    fn validate_classification(&mut self, head: &ScoreHead) -> Result<Option<Validation>> {
        let Some(count) = self.dataset.validation.as_ref().map(Split::len) else { return Ok(None) };
        let at_once = self.plan.evaluation.as_ref().map_or(1, |evaluation| evaluation.batch_size);
        let world = self.comm.world();
        let mut outputs = vec![0.0f32; count * head.outputs()];
        let (mut gave_up, mut failed) = ([0u64], None);
        for start in (0..count).step_by(at_once).skip(world.rank).step_by(world.size) {
            if self.stop.requested().is_some() {
                gave_up = [1];
                break;
            }
            let rows: Vec<usize> = (start..count.min(start + at_once)).collect();
            let found = match self.scores_within(&rows) {
                Err(error) if error.kind() == Kind::Memory => {
                    failed = Some(error);
                    break;
                }
                found => found?,
            };
            outputs[start * head.outputs()..][..found.len()].copy_from_slice(&found);
        }
        self.model.stand_by()?;
        all_have_room(&*self.comm, failed)?;
        self.comm.all_reduce(&mut gave_up)?;
        self.agree_on_passes()?;
        if gave_up != [0] {
            return Ok(None);
        }
        self.comm.all_reduce(&mut outputs)?;
        let mut scored = Scored::new(head.clone());
        for (row, outputs) in outputs.chunks_exact(head.outputs()).enumerate() {
            let labelled = self.dataset.validation.as_ref().map(|split| split.labelled(row)).transpose()?;
            let (target, weight) = labelled.flatten().ok_or_else(|| Error::data("a validation row has no label"))?;
            scored.push(outputs, target, weight);
        }
        let scores = scored.scores(Bootstrap::NONE).into_iter();
        let mut scores: Scores = scores.map(|score| (score.name, score.value)).collect();
        let loss = scores.remove("loss").unwrap_or_default();
        Ok(Some(Validation { loss, label_tokens: count as u64, scores, confusion: scored.confusion() }))
    }

    /// Tries what a validation does on a few rows, and whether there is such a measure at all.
    fn try_classification(&mut self, head: &ScoreHead, rows: &[usize]) -> Result<()> {
        self.scores_within(rows)?;
        let Some(evaluation) = &self.plan.evaluation else { return Ok(()) };
        let (wanted, names) = (&evaluation.metric.name, scored::names(head));
        if names.iter().any(|name| name == wanted) {
            return Ok(());
        }
        let names = names.join(", ");
        Err(Error::config(format!("train.metric_for_best_model = {wanted}: no such measure, evaluations have {names}")))
    }
}

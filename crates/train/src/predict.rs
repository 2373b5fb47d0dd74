//! `train.predict_with_generate`: generates for validation rows and scores each generation as soon as it ends, so that
//! memory does not grow with their number.
use std::collections::BTreeMap;

use super::room::all_have_room;
use super::run_plan::EvalGenerationPlan;
use super::signals::Stop;
use tunesmith_base::error::{Kind, Result};
use tunesmith_comm::Collectives;
use tunesmith_data::{Dataset, Split};
use tunesmith_eval::metrics::{Metrics, Row};
use tunesmith_eval::{Answer, AnswerDecoder, EvalExample, RowGenerator, Settings};
use tunesmith_model::Model;

/// Scores by name, without the prefix `eval_`.
pub type Scores = BTreeMap<String, f64>;

/// Generates for the rows of a validation and scores the generations.
pub struct Predictor<'a> {
    plan: &'a EvalGenerationPlan,
    dataset: &'a Dataset,
    validation: &'a Split,
    settings: Settings,
    seed: u64,
    /// Whether this rank scores. All ranks generate, since each holds the model or a shard of it; scoring runs once.
    scores: bool,
}

impl<'a> Predictor<'a> {
    /// `seed` is for metrics that sample. Only a rank with `scores` returns scores.
    pub fn new(
        plan: &'a EvalGenerationPlan,
        dataset: &'a Dataset,
        validation: &'a Split,
        seed: u64,
        scores: bool,
    ) -> Self {
        Self { plan, dataset, validation, settings: plan.settings.clone(), seed, scores }
    }

    /// The scores of the generations for the first `rows` rows; empty if no row has a prompt. Returns `None` if any rank is
    /// asked to stop, which the ranks check after each chunk of rows.
    ///
    /// # Errors
    /// Those of the engine, the disk, and the tokenizer; [`Kind::Memory`]: some rank runs out of memory.
    pub fn scores(&self, model: &Model, rows: usize, stop: &Stop, comm: &dyn Collectives) -> Result<Option<Scores>> {
        let decoder = AnswerDecoder { tokenizer: &self.dataset.tokenizer, stop_strings: &self.plan.stop_strings };
        let rows = rows.min(self.validation.len());
        let metrics = || Metrics::new(&self.plan.metrics, self.seed).map(Metrics::without_intervals);
        let mut metrics = self.scores.then(metrics).transpose()?;
        let mut generator = RowGenerator {
            dataset: self.dataset,
            split: self.validation,
            sources: self.dataset.validation_sources(),
            settings: self.settings.clone(),
            decoder,
        };
        let mut go_on = || stop.requested().is_none();
        // Memory does not grow with the rows: an answer is scored as soon as it ends.
        let mut score = |EvalExample { source, reference, references, .. }: EvalExample, answer: &Answer| {
            let Some(metrics) = &mut metrics else { return Ok(()) };
            let answer = decoder.text(answer)?;
            let row = Row { source: &source, answer: &answer, reference: &reference };
            let references: Vec<&str> = references.iter().map(String::as_str).collect();
            metrics.add_with_references(&row, &references, None).map(drop)
        };
        for start in (0..rows).step_by(self.plan.prompts_at_once) {
            let chunk = start..rows.min(start.saturating_add(self.plan.prompts_at_once));
            let (mut gave_up, failed) = match generator.generate(model, chunk, &mut go_on, &mut score) {
                Ok(done) => ([u64::from(!done)], None),
                Err(error) if error.kind() == Kind::Memory => {
                    ([0], Some(error.context("generating for validation rows")))
                }
                Err(error) => return Err(error),
            };
            model.stand_by()?;
            all_have_room(comm, failed)?;
            comm.all_reduce(&mut gave_up)?;
            if gave_up != [0] {
                return Ok(None);
            }
        }
        let scores = metrics.iter().flat_map(Metrics::scores);
        Ok(Some(scores.map(|score| (score.name, score.value)).collect()))
    }

    /// The scores of a validation: of the first `train.generation_rows` rows.
    ///
    /// # Errors
    /// As [`Predictor::scores`].
    pub fn evaluate(&self, model: &Model, stop: &Stop, comm: &dyn Collectives) -> Result<Option<Scores>> {
        self.scores(model, self.plan.rows, stop, comm)
    }

    /// Tries an evaluation up to the first row with a prompt, with two tokens at most, to find errors early.
    ///
    /// # Errors
    /// As [`Predictor::scores`].
    pub fn trial(mut self, model: &Model, stop: &Stop, comm: &dyn Collectives) -> Result<Option<Scores>> {
        self.settings.max_new_tokens = self.settings.max_new_tokens.min(2);
        let dataset = self.dataset;
        let usable =
            |&index: &usize| dataset.question(self.validation, index).map_or(true, |question| question.is_some());
        let rows = self.plan.rows;
        let first = (0..self.validation.len().min(rows)).find(usable);
        first.map_or_else(|| Ok(Some(Scores::new())), |first| self.scores(model, first + 1, stop, comm))
    }
}

//! `train.predict_with_generate`: generates for validation rows and scores each generation as soon as it ends, so that
//! memory does not grow with their number.
use std::collections::BTreeMap;
use std::ops::Range;

use super::room::all_have_room;
use super::run_plan::EvalGenerationPlan;
use super::signals::Stop;
use tunesmith_base::error::{Kind, Result};
use tunesmith_comm::Collectives;
use tunesmith_data::{Dataset, Split};
use tunesmith_eval::metrics::{Metrics, Row};
use tunesmith_eval::{Answer, AnswerDecoder, Go, Settings, Watcher, generate};
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

/// The prompt of a row, the text of its source, and the reference.
struct Question {
    prompt: Vec<u32>,
    source: String,
    reference: String,
}

/// Scores generations as they end.
struct Scorer<'a> {
    decoder: AnswerDecoder<'a>,
    stop: &'a Stop,
    questions: &'a [Question],
    /// `None` if another rank scores.
    metrics: Option<&'a mut Metrics>,
}

impl Watcher for Scorer<'_> {
    fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
        Ok(if self.stop.requested().is_none() { Go::On } else { Go::EndAll })
    }

    fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
        self.decoder.stops(tokens)
    }

    fn answer(&mut self, text: usize, answer: &Answer) -> Result<()> {
        let Some(metrics) = &mut self.metrics else { return Ok(()) };
        let (question, answer) = (&self.questions[text], self.decoder.text(answer)?);
        let row = Row { source: &question.source, answer: &answer, reference: &question.reference };
        metrics.add(&row, None).map(drop)
    }
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

    /// The rows of `range` that have a prompt and a reference.
    fn questions(&self, range: Range<usize>) -> Result<Vec<Question>> {
        let dataset = self.dataset;
        let reads = self.scores && self.plan.metrics.reads_sources();
        let sources = if reads { dataset.validation_sources() } else { &[] };
        let mut questions = Vec::with_capacity(range.len());
        for index in range {
            let Some((prompt, answer)) = dataset.question(self.validation, index)? else { continue };
            let reference = if self.scores { dataset.tokenizer.decode(&answer, true)? } else { String::new() };
            let source = sources.get(index).cloned().unwrap_or_default();
            questions.push(Question { prompt, source, reference });
        }
        Ok(questions)
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
        let mut answered = 0;
        for start in (0..rows).step_by(self.plan.prompts_at_once) {
            let questions = self.questions(start..rows.min(start.saturating_add(self.plan.prompts_at_once)))?;
            let prompts: Vec<Vec<u32>> = questions.iter().map(|question| question.prompt.clone()).collect();
            let mut scorer = Scorer { decoder, stop, questions: &questions, metrics: metrics.as_mut() };
            let settings = Settings { first_text: answered, ..self.settings.clone() };
            answered += questions.len() as u64;
            let (mut gave_up, failed) = match generate(model, &prompts, &settings, &mut scorer) {
                Ok(done) => ([u64::from(done.is_none())], None),
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

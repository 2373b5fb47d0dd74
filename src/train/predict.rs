//! `train.predict_with_generate`: validation rows answered and scored, each as soon as its answer ends, so that memory
//! does not grow with their number.
use std::collections::BTreeMap;
use std::ops::Range;

use super::prepare::Prepared;
use super::signals::Stop;
use crate::data::Split;
use crate::error::{Kind, Result};
use crate::eval::metrics::{Metrics, Row};
use crate::eval::{Answer, Asked, Go, Settings, Watcher, generate};
use crate::model::Model;

/// Prompts that are read from disk at once, unless the configuration says otherwise.
const CHUNK: usize = 256;

/// Scores by name, without the prefix `eval_`.
pub type Scores = BTreeMap<String, f64>;

/// How the rows of a validation are answered.
pub struct Predictor<'a> {
    prepared: &'a Prepared,
    validation: &'a Split,
    settings: Settings,
}

/// A row's prompt, as tokens and as text, and what it should be answered with.
struct Question {
    prompt: Vec<u32>,
    source: String,
    reference: String,
}

/// Scores answers as they come.
struct Judge<'a> {
    asked: Asked<'a>,
    stop: &'a Stop,
    questions: &'a [Question],
    metrics: &'a mut Metrics,
}

impl Watcher for Judge<'_> {
    fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
        Ok(if self.stop.requested().is_none() { Go::On } else { Go::EndAll })
    }

    fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
        self.asked.stops(tokens)
    }

    fn answer(&mut self, text: usize, answer: &Answer) -> Result<()> {
        let (question, answer) = (&self.questions[text], self.asked.text(answer)?);
        let row = Row { source: &question.source, answer: &answer, reference: &question.reference };
        self.metrics.add(&row, None).map(drop)
    }
}

impl<'a> Predictor<'a> {
    /// For a run that answers its validation rows; nothing for one that doesn't.
    ///
    /// # Errors
    /// [`crate::Kind::Io`]: the tokens cannot be read from disk.
    pub fn new(prepared: &'a Prepared) -> Result<Option<Self>> {
        let (config, arch) = (&prepared.config, &prepared.arch);
        let Some(validation) = prepared.dataset.validation.as_ref().filter(|_| config.train.predict_with_generate)
        else {
            return Ok(None);
        };
        let mut config = config.clone();
        let answers = &mut config.generation;
        answers.max_new_tokens = config.train.generation_max_new_tokens.unwrap_or(answers.max_new_tokens);
        answers.num_beams = config.train.generation_num_beams.unwrap_or(answers.num_beams);
        let stop_ids = [&arch.eos_token_ids[..], &prepared.dataset.stop_ids()?].concat();
        let settings = Settings::new(&config, arch.max_position_embeddings, stop_ids);
        Ok(Some(Self { prepared, validation, settings }))
    }

    /// The rows of `range` that have a prompt and an answer.
    fn questions(&self, range: Range<usize>) -> Result<Vec<Question>> {
        let mut questions = Vec::with_capacity(range.len());
        for index in range {
            let (prompt, answer) = self.validation.prompt(index)?;
            if !prompt.is_empty() && !answer.is_empty() {
                let tokenizer = &self.prepared.dataset.tokenizer;
                let (source, reference) = (tokenizer.decode(&prompt, true)?, tokenizer.decode(&answer, true)?);
                questions.push(Question { prompt, source: source.trim().to_owned(), reference });
            }
        }
        Ok(questions)
    }

    /// The scores of the first `rows` rows' answers: none if no row has a prompt. Nothing when the run is asked to stop.
    ///
    /// # Errors
    /// The engine, the disk or the tokenizer.
    pub fn scores(&self, model: &Model, rows: usize, stop: &Stop) -> Result<Option<Scores>> {
        let config = &self.prepared.config;
        let asked =
            Asked { tokenizer: &self.prepared.dataset.tokenizer, stop_strings: &config.generation.stop_strings };
        let rows = rows.min(self.validation.len());
        let batches = config.train.eval_accumulation_steps.unwrap_or(0) as usize;
        let chunk = if batches > 0 { batches.saturating_mul(config.train.eval_batch_size) } else { CHUNK };
        let mut metrics = Metrics::new(&config.eval, config.train.seed)?.without_intervals();
        let mut answered = 0;
        for start in (0..rows).step_by(chunk) {
            let questions = self.questions(start..rows.min(start.saturating_add(chunk)))?;
            let prompts: Vec<Vec<u32>> = questions.iter().map(|question| question.prompt.clone()).collect();
            let mut judge = Judge { asked, stop, questions: &questions, metrics: &mut metrics };
            let settings = Settings { first_text: answered, ..self.settings.clone() };
            answered += questions.len() as u64;
            let answers = generate(model, &prompts, &settings, &mut judge).map_err(|error| match error.kind() {
                Kind::Memory => error.context("answering validation rows"),
                _ => error,
            })?;
            if answers.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(metrics.scores().into_iter().map(|score| (score.name, score.value)).collect()))
    }

    /// The scores of the rows that an evaluation answers.
    ///
    /// # Errors
    /// As [`Predictor::scores`].
    pub fn evaluate(&self, model: &Model, stop: &Stop) -> Result<Option<Scores>> {
        self.scores(model, self.prepared.config.train.generation_rows.unwrap_or(usize::MAX), stop)
    }

    /// As an evaluation, on a row or two and a token or two: what would fail fails.
    ///
    /// # Errors
    /// As [`Predictor::scores`].
    pub fn trial(mut self, model: &Model, stop: &Stop) -> Result<Option<Scores>> {
        self.settings.max_new_tokens = self.settings.max_new_tokens.min(2);
        let usable = |&index: &usize| {
            self.validation.prompt(index).map_or(true, |(prompt, answer)| !prompt.is_empty() && !answer.is_empty())
        };
        let asked = self.prepared.config.train.generation_rows.unwrap_or(usize::MAX);
        let first = (0..self.validation.len().min(asked)).find(usable);
        first.map_or_else(|| Ok(Some(Scores::new())), |first| self.scores(model, first + 1, stop))
    }
}

//! `train.predict_with_generate`: validation rows answered and scored, each as soon as its answer ends, so that memory
//! does not grow with their number.
use std::collections::BTreeMap;
use std::ops::Range;

use super::prepare::Prepared;
use super::ranks::all_have_room;
use super::signals::Stop;
use tunesmith_base::error::{Kind, Result};
use tunesmith_comm::Collectives;
use tunesmith_data::Split;
use tunesmith_eval::metrics::{Metrics, Row};
use tunesmith_eval::{Answer, AnswerDecoder, Go, Settings, Watcher, generate};
use tunesmith_model::Model;

/// Prompts that are read from disk at once, unless the configuration says otherwise.
const CHUNK: usize = 256;
/// With several ranks: after each chunk they agree whether to go on, and one that is asked to stop waits for that.
const CHUNK_OF_RANKS: usize = 32;

/// Scores by name, without the prefix `eval_`.
pub type Scores = BTreeMap<String, f64>;

/// How the rows of a validation are answered.
pub struct Predictor<'a> {
    prepared: &'a Prepared,
    validation: &'a Split,
    settings: Settings,
    /// Whether this rank scores the answers. All ranks answer, as all hold the model; a scorer of the user's runs once.
    scores: bool,
}

/// A row's prompt, what it is asked by, and what it should be answered with.
struct Question {
    prompt: Vec<u32>,
    source: String,
    reference: String,
}

/// Scores answers as they come.
struct Judge<'a> {
    asked: AnswerDecoder<'a>,
    stop: &'a Stop,
    questions: &'a [Question],
    /// None where another rank scores.
    metrics: Option<&'a mut Metrics>,
}

impl Watcher for Judge<'_> {
    fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
        Ok(if self.stop.requested().is_none() { Go::On } else { Go::EndAll })
    }

    fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
        self.asked.stops(tokens)
    }

    fn answer(&mut self, text: usize, answer: &Answer) -> Result<()> {
        let Some(metrics) = &mut self.metrics else { return Ok(()) };
        let (question, answer) = (&self.questions[text], self.asked.text(answer)?);
        let row = Row { source: &question.source, answer: &answer, reference: &question.reference };
        metrics.add(&row, None).map(drop)
    }
}

impl<'a> Predictor<'a> {
    /// For a run that answers its validation rows; nothing for one that doesn't. Only the rank that `scores` has scores.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn new(prepared: &'a Prepared, scores: bool) -> Result<Option<Self>> {
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
        Ok(Some(Self { prepared, validation, settings, scores }))
    }

    /// The rows of `range` that have a prompt and an answer.
    fn questions(&self, range: Range<usize>) -> Result<Vec<Question>> {
        let (config, dataset) = (&self.prepared.config, &self.prepared.dataset);
        let sources =
            if self.scores && config.eval.reads_sources() { dataset.validation_sources(config)? } else { &[] };
        let mut questions = Vec::with_capacity(range.len());
        for index in range {
            let Some((prompt, answer)) = dataset.question(self.validation, index)? else { continue };
            let reference = if self.scores { dataset.tokenizer.decode(&answer, true)? } else { String::new() };
            let source = sources.get(index).cloned().unwrap_or_default();
            questions.push(Question { prompt, source, reference });
        }
        Ok(questions)
    }

    /// The scores of the first `rows` rows' answers: none if no row has a prompt. Nothing when the run is asked to stop, on
    /// any rank: that is agreed after each chunk of rows.
    ///
    /// # Errors
    /// The engine, the disk or the tokenizer; [`Kind::Memory`]: there is no room on some rank.
    pub fn scores(&self, model: &Model, rows: usize, stop: &Stop, comm: &dyn Collectives) -> Result<Option<Scores>> {
        let config = &self.prepared.config;
        let asked = AnswerDecoder {
            tokenizer: &self.prepared.dataset.tokenizer,
            stop_strings: &config.generation.stop_strings,
        };
        let rows = rows.min(self.validation.len());
        let batches = config.train.eval_accumulation_steps.unwrap_or(0) as usize;
        let usual = if comm.world().size > 1 { CHUNK_OF_RANKS } else { CHUNK };
        let chunk = if batches > 0 { batches.saturating_mul(config.train.eval_batch_size) } else { usual };
        let metrics = || Metrics::new(&config.eval, config.train.seed).map(Metrics::without_intervals);
        let mut metrics = self.scores.then(metrics).transpose()?;
        let mut answered = 0;
        for start in (0..rows).step_by(chunk) {
            let questions = self.questions(start..rows.min(start.saturating_add(chunk)))?;
            let prompts: Vec<Vec<u32>> = questions.iter().map(|question| question.prompt.clone()).collect();
            let mut judge = Judge { asked, stop, questions: &questions, metrics: metrics.as_mut() };
            let settings = Settings { first_text: answered, ..self.settings.clone() };
            answered += questions.len() as u64;
            let (mut gave_up, failed) = match generate(model, &prompts, &settings, &mut judge) {
                Ok(done) => ([u64::from(done.is_none())], None),
                Err(error) if error.kind() == Kind::Memory => ([0], Some(error.context("answering validation rows"))),
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

    /// The scores of the rows that an evaluation answers.
    ///
    /// # Errors
    /// As [`Predictor::scores`].
    pub fn evaluate(&self, model: &Model, stop: &Stop, comm: &dyn Collectives) -> Result<Option<Scores>> {
        self.scores(model, self.prepared.config.train.generation_rows.unwrap_or(usize::MAX), stop, comm)
    }

    /// As an evaluation, on a row or two and a token or two: what would fail fails.
    ///
    /// # Errors
    /// As [`Predictor::scores`].
    pub fn trial(mut self, model: &Model, stop: &Stop, comm: &dyn Collectives) -> Result<Option<Scores>> {
        self.settings.max_new_tokens = self.settings.max_new_tokens.min(2);
        let dataset = &self.prepared.dataset;
        let usable =
            |&index: &usize| dataset.question(self.validation, index).map_or(true, |question| question.is_some());
        let asked = self.prepared.config.train.generation_rows.unwrap_or(usize::MAX);
        let first = (0..self.validation.len().min(asked)).find(usable);
        first.map_or_else(|| Ok(Some(Scores::new())), |first| self.scores(model, first + 1, stop, comm))
    }
}

//! Measures a model on held-out rows: generates an answer to each prompt, or reads the outputs of its classification head.
use std::collections::BTreeMap;

use super::metrics::scored::Scored;
use super::metrics::{Likelihood, Metrics, Row};
use super::row_generator::{EvalExample, RowGenerator};
use super::settings::Settings;
use super::stop_strings::AnswerDecoder;
use tunesmith_base::error::Result;
use tunesmith_config::Config;
use tunesmith_config::arch::ScoreHead;
use tunesmith_data::{Dataset, Split};
use tunesmith_model::Model;

/// Prompts in one call of the generator, so that memory does not grow with the number of rows.
const PROMPTS: usize = 64;

/// The first rows of a validation or test split.
#[derive(Debug, Clone, Copy)]
pub struct EvalSplit<'a> {
    /// Sections `gen`, `eval` and `train` say how to answer and what to measure.
    pub config: &'a Config,
    /// The data set, which has the tokenizer and the chat template.
    pub dataset: &'a Dataset,
    /// One of the data set's splits.
    pub split: &'a Split,
    /// How many rows are measured; at most as many as the split has.
    pub rows: usize,
}

/// A row with the model's answer.
#[derive(Debug)]
pub struct AnsweredRow {
    /// `None` for raw text, which asks no question: only its likelihood is measured.
    pub answer: Option<String>,
    /// Scores of this row alone, by metric.
    pub scores: Vec<(String, f64)>,
}

impl EvalSplit<'_> {
    /// Answers all rows, passes each to `record` in row order, and returns the metrics over all of them.
    ///
    /// `sources` holds one text per row for metrics that read the source ([`Row::source`]), else nothing. A token of `stop_ids`
    /// ends an answer.
    ///
    /// # Errors
    /// Those of generation, of a scorer and of `record`; [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn answer(
        &self,
        model: &Model,
        sources: &[String],
        stop_ids: &[u32],
        mut record: impl FnMut(AnsweredRow) -> Result<()>,
    ) -> Result<Metrics> {
        let Self { config, dataset, .. } = *self;
        let mut metrics = Metrics::new(&config.eval, config.train.seed)?.with_likelihood();
        let settings = Settings::new(config, model.arch.reach(), stop_ids.to_vec());
        let decoder = AnswerDecoder { tokenizer: &dataset.tokenizer, stop_strings: &config.generation.stop_strings };
        let prompts = PROMPTS.max(settings.texts_at_once(model.device()));
        let mut generator = RowGenerator { dataset, split: self.split, sources, settings, decoder };
        for start in (0..self.rows).step_by(prompts) {
            let chunk = start..self.rows.min(start.saturating_add(prompts));
            let mut answered: BTreeMap<usize, (EvalExample, String)> = BTreeMap::new();
            generator.generate(model, chunk.clone(), &mut || true, &mut |example, answer| {
                answered.insert(example.row, (example, decoder.text(answer)?));
                Ok(())
            })?;
            for index in chunk {
                let likelihood = self.likelihood(model, index)?;
                let Some((EvalExample { source, reference, references, .. }, answer)) = answered.remove(&index) else {
                    record(AnsweredRow { answer: None, scores: metrics.add_unanswered(&likelihood)? })?;
                    continue;
                };
                let row = Row { source: &source, answer: &answer, reference: &reference };
                let references: Vec<&str> = references.iter().map(String::as_str).collect();
                let scores = metrics.add_with_references(&row, &references, Some(&likelihood))?;
                record(AnsweredRow { answer: Some(answer), scores })?;
            }
        }
        Ok(metrics)
    }

    /// How probable the model finds the labels of a row, as sums over its label tokens.
    fn likelihood(&self, model: &Model, index: usize) -> Result<Likelihood> {
        let batch = self.split.batch([index])?;
        let scored = model.token_scores(&batch)?;
        let weights = batch.label_weights();
        Ok(Likelihood {
            nll: scored.iter().zip(weights).map(|((nll, _), weight)| f64::from(*nll) * weight).sum(),
            weight: batch.label_weight(),
            tokens: scored.len() as u64,
            right: scored.iter().filter(|(_, right)| *right).count() as u64,
            bytes: self.split.label_bytes_of(index, &self.dataset.tokenizer)?,
        })
    }

    /// Runs the classification head on all rows, `train.eval_batch_size` at a time.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a row has no label; those of the engine and the disk.
    pub fn classify(&self, model: &Model, head: &ScoreHead) -> Result<Scored> {
        let mut outputs = Vec::with_capacity(self.rows * head.outputs());
        let batch_size = self.config.train.eval_batch_size;
        for start in (0..self.rows).step_by(batch_size) {
            let batch = self.split.batch(start..self.rows.min(start + batch_size))?;
            outputs.extend(model.logits(&batch, &batch.ends())?);
        }
        Scored::of_rows(head, self.split, &outputs)
    }
}

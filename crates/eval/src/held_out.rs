//! Measures a model on held-out rows: generates an answer to each prompt, or reads the outputs of its classification head.
use super::metrics::scored::Scored;
use super::metrics::{Likelihood, Metrics, Row};
use super::settings::Settings;
use super::stop_strings::AnswerDecoder;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Config;
use tunesmith_config::arch::ScoreHead;
use tunesmith_data::{Dataset, Split};
use tunesmith_model::Model;

/// Prompts in one call of the generator, so that memory does not grow with the number of rows.
const PROMPTS: usize = 64;

/// The first rows of a validation or test split.
#[derive(Debug, Clone, Copy)]
pub struct HeldOut<'a> {
    /// Sections `gen`, `eval` and `train` say how to answer and what to measure.
    pub config: &'a Config,
    /// Source of the tokenizer and the chat template.
    pub dataset: &'a Dataset,
    /// One of the data set's splits.
    pub split: &'a Split,
    /// How many rows are measured; at most as many as the split has.
    pub rows: usize,
}

/// A row after the model has answered it.
#[derive(Debug)]
pub struct AnsweredRow {
    /// `None` for raw text, which asks no question: only its likelihood is measured.
    pub answer: Option<String>,
    /// Scores of this row alone, by metric.
    pub scores: Vec<(String, f64)>,
}

impl HeldOut<'_> {
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
        let tokenizer = &dataset.tokenizer;
        let mut metrics = Metrics::new(&config.eval, config.train.seed)?.with_likelihood();
        let settings = Settings::new(config, model.arch.max_position_embeddings, stop_ids.to_vec());
        let decoder = AnswerDecoder { tokenizer, stop_strings: &config.generation.stop_strings };
        let mut answered = 0;
        for start in (0..self.rows).step_by(PROMPTS) {
            let chunk = start..self.rows.min(start + PROMPTS);
            let questions: Vec<Option<(Vec<u32>, Vec<u32>)>> =
                chunk.clone().map(|index| dataset.question(self.split, index)).collect::<Result<_>>()?;
            let prompts: Vec<Vec<u32>> = questions.iter().flatten().map(|(prompt, _)| prompt.clone()).collect();
            let settings = Settings { first_text: answered, ..settings.clone() };
            let answers = decoder.answer(model, &prompts, &settings, &mut || true)?.unwrap_or_default();
            let mut answers = answers.into_iter();
            answered += prompts.len() as u64;
            for (index, question) in chunk.zip(questions) {
                let likelihood = self.likelihood(model, index)?;
                let answer = question.as_ref().and_then(|_| answers.next());
                let scores = match (&question, &answer) {
                    (Some((_, reference)), Some(answer)) => {
                        let reference = tokenizer.decode(reference, true)?;
                        let source = sources.get(index).map_or("", String::as_str);
                        metrics.add(&Row { source, answer, reference: &reference }, Some(&likelihood))?
                    }
                    _ => metrics.add_unanswered(&likelihood)?,
                };
                record(AnsweredRow { answer, scores })?;
            }
        }
        Ok(metrics)
    }

    /// The likelihood of a row's labels.
    fn likelihood(&self, model: &Model, index: usize) -> Result<Likelihood> {
        let scored = model.token_scores(&self.split.batch([index])?)?;
        Ok(Likelihood {
            nll: scored.iter().map(|(nll, _)| f64::from(*nll)).sum(),
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
        let mut scored = Scored::new(head.clone());
        let batch_size = self.config.train.eval_batch_size;
        for start in (0..self.rows).step_by(batch_size) {
            let chunk = start..self.rows.min(start + batch_size);
            let batch = self.split.batch(chunk.clone())?;
            let outputs = model.logits(&batch, &batch.ends())?;
            for (row, outputs) in chunk.zip(outputs.chunks_exact(head.outputs())) {
                let labelled = self.split.labelled(row)?;
                let (target, weight) = labelled.ok_or_else(|| Error::data(format!("row {} has no label", row + 1)))?;
                scored.push(outputs, target, weight);
            }
        }
        Ok(scored)
    }
}

//! Held-out rows answered greedily, before and after training, for the report's side-by-side view and the exact match.
use super::report::Sample;
use super::signals::Stop;
use crate::config::GenerationConfig;
use crate::data::Dataset;
use crate::error::Result;
use crate::eval::greedy;
use crate::model::Model;

/// Rows cut into what the model is given and what it should say.
pub struct Questions<'a> {
    dataset: &'a Dataset,
    max_new_tokens: usize,
    stop_ids: Vec<u32>,
    rows: Vec<(Vec<u32>, Vec<u32>)>,
}

impl<'a> Questions<'a> {
    /// The first rows held out from training that have a prompt and an answer: of the validation split, else of the
    /// test split.
    ///
    /// # Errors
    /// [`crate::Kind::Io`]: the tokens cannot be read from disk.
    pub fn new(dataset: &'a Dataset, eos_ids: &[u32], config: &GenerationConfig) -> Result<Self> {
        let held_out = dataset.validation.as_ref().or(dataset.test.as_ref());
        let mut rows = Vec::new();
        for (split, index) in held_out.into_iter().flat_map(|split| (0..split.len()).map(move |index| (split, index))) {
            if rows.len() == config.num_samples {
                break;
            }
            let (prompt, answer) = split.prompt(index)?;
            if !prompt.is_empty() && !answer.is_empty() {
                rows.push((prompt, answer));
            }
        }
        let stop_ids = [eos_ids, &dataset.stop_ids()?].concat();
        Ok(Self { dataset, max_new_tokens: config.max_new_tokens, stop_ids, rows })
    }

    /// Whether there is nothing to ask.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The model's greedy answers, none longer than its context, a few at a time; nothing if the run is asked to stop meanwhile.
    ///
    /// # Errors
    /// The engine or the tokenizer.
    pub fn answer(&self, model: &Model, stop: &Stop) -> Result<Option<Vec<String>>> {
        const AT_ONCE: usize = 8;
        let mut answers = Vec::with_capacity(self.rows.len());
        let go_on = || stop.requested().is_none();
        for chunk in self.rows.chunks(AT_ONCE) {
            let prompts: Vec<Vec<u32>> = chunk.iter().map(|(prompt, _)| prompt.clone()).collect();
            let context = model.arch.max_position_embeddings;
            let Some(found) = greedy(model, &prompts, self.max_new_tokens, context, &self.stop_ids, &go_on)? else {
                return Ok(None);
            };
            for tokens in found {
                answers.push(self.dataset.tokenizer.decode(&tokens, true)?);
            }
        }
        Ok(Some(answers))
    }

    /// Questions and answers side by side.
    ///
    /// # Errors
    /// The tokenizer.
    pub fn samples(&self, before: Vec<String>, after: Vec<String>) -> Result<Vec<Sample>> {
        let tokenizer = &self.dataset.tokenizer;
        let mut samples = Vec::with_capacity(self.rows.len());
        for ((prompt, answer), (before, after)) in self.rows.iter().zip(before.into_iter().zip(after)) {
            let (prompt, reference) = (tokenizer.decode(prompt, false)?, tokenizer.decode(answer, true)?);
            samples.push(Sample { prompt, reference, before, after });
        }
        Ok(samples)
    }
}

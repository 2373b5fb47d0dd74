//! Held-out rows answered, before and after training, for the report's side-by-side view and the exact match.
use super::run_plan::SamplesPlan;
use super::signals::Stop;
use tunesmith_base::error::{Kind, Result};
use tunesmith_data::{Dataset, question};
use tunesmith_eval::AnswerDecoder;
use tunesmith_model::Model;
use tunesmith_telemetry::report::Sample;

/// Held-out rows, each cut into a prompt and a reference.
pub struct Questions<'a> {
    dataset: &'a Dataset,
    plan: &'a SamplesPlan,
    rows: Vec<(Vec<u32>, Vec<u32>)>,
}

impl<'a> Questions<'a> {
    /// The first rows held out from training that have a prompt and an answer: of the validation split, else of the
    /// test split.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn new(dataset: &'a Dataset, plan: &'a SamplesPlan) -> Result<Self> {
        let held_out = dataset.validation.as_ref().or(dataset.test.as_ref());
        let mut rows = Vec::new();
        for (split, index) in held_out.into_iter().flat_map(|split| (0..split.len()).map(move |index| (split, index))) {
            if rows.len() == plan.rows {
                break;
            }
            rows.extend(dataset.question(split, index)?);
        }
        Ok(Self { dataset, plan, rows })
    }

    /// Whether there is nothing to ask.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The model's answers; none if the run is asked to stop meanwhile.
    ///
    /// # Errors
    /// The engine or the tokenizer.
    pub fn answer(&self, model: &Model, stop: &Stop) -> Result<Option<Vec<String>>> {
        let prompts: Vec<Vec<u32>> = self.rows.iter().map(|(prompt, _)| prompt.clone()).collect();
        let asked = AnswerDecoder { tokenizer: &self.dataset.tokenizer, stop_strings: &self.plan.stop_strings };
        asked.answer(model, &prompts, &self.plan.settings, &mut || stop.requested().is_none()).map_err(|error| {
            match error.kind() {
                Kind::Memory => error.context("answering held-out rows; the training is done and saved"),
                _ => error,
            }
        })
    }

    /// Questions and answers side by side.
    ///
    /// # Errors
    /// The tokenizer.
    pub fn samples(&self, before: Vec<String>, after: Vec<String>) -> Result<Vec<Sample>> {
        let tokenizer = &self.dataset.tokenizer;
        let prompts: Vec<String> =
            self.rows.iter().map(|(prompt, _)| tokenizer.decode(prompt, false)).collect::<Result<_>>()?;
        let questions = question::questions(self.dataset.template.as_ref(), &prompts);
        let mut samples = Vec::with_capacity(self.rows.len());
        let rows = prompts.into_iter().zip(questions).zip(&self.rows);
        for (((prompt, question), (_, answer)), (before, after)) in rows.zip(before.into_iter().zip(after)) {
            samples.push(Sample { prompt, question, reference: tokenizer.decode(answer, true)?, before, after });
        }
        Ok(samples)
    }
}

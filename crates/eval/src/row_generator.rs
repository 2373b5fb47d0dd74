//! Generates answers for rows of a held-out split: for `eval`, and for `train.predict_with_generate`.
use std::ops::Range;

use super::settings::Settings;
use super::stop_strings::AnswerDecoder;
use super::watcher::Answer;
use tunesmith_base::error::Result;
use tunesmith_data::{Dataset, Split};
use tunesmith_model::Model;

/// A row that has a prompt and a reference.
#[derive(Debug)]
pub struct EvalExample {
    /// The number of the row in its split.
    pub row: usize,
    /// The text for metrics that read the source; empty if no metric does.
    pub source: String,
    /// The text of the expected answer.
    pub reference: String,
    /// All references ([`Split::references`]): an image may have several captions, a question several people's answers.
    pub references: Vec<String>,
}

/// Generates answers for rows of a split, a range of rows at a time.
#[derive(Debug)]
pub struct RowGenerator<'a> {
    /// Splits the tokens of a row into prompt and reference.
    pub dataset: &'a Dataset,
    /// One of the data set's splits.
    pub split: &'a Split,
    /// One text per row for metrics that read the source ([`super::metrics::Row::source`]), else empty.
    pub sources: &'a [String],
    /// `first_text` is the number of prompts answered so far, so that sampling does not depend on the ranges.
    pub settings: Settings,
    /// Decodes answers and finds the stop strings.
    pub decoder: AnswerDecoder<'a>,
}

impl RowGenerator<'_> {
    /// Answers the `rows` that have a prompt and a reference, and passes each to `ended` as soon as its answer ends. Returns
    /// false if `go_on`, which is called before each token, has ended the generation.
    ///
    /// # Errors
    /// Those of generation, of the tokenizer and of `ended`; [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn generate(
        &mut self,
        model: &Model,
        rows: Range<usize>,
        go_on: &mut dyn FnMut() -> bool,
        ended: &mut dyn FnMut(EvalExample, &Answer) -> Result<()>,
    ) -> Result<bool> {
        let (mut prompts, mut examples) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        let mut indices = Vec::with_capacity(rows.len());
        for row in rows {
            let Some((prompt, answer)) = self.dataset.question(self.split, row)? else { continue };
            let reference = self.dataset.tokenizer.decode(&answer, true)?;
            let references = self.split.references(row, &self.dataset.tokenizer)?;
            prompts.push(prompt);
            indices.push(row);
            let source = self.sources.get(row).cloned().unwrap_or_default();
            examples.push(Some(EvalExample { row, source, reference, references }));
        }
        let images = self.split.prompt_images(&indices)?;
        let mut take = |text: usize, answer: &Answer| examples[text].take().map_or(Ok(()), |it| ended(it, answer));
        let done = self.decoder.answer_each(model, &prompts, &images, &self.settings, go_on, &mut take)?;
        self.settings.first_text += prompts.len() as u64;
        Ok(done)
    }
}

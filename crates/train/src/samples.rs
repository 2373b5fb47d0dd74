//! Generations on held-out rows before and after training, for the report and the exact match.
use super::run_plan::SamplesPlan;
use super::signals::Stop;
use tunesmith_base::error::{Kind, Result};
use tunesmith_data::{Dataset, Split, question};
use tunesmith_eval::AnswerDecoder;
use tunesmith_model::Model;
use tunesmith_telemetry::report::Sample;

/// Maximum bytes of thumbnails in a report.
const PICTURE_BYTES: usize = 8 << 20;

/// Held-out rows, each split into the tokens of its prompt and of its reference.
pub struct Questions<'a> {
    dataset: &'a Dataset,
    plan: &'a SamplesPlan,
    rows: Vec<(Vec<u32>, Vec<u32>)>,
    /// The split that `rows` are of, and their numbers in it.
    places: Vec<(&'a Split, usize)>,
}

impl<'a> Questions<'a> {
    /// Takes the first held-out rows that have a prompt and a reference, from the validation split or else the test split.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn new(dataset: &'a Dataset, plan: &'a SamplesPlan) -> Result<Self> {
        let held_out = dataset.validation.as_ref().or(dataset.test.as_ref());
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        for (split, index) in held_out.into_iter().flat_map(|split| (0..split.len()).map(move |index| (split, index))) {
            if rows.len() == plan.rows {
                break;
            }
            if let Some(row) = dataset.question(split, index)? {
                rows.push(row);
                places.push((split, index));
            }
        }
        Ok(Self { dataset, plan, rows, places })
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Generates for every row; returns `None` if the run is asked to stop meanwhile.
    ///
    /// # Errors
    /// Those of the engine and the tokenizer.
    pub fn generate(&self, model: &Model, stop: &Stop) -> Result<Option<Vec<String>>> {
        let prompts: Vec<Vec<u32>> = self.rows.iter().map(|(prompt, _)| prompt.clone()).collect();
        let images =
            self.places.iter().map(|(split, index)| Ok(split.prompt_images(&[*index])?.pop().unwrap_or_default()));
        let images: Vec<_> = images.collect::<Result<_>>()?;
        let decoder = AnswerDecoder { tokenizer: &self.dataset.tokenizer, stop_strings: &self.plan.stop_strings };
        decoder.answer(model, &prompts, &images, &self.plan.settings, &mut || stop.requested().is_none()).map_err(
            |error| match error.kind() {
                Kind::Memory => error.context("generating for held-out rows; the training is done and saved"),
                _ => error,
            },
        )
    }

    /// Puts each row together with its generations before and after training.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub fn samples(&self, before: Vec<String>, after: Vec<String>) -> Result<Vec<Sample>> {
        let tokenizer = &self.dataset.tokenizer;
        let mut prompts = Vec::with_capacity(self.rows.len());
        for ((prompt, _), (split, index)) in self.rows.iter().zip(&self.places) {
            // The ids in the place of an image mean nothing, so such a row shows the names of its image files.
            prompts.push(if split.shows(*index) {
                split.picture_files(*index).join(", ")
            } else {
                tokenizer.decode(prompt, false)?
            });
        }
        let questions = question::questions(self.dataset.template.as_ref(), &prompts);
        let mut samples = Vec::with_capacity(self.rows.len());
        let rows = prompts.into_iter().zip(questions).zip(&self.rows).zip(&self.places);
        let mut bytes = 0;
        for ((((prompt, question), (_, answer)), (split, index)), (before, after)) in
            rows.zip(before.into_iter().zip(after))
        {
            let mut pictures = if bytes < PICTURE_BYTES { split.thumbnails(*index)? } else { Vec::new() };
            bytes += pictures.iter().map(String::len).sum::<usize>();
            if bytes > PICTURE_BYTES {
                pictures.clear();
            }
            let reference = tokenizer.decode(answer, true)?;
            samples.push(Sample { prompt, question, pictures, reference, before, after });
        }
        Ok(samples)
    }
}

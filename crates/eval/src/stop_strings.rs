//! Decodes answers to text: looks for stop strings during generation, and cuts them off at the end.
use super::generate::generate_with_images;
use super::settings::Settings;
use super::stream::first_stop;
use super::watcher::{Answer, Go, Watcher};
use tunesmith_base::error::Result;
use tunesmith_data::Tokenizer;
use tunesmith_data::batch::ImageRows;
use tunesmith_model::Model;

/// Decodes answers and looks for stop strings in them.
#[derive(Debug, Clone, Copy)]
pub struct AnswerDecoder<'a> {
    /// Decodes tokens; special tokens are left out.
    pub tokenizer: &'a Tokenizer,
    /// Strings that end an answer; they are not part of it.
    pub stop_strings: &'a [String],
}

/// The most tokens that a stop string can span, since each token contains at least one byte of it.
fn reach(stops: &[String]) -> usize {
    stops.iter().map(String::len).max().unwrap_or(0)
}

/// Ends answers at stop strings, and passes the rest on to the callbacks of [`AnswerDecoder::answer_each`].
struct Callbacks<'a> {
    decoder: &'a AnswerDecoder<'a>,
    go_on: &'a mut dyn FnMut() -> bool,
    ended: &'a mut dyn FnMut(usize, &Answer) -> Result<()>,
}

impl Watcher for Callbacks<'_> {
    fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
        Ok(if (self.go_on)() { Go::On } else { Go::EndAll })
    }

    fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
        self.decoder.stops(tokens)
    }

    fn answer(&mut self, prompt: usize, answer: &Answer) -> Result<()> {
        (self.ended)(prompt, answer)
    }
}

impl AnswerDecoder<'_> {
    /// Whether the last tokens of an answer contain a stop string.
    pub fn stops(&self, tokens: &[u32]) -> bool {
        if self.stop_strings.is_empty() {
            return false;
        }
        let tail = &tokens[tokens.len().saturating_sub(reach(self.stop_strings) + 8)..];
        self.tokenizer.decode(tail, true).is_ok_and(|text| first_stop(&text, self.stop_strings).is_some())
    }

    /// An answer's text, up to the first stop string.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn text(&self, answer: &Answer) -> Result<String> {
        Ok(self.cut(self.tokenizer.decode(&answer.tokens, true)?))
    }

    /// The text up to the first stop string.
    pub fn cut(&self, mut text: String) -> String {
        if let Some(end) = first_stop(&text, self.stop_strings) {
            text.truncate(end);
        }
        text
    }

    /// Answers prompts, each with its images; `images` is empty if no prompt has any. `None` if `go_on`, which is
    /// called before each token, returns false.
    ///
    /// # Errors
    /// As [`generate_with_images`](super::generate_with_images); the tokenizer's decoder fails.
    pub fn answer(
        &self,
        model: &Model,
        prompts: &[Vec<u32>],
        images: &[Vec<ImageRows>],
        settings: &Settings,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<String>>> {
        let mut texts = vec![String::new(); prompts.len()];
        let done = self.answer_each(model, prompts, images, settings, go_on, &mut |prompt, answer| {
            texts[prompt] = self.text(answer)?;
            Ok(())
        })?;
        Ok(done.then_some(texts))
    }

    /// Answers prompts, each with its images, and calls `ended` with the number of each prompt and its answer as soon
    /// as the answer ends. Returns false if `go_on`, which is called before each token, has ended the generation.
    ///
    /// # Errors
    /// As [`generate_with_images`](super::generate_with_images); those of `ended`.
    pub(crate) fn answer_each(
        &self,
        model: &Model,
        prompts: &[Vec<u32>],
        images: &[Vec<ImageRows>],
        settings: &Settings,
        go_on: &mut dyn FnMut() -> bool,
        ended: &mut dyn FnMut(usize, &Answer) -> Result<()>,
    ) -> Result<bool> {
        let mut watcher = Callbacks { decoder: self, go_on, ended };
        Ok(generate_with_images(model, prompts, images, settings, &mut watcher)?.is_some())
    }
}

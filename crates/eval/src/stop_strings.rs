//! Decodes answers to text: looks for stop strings during generation, and cuts them off at the end.
use super::generate::generate;
use super::settings::Settings;
use super::stream::first_stop;
use super::watcher::{Answer, Go, Watcher};
use tunesmith_base::error::Result;
use tunesmith_data::Tokenizer;
use tunesmith_model::Model;

/// Decodes answers and looks for stop strings in them.
#[derive(Debug, Clone, Copy)]
pub struct AnswerDecoder<'a> {
    /// Decodes tokens; special tokens are left out.
    pub tokenizer: &'a Tokenizer,
    /// Strings that end an answer; they are not part of it.
    pub stop_strings: &'a [String],
}

/// The most tokens that a stop string can span: each has at least one byte of it.
fn reach(stops: &[String]) -> usize {
    stops.iter().map(String::len).max().unwrap_or(0)
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
        let mut text = self.tokenizer.decode(&answer.tokens, true)?;
        if let Some(end) = first_stop(&text, self.stop_strings) {
            text.truncate(end);
        }
        Ok(text)
    }

    /// Answers prompts. `None` if `go_on`, which is called before each token, returns false.
    ///
    /// # Errors
    /// As [`generate`]; the tokenizer's decoder fails.
    pub fn answer(
        &self,
        model: &Model,
        prompts: &[Vec<u32>],
        settings: &Settings,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<String>>> {
        struct Quiet<'a, 'b>(&'a AnswerDecoder<'a>, &'b mut dyn FnMut() -> bool);
        impl Watcher for Quiet<'_, '_> {
            fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
                Ok(if (self.1)() { Go::On } else { Go::EndAll })
            }
            fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
                self.0.stops(tokens)
            }
        }
        let Some(answers) = generate(model, prompts, settings, &mut Quiet(self, go_on))? else { return Ok(None) };
        answers.iter().map(|answer| self.text(answer)).collect::<Result<_>>().map(Some)
    }
}

//! Keeps the key-value cache of a conversation, so that a new turn computes only its own tokens.
use super::generate::{generate_from, generate_with_images};
use super::settings::{Settings, Strategy};
use super::watcher::{Answer, Watcher};
use tunesmith_base::error::Result;
use tunesmith_data::batch::ImageRows;
use tunesmith_model::{Model, TextCache};

/// The key/value cache of a conversation so far.
#[derive(Debug, Default)]
pub struct Memory(Option<TextCache>);

impl Memory {
    /// Drops the cache, as when the conversation or the model changes.
    pub fn clear(&mut self) {
        self.0 = None;
    }

    /// How many tokens at the start of `prompt` are in the cache. For a prompt with images it is 0, because equal
    /// tokens may stand for other images.
    pub fn known(&self, prompt: &[u32], images: &[ImageRows]) -> usize {
        if !images.is_empty() {
            return 0;
        }
        let read = self.0.as_ref().map_or(&[][..], TextCache::tokens);
        read.iter().zip(prompt).take_while(|(old, new)| old == new).count().min(prompt.len().saturating_sub(1))
    }

    /// Answers a prompt, and computes only tokens that are not in the cache. Beam search, and prompts with images,
    /// compute all tokens. `None` if the watcher ended the generation.
    ///
    /// # Errors
    /// As [`crate::generate`].
    pub fn answer(
        &mut self,
        model: &Model,
        prompt: &[u32],
        images: &[ImageRows],
        settings: &Settings,
        watcher: &mut dyn Watcher,
    ) -> Result<Option<Answer>> {
        let prompts = [prompt.to_vec()];
        if matches!(settings.strategy, Strategy::Beams(_)) || !images.is_empty() {
            self.clear();
            let answers = generate_with_images(model, &prompts, &[images.to_vec()], settings, watcher)?;
            return Ok(answers.and_then(|mut answers| answers.pop()));
        }
        let known = self.known(prompt, images);
        let mut cache = self.0.take().unwrap_or_else(|| model.cache());
        if !cache.truncate(known) {
            cache = model.cache();
        }
        let answer = generate_from(model, &prompts, &[], settings, Some(&mut cache), watcher)?;
        let answer = answer.and_then(|mut all| all.pop());
        self.0 = answer.is_some().then_some(cache);
        Ok(answer)
    }
}

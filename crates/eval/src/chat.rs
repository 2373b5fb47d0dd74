//! Keeps the key/value cache of a conversation, so that a new turn computes only its own tokens.
use super::generate::{generate, generate_from};
use super::settings::{Settings, Strategy};
use super::watcher::{Answer, Watcher};
use tunesmith_base::error::Result;
use tunesmith_model::{Model, TextCache};

/// The key/value cache of a conversation so far.
#[derive(Debug, Default)]
pub struct Memory(Option<TextCache>);

impl Memory {
    /// Drops the cache, as when the conversation or the model changes.
    pub fn clear(&mut self) {
        self.0 = None;
    }

    /// How many tokens at the start of `prompt` are in the cache.
    pub fn known(&self, prompt: &[u32]) -> usize {
        let read = self.0.as_ref().map_or(&[][..], TextCache::tokens);
        read.iter().zip(prompt).take_while(|(old, new)| old == new).count().min(prompt.len().saturating_sub(1))
    }

    /// Answers a prompt and computes only tokens that are not in the cache; beam search computes all. `None` if the watcher
    /// ended the generation.
    ///
    /// # Errors
    /// As [`generate`].
    pub fn answer(
        &mut self,
        model: &Model,
        prompt: &[u32],
        settings: &Settings,
        watcher: &mut dyn Watcher,
    ) -> Result<Option<Answer>> {
        let prompts = [prompt.to_vec()];
        if matches!(settings.strategy, Strategy::Beams(_)) {
            return Ok(generate(model, &prompts, settings, watcher)?.and_then(|mut answers| answers.pop()));
        }
        let known = self.known(prompt);
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

//! The data of a run: its rows, tokenizer and chat template.
use std::path::PathBuf;
use std::sync::OnceLock;

use super::inputs::Inputs;
use super::labels::Class;
use super::report::Report;
use super::sampler::{Sampler, SamplerOptions};
use super::source_texts::source_texts;
use super::split::Split;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use tunesmith_base::error::Result;
use tunesmith_config::Config;

/// The data of a run.
#[derive(Debug)]
pub struct Dataset {
    /// Examples to train on, without those held out for validation.
    pub train: Split,
    /// Examples for evaluation during training: `data.val_path`, or the share `data.split` of the training rows.
    pub validation: Option<Split>,
    /// Examples of `data.test_path`, for evaluation after training.
    pub test: Option<Split>,
    /// The model's tokenizer, including `tuning.new_tokens`.
    pub tokenizer: Tokenizer,
    /// The chat template, if there is one.
    pub template: Option<ChatTemplate>,
    /// How many rows were used, cut or left out.
    pub report: Report,
    /// BLAKE3 of the training and validation tokens and labels, in hex.
    pub fingerprint: String,
    /// BLAKE3 of the tokenizer and the template, in hex.
    pub tokenizer_fingerprint: String,
    /// The files that the rows were read from.
    pub inputs: Inputs,
    /// The labels of a classification, by their numbers; empty for other tasks.
    pub classes: Vec<Class>,
    pub(super) validation_cache: ValidationCache,
}

/// What every evaluation needs of the validation rows, computed once.
#[derive(Debug, Default)]
pub(super) struct ValidationCache {
    label_bytes: OnceLock<u64>,
    sources: OnceLock<Vec<String>>,
}

impl Dataset {
    /// The order of training rows, one row a step until [`Sampler::resize`].
    pub fn sampler(&self, config: &Config) -> Sampler {
        Sampler::new(
            &self.train.lengths(),
            SamplerOptions {
                batch_size: 1,
                grad_accum: 1,
                seed: data_seed(config),
                shuffle: config.data.shuffle,
                group_by_length: config.train.group_by_length,
                packing: config.data.packing.then_some(config.model.max_seq_len),
            },
        )
    }

    /// The folder of the token cache; `None` with `data.use_cache: false`, or if the system has no cache folder.
    pub fn cache_dir(&self, config: &Config) -> Option<PathBuf> {
        let kept = config.data.use_cache;
        kept.then(|| config.data.cache_dir.clone().or_else(tunesmith_base::files::user_cache)).flatten()
    }

    /// The prompt and the answer of an example, as token ids. `None` without an answer, or if the prompt has only
    /// special tokens, as in plain text after BOS.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn question(&self, split: &Split, index: usize) -> Result<Option<(Vec<u32>, Vec<u32>)>> {
        let (prompt, answer) = split.prompt(index)?;
        let says = split.shows(index) || prompt.iter().any(|&id| !self.tokenizer.is_special(id));
        let asks = says && !answer.is_empty();
        Ok(asks.then_some((prompt, answer)))
    }

    /// The UTF-8 bytes of the validation labels ([`Split::label_bytes`]); 0 without validation rows.
    ///
    /// # Errors
    /// Those of [`Split::label_bytes`].
    pub fn validation_bytes(&self) -> Result<u64> {
        if let Some(&bytes) = self.validation_cache.label_bytes.get() {
            return Ok(bytes);
        }
        let bytes = self.validation.as_ref().map_or(Ok(0), |split| split.label_bytes(&self.tokenizer))?;
        Ok(*self.validation_cache.label_bytes.get_or_init(|| bytes))
    }

    /// Reads the source text of each validation row ([`super::row::source_of`]) for [`Self::validation_sources`].
    ///
    /// # Errors
    /// The files cannot be read again.
    pub fn read_validation_sources(&self, config: &Config) -> Result<()> {
        if self.validation_cache.sources.get().is_none() {
            let rows = self.validation.as_ref().map_or(&[][..], |split| &split.rows);
            let sources = source_texts(rows, &self.inputs.of_validation(), config)?;
            self.validation_cache.sources.get_or_init(|| sources);
        }
        Ok(())
    }

    /// What [`Self::read_validation_sources`] has read; empty before.
    pub fn validation_sources(&self) -> &[String] {
        self.validation_cache.sources.get().map_or(&[], Vec::as_slice)
    }

    /// The ids that end an answer: those of the model's files, and special tokens at the end of training rows.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn stop_ids(&self) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.stop_ids().to_vec();
        // A template ends all turns alike, so a few rows are enough.
        for index in 0..self.train.len().min(64) {
            ids.extend(self.train.prompt(index)?.1.last().filter(|id| self.tokenizer.is_special(**id)));
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

pub(super) fn data_seed(config: &Config) -> u64 {
    config.train.data_seed.unwrap_or(config.train.seed)
}

//! A configuration's data, ready to train on: read, tokenized in parallel (or taken from the cache), split, counted.
use std::cell::Cell;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::cache;
use super::encode::{EncodeOptions, Encoder, Outcome};
use super::row::Form;
use super::sampler::{Sampler, SamplerOptions};
use super::source::{self, RawRow};
use super::split::Split;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use crate::config::{Config, Truncation};
use crate::error::{Error, Result};

/// Rows that are tokenized together; also bounds what is in memory as text.
const CHUNK_ROWS: usize = 4096;
const CHUNK_BYTES: u64 = 32 << 20;
/// How many rows without labels are named.
const NAMED_ROWS: usize = 5;

/// Is told how far a long piece of work has come.
pub trait Progress {
    /// `total` units of work begin.
    fn begin(&self, what: &str, total: u64);
    /// `by` more units are done.
    fn advance(&self, by: u64);
    /// The work is over.
    fn end(&self);
}

/// Tells nobody.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
}

/// What became of the rows of a set of files.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Rows read.
    pub rows: u64,
    /// Rows that can be used.
    pub kept: u64,
    /// Rows of those that were cut to the longest allowed length.
    pub truncated: u64,
    /// Rows left out because they were too long (`truncation: drop`).
    pub too_long: u64,
    /// Rows left out because no token of theirs carries a loss.
    pub unlabeled: u64,
    /// Rows of those whose labels truncation cut off.
    pub unlabeled_by_truncation: u64,
    /// Where the first of them stand.
    pub unlabeled_places: Vec<String>,
}

impl Counts {
    /// What of this a user should know, a sentence each.
    pub fn warnings(&self, set: &str, max_seq_len: usize) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.truncated > 0 {
            warnings.push(format!("{set}: {} rows cut to {max_seq_len} tokens", self.truncated));
        }
        if self.too_long > 0 {
            warnings.push(format!("{set}: {} rows longer than {max_seq_len} tokens left out", self.too_long));
        }
        if self.unlabeled > 0 {
            let cut = match self.unlabeled_by_truncation {
                0 => String::new(),
                cut => format!(", {cut} of them because truncation cut the labels off"),
            };
            warnings.push(format!(
                "{set}: {} rows without labels left out{cut} (first: {})",
                self.unlabeled,
                self.unlabeled_places.join(", ")
            ));
        }
        warnings
    }
}

/// How the data came about.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Report {
    /// Of `data.train_path`, before the split.
    pub train: Counts,
    /// Of `data.val_path`.
    pub validation: Option<Counts>,
    /// Of `data.test_path`.
    pub test: Option<Counts>,
    /// Whether all of it came from the cache.
    pub from_cache: bool,
    /// Whether the training rows go through the chat template.
    pub templated: bool,
    /// What a user should know, a sentence each.
    pub warnings: Vec<String>,
}

/// Everything that a run needs of the data.
#[derive(Debug)]
pub struct Dataset {
    /// What is trained on.
    pub train: Split,
    /// What is measured during training: `data.val_path`, or the share `data.split` of the training rows.
    pub validation: Option<Split>,
    /// `data.test_path`.
    pub test: Option<Split>,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if there is one.
    pub template: Option<ChatTemplate>,
    /// How the data came about.
    pub report: Report,
    /// BLAKE3 of the training and validation tokens and labels, in hex.
    pub fingerprint: String,
    /// BLAKE3 of the tokenizer and the template, in hex.
    pub tokenizer_fingerprint: String,
}

impl Dataset {
    /// The order of training that the configuration asks for.
    pub fn sampler(&self, config: &Config) -> Sampler {
        Sampler::new(
            &self.train.lengths(),
            SamplerOptions {
                batch_size: config.train.batch_size,
                grad_accum: config.train.grad_accum,
                seed: data_seed(config),
                shuffle: config.data.shuffle,
                group_by_length: config.train.group_by_length,
                packing: config.data.packing.then_some(config.model.max_seq_len),
            },
        )
    }

    /// Every id that ends an answer: those of the model's files, and special tokens that end the training rows.
    pub fn stop_ids(&self) -> Vec<u32> {
        let mut ids = self.tokenizer.stop_ids().to_vec();
        let special: Vec<u32> =
            self.tokenizer.special_texts().iter().filter_map(|text| self.tokenizer.id(text)).collect();
        let last_label = |index| self.train.prompt(index).1.last().copied();
        // A template ends all its turns alike: some rows show how.
        ids.extend((0..self.train.len().min(64)).filter_map(last_label).filter(|id| special.contains(id)));
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// `train.data_seed`, or `train.seed`.
fn data_seed(config: &Config) -> u64 {
    config.train.data_seed.unwrap_or(config.train.seed)
}

/// Reads and tokenizes all data of a configuration. `vocab_size` is the model's.
///
/// # Errors
/// [`crate::Kind::Data`], naming file and line, what was found and what is expected.
pub fn load(config: &Config, model_dir: &Path, vocab_size: usize, progress: &dyn Progress) -> Result<Dataset> {
    let data = &config.data;
    if data.train_path.is_empty() {
        return Err(Error::config("data.train_path is not set").hint("data.train_path=rows.jsonl"));
    }
    let tokenizer = Tokenizer::load_with(model_dir, &config.tuning.new_tokens)?;
    let template = ChatTemplate::find(model_dir, &tokenizer, data.template_path.as_deref(), data.chat_template)?;
    let options = EncodeOptions {
        max_seq_len: config.model.max_seq_len,
        truncation: data.truncation,
        loss_on: data.loss_on,
        vocab_size,
    };
    let loader = Loader {
        encoder: Encoder { tokenizer, template, options },
        config,
        threads: rayon::ThreadPoolBuilder::new()
            .num_threads(data.num_proc.unwrap_or(0))
            .build()
            .map_err(|error| Error::config(format!("data.num_proc: cannot start threads: {error}")))?,
        cache_dir: data.use_cache.then(|| data.cache_dir.clone().or_else(cache::default_dir)).flatten(),
        progress,
        missed: Cell::new(false),
        warnings: Cell::default(),
    };
    let (mut train, train_counts) = loader.load_set("train", &data.train_path)?;
    let optional = |set: &str, paths: &[PathBuf]| match paths {
        [] => Ok((None, None)),
        paths => loader.load_set(set, paths).map(|(split, counts)| (Some(split), Some(counts))),
    };
    let (mut validation, validation_counts) = optional("validation", &data.val_path)?;
    let (test, test_counts) = optional("test", &data.test_path)?;
    // A configuration with both is refused when it is read.
    if data.split > 0.0 && validation.is_none() {
        if train.len() < 2 {
            return Err(Error::data(format!("data.split needs at least 2 usable rows, found {}", train.len())));
        }
        validation = Some(train.take_share(data.split, data_seed(config)));
        if train.is_empty() {
            return Err(Error::data(format!("data.split={} leaves no row to train on", data.split)));
        }
    }
    let mut hasher = blake3::Hasher::new();
    train.hash_into(&mut hasher);
    if let Some(validation) = &validation {
        validation.hash_into(&mut hasher);
    }
    let fingerprint = hasher.finalize().to_hex().to_string();
    let tokenizer_fingerprint = loader.encoder_hash().to_hex().to_string();
    let (from_cache, warnings) = (!loader.missed.get(), loader.warnings.take());
    let templated = loader.forms(&data.train_path).iter().any(|form| !form.is_plain());
    let Encoder { tokenizer, template, .. } = loader.encoder;
    let report = Report {
        train: train_counts,
        validation: validation_counts,
        test: test_counts,
        from_cache,
        templated,
        warnings,
    };
    Ok(Dataset { train, validation, test, tokenizer, template, report, fingerprint, tokenizer_fingerprint })
}

struct Loader<'a> {
    encoder: Encoder,
    config: &'a Config,
    threads: rayon::ThreadPool,
    cache_dir: Option<PathBuf>,
    progress: &'a dyn Progress,
    /// Whether something was not in the cache.
    missed: Cell<bool>,
    warnings: Cell<Vec<String>>,
}

impl Loader<'_> {
    fn warn(&self, warnings: impl IntoIterator<Item = String>) {
        let mut all = self.warnings.take();
        all.extend(warnings);
        self.warnings.set(all);
    }

    /// The forms that the first rows of each file show.
    fn forms(&self, paths: &[PathBuf]) -> Vec<Form> {
        paths.iter().flat_map(|path| source::forms(path, Form::of(self.config.data.format))).collect()
    }

    fn load_set(&self, set: &str, paths: &[PathBuf]) -> Result<(Split, Counts)> {
        let setting = match set {
            "train" => "data.train_path",
            "validation" => "data.val_path",
            _ => "data.test_path",
        };
        let key = self.key(paths).map_err(|error| error.context(setting))?;
        let cached = self.cache_dir.as_ref().map(|dir| cache::path(dir, &key));
        let found = cached.as_ref().and_then(|path| cache::read(path, &key));
        let (split, counts) = if let Some(found) = found {
            found
        } else {
            self.missed.set(true);
            let (split, counts) = self.encode_files(set, paths)?;
            if let Some(path) = &cached
                && let Err(error) = cache::write(path, &key, &split, &counts)
            {
                self.warn([format!("cannot keep tokenized data in {}: {error}", path.display())]);
            }
            (split, counts)
        };
        self.warn(counts.warnings(set, self.config.model.max_seq_len));
        if split.is_empty() {
            return Err(self.nothing_usable(set, paths, &counts));
        }
        Ok((split, counts))
    }

    fn nothing_usable(&self, set: &str, paths: &[PathBuf], counts: &Counts) -> Error {
        let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        let names = names.join(", ");
        if counts.rows == 0 {
            return Error::data(format!("{names}: found no rows in the {set} data"));
        }
        let limit = self.config.model.max_seq_len;
        let all = format!("{names}: none of the {} {set} rows can be used", counts.rows);
        if counts.too_long + counts.unlabeled_by_truncation > 0 {
            let policy: Truncation = self.config.data.truncation;
            return Error::data(format!(
                "{all}: {} are longer than model.max_seq_len={limit} and lost to data.truncation={policy}, {} have no labels",
                counts.too_long + counts.unlabeled_by_truncation,
                counts.unlabeled - counts.unlabeled_by_truncation,
            ))
            .hint("raise model.max_seq_len");
        }
        let forms = self.forms(paths);
        let hint = match &self.encoder.template {
            Some(template) if !forms.iter().all(|form| form.is_plain()) => {
                format!("are there assistant turns? does the chat template ({}) write them?", template.origin())
            }
            _ if forms.contains(&Form::Tokenized) => "is every label -100? The first of a row never counts".into(),
            _ => "are the texts empty?".into(),
        };
        Error::data(format!("{all}: no token carries a loss")).hint(hint)
    }

    /// Reads, tokenizes and labels the rows of some files.
    fn encode_files(&self, set: &str, paths: &[PathBuf]) -> Result<(Split, Counts)> {
        let total = paths.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum();
        self.progress.begin(&format!("tokenizing {set}"), total);
        let (mut split, mut counts) = (Split::default(), Counts::default());
        let format = Form::of(self.config.data.format);
        for path in paths {
            let left = self.config.data.max_rows.map(|most| most.saturating_sub(counts.rows as usize));
            let bytes = Cell::new(0_u64);
            let mut chunk = Vec::new();
            let mut forms_of_file = Vec::new();
            let mut encoded_bytes = 0;
            let read = source::read(path, format, left, &bytes, &mut |row, forms| {
                if forms_of_file.is_empty() {
                    forms_of_file = forms.to_vec();
                }
                chunk.push(row);
                if chunk.len() == CHUNK_ROWS || bytes.get() - encoded_bytes > CHUNK_BYTES {
                    self.encode_chunk(&mut chunk, &forms_of_file, &mut split, &mut counts)?;
                    self.progress.advance(bytes.get() - encoded_bytes);
                    encoded_bytes = bytes.get();
                }
                Ok(())
            });
            self.encode_chunk(&mut chunk, &forms_of_file, &mut split, &mut counts)?;
            self.progress.advance(bytes.get() - encoded_bytes);
            read?;
        }
        self.progress.end();
        Ok((split, counts))
    }

    fn encode_chunk(
        &self,
        chunk: &mut Vec<RawRow>,
        forms: &[Form],
        split: &mut Split,
        counts: &mut Counts,
    ) -> Result<()> {
        let encoder = &self.encoder;
        let encode = |row: RawRow| {
            let place = row.place.clone();
            let (row, weight) = row.parse_weighted(forms)?;
            let outcome = encoder.encode(row).map_err(|error| error.context(&place))?;
            Ok((place, outcome, weight))
        };
        let outcomes: Vec<Result<_>> = self.threads.install(|| chunk.par_drain(..).map(encode).collect());
        for outcome in outcomes {
            let (place, outcome, weight) = outcome?;
            counts.rows += 1;
            match outcome {
                Outcome::Kept { example, truncated } => {
                    counts.kept += 1;
                    counts.truncated += u64::from(truncated);
                    split.push(&example);
                    split.weigh_last(weight);
                }
                Outcome::TooLong => counts.too_long += 1,
                Outcome::Unlabeled { truncated } => {
                    counts.unlabeled += 1;
                    counts.unlabeled_by_truncation += u64::from(truncated);
                    if counts.unlabeled_places.len() < NAMED_ROWS {
                        counts.unlabeled_places.push(place.to_string());
                    }
                }
            }
        }
        Ok(())
    }

    /// What the tokens of a text depend on, besides the options.
    fn encoder_hash(&self) -> blake3::Hash {
        let Encoder { tokenizer, template, .. } = &self.encoder;
        let mut hasher = blake3::Hasher::new();
        hasher.update(tokenizer.hash().as_bytes());
        hasher.update(&serde_json::to_vec(&(tokenizer.special_tokens(), tokenizer.eos_id())).unwrap_or_default());
        hasher.update(template.as_ref().map_or("", ChatTemplate::source).as_bytes());
        hasher.finalize()
    }

    /// The key of a set's cache entry.
    fn key(&self, paths: &[PathBuf]) -> Result<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(env!("CARGO_PKG_VERSION").as_bytes());
        hasher.update(self.encoder_hash().as_bytes());
        let data = &self.config.data;
        let options = format!("{:?} {:?} {:?}", self.encoder.options, data.format, data.max_rows);
        hasher.update(options.as_bytes());
        source::hash_files(paths, &mut hasher)?;
        Ok(hasher.finalize())
    }
}

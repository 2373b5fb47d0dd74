//! The model that a configuration names: its folder or its name on the hub, and the sequence length that it allows.
use super::arch::Arch;
use super::gguf_input::refuse_gguf;
use super::resolved::Resolved;
use super::schema::{Config, ModelConfig};
use super::source::Source;
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::temporary;

/// First path components that are never taken for an owner on the hub: `models/my-model` is always a local folder, even if it does
/// not exist.
const FOLDERS: &[&str] = &[
    "adapters",
    "checkpoint",
    "checkpoints",
    "ckpt",
    "ckpts",
    "data",
    "local",
    "merged",
    "model",
    "models",
    "out",
    "output",
    "outputs",
    "run",
    "runs",
    "tmp",
    "weights",
];

/// Whether a name is `owner/model` on the hub, and neither an existing local path nor in a usual local folder such as `models`.
pub fn is_hub_name(name: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let looks = name.split_once('/').is_some_and(|(owner, model)| part(owner) && part(model));
    let folder = name.split('/').next().is_some_and(|folder| FOLDERS.contains(&folder));
    looks
        && !folder
        && !Path::new(name).exists()
        && !name.split('/').next().is_some_and(|folder| Path::new(folder).is_dir())
}

impl Resolved {
    /// Whether the keys that have no default are set: the model and the training rows.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`], naming what is missing.
    pub fn check_runnable(&self) -> Result<()> {
        let config = &self.config;
        let missing =
            |what: &str, hint: &str| Err(Error::config(format!("{}: {what}", self.path.display())).hint(hint));
        if config.model.name.is_none() && config.model.local_dir.is_none() {
            return missing("model.name is not set", "set it to a model folder: `model: {name: models/my-model}`");
        }
        if config.data.train_path.is_empty() && config.data.datasets.is_empty() {
            return missing(
                "data.train_path is not set",
                "set it to a JSONL, JSON, CSV, Parquet or Arrow file, or set data.datasets",
            );
        }
        Ok(())
    }

    /// `model.max_seq_len` in tokens for a model whose longest sequence is `reach` ([`Arch::reach`]).
    ///
    /// The default is cut to `reach`. So is a longer value from a file, with a note, where the shell (`other_model`) or another file
    /// names the model.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: a longer value that is not cut.
    pub fn max_seq_len(&self, reach: usize, other_model: bool) -> Result<(usize, Option<String>)> {
        let asked = self.config.model.max_seq_len;
        match self.source("model.max_seq_len") {
            Source::Default => Ok((asked.min(reach), None)),
            _ if asked <= reach => Ok((asked, None)),
            source @ Source::File { path, .. }
                if other_model || self.source("model.name").is_shell() || self.names_model_elsewhere(path) =>
            {
                let note = format!(
                    "model.max_seq_len: {reach}, which is what this model sees by its config.json, and not {asked} ({source})"
                );
                Ok((reach, Some(note)))
            }
            source => Err(Error::config(format!(
                "{source}: model.max_seq_len = {asked} is longer than what the model sees, {reach} tokens by its config.json"
            ))
            .hint(format!("set model.max_seq_len to at most {reach}"))),
        }
    }

    /// The configuration with the sequence length that a run uses ([`Self::max_seq_len`]), and a note if that was cut.
    ///
    /// # Errors
    /// As [`Self::max_seq_len`].
    pub fn for_model(&self, arch: &Arch) -> Result<(Config, Option<String>)> {
        let (length, note) = self.max_seq_len(arch.reach(), false)?;
        let mut config = self.config.clone();
        config.model.max_seq_len = length;
        Ok((config, note))
    }

    /// Whether a file other than `path` names the model.
    fn names_model_elsewhere(&self, path: &Path) -> bool {
        ["model.local_dir", "model.name"]
            .iter()
            .map(|key| self.source(key))
            .find(|source| **source != Source::Default)
            .is_some_and(|source| matches!(source, Source::File { path: other, .. } if other != path))
    }
}

impl ModelConfig {
    /// The local model folder: `local_dir`, or else `name`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`] when neither is set, [`tunesmith_base::Kind::Model`] when there is no such folder.
    pub fn dir(&self) -> Result<PathBuf> {
        let (key, dir) = match (&self.local_dir, &self.name) {
            (Some(dir), _) => ("model.local_dir", dir.clone()),
            (None, Some(name)) => ("model.name", PathBuf::from(name)),
            (None, None) => return Err(Error::config("model.name is not set").hint("set it to a model folder")),
        };
        if dir.is_dir() {
            return Ok(dir);
        }
        refuse_gguf(&dir)?;
        let what = if dir.exists() { "is no folder" } else { "does not exist" };
        let relative = "paths are relative to the current directory, not to the configuration file; a model of the hub is owner/name";
        Err(Error::model(format!("{key}: {} {what}", dir.display()))
            .hint(temporary::how_to_put_back(&dir).unwrap_or_else(|| relative.to_owned())))
    }
}

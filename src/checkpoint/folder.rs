//! A model folder as Transformers loads it: `config.json`, `model.safetensors`, and the tokenizer's files as they were.
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::atomic::Staging;
use crate::config::arch::{Arch, COMPANIONS};
use crate::error::{Error, Result};
use crate::model::weights::write_safetensors_with;

/// The file with the weights.
pub const WEIGHTS_FILE: &str = "model.safetensors";

fn companions(model_dir: &Path) -> impl Iterator<Item = (&'static str, PathBuf)> {
    COMPANIONS.into_iter().map(move |name| (name, model_dir.join(name))).filter(|(_, path)| path.is_file())
}

/// Bytes of the files that are copied.
pub fn companion_bytes(model_dir: &Path) -> u64 {
    companions(model_dir).filter_map(|(_, path)| path.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// The model that a folder is made from, and what is new about its vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Its folder.
    pub dir: &'a Path,
    /// The text of `tokenizer.json` where tokens were added, and the rows that the embedding now has.
    pub grown: Option<(&'a str, usize)>,
    /// The text of a chat template that takes the place of the tokenizer's.
    pub template: Option<&'a str>,
    /// The model, where it has a head of scores that the source has not.
    pub scored: Option<&'a Arch>,
}

/// The tensors of a model that were not trained, which are fetched one at a time.
pub struct Rest<'a> {
    /// Names and shapes.
    pub tensors: &'a [(String, Vec<usize>)],
    /// A tensor's values.
    pub fetch: &'a dyn Fn(&str) -> Result<Vec<f32>>,
}

/// Copies the tokenizer's files and their like, with the tokens that were added.
///
/// # Errors
/// [`crate::Kind::Io`].
pub fn stage_companions(staging: &mut Staging<'_>, source: Source<'_>) -> Result<()> {
    const TEMPLATE: &str = "chat_template.jinja";
    for (name, path) in companions(source.dir) {
        match source.grown {
            _ if name == TEMPLATE && source.template.is_some() => {}
            Some((text, _)) if name == "tokenizer.json" => {
                staging.write(name, |writer| writer.write_all(text.as_bytes()))?;
            }
            _ => staging.copy(name, &path)?,
        }
    }
    match source.template {
        Some(text) => staging.write(TEMPLATE, |writer| writer.write_all(text.as_bytes())),
        None => Ok(()),
    }
}

/// Writes a model folder: `config.json` of the source with the dtype of the new weights, f32, its companions, and the
/// weights: `tensors`, and what was not trained.
///
/// # Errors
/// [`crate::Kind::Io`]; [`crate::Kind::Model`] where `config.json` is not valid or a tensor cannot be fetched.
pub fn stage(
    staging: &mut Staging<'_>,
    source: Source<'_>,
    tensors: &[(String, Vec<usize>, &[f32])],
    rest: &Rest<'_>,
) -> Result<()> {
    stage_config(staging, source)?;
    stage_companions(staging, source)?;
    stage_weights(staging, WEIGHTS_FILE, tensors, rest)
}

/// Writes `tensors` and those that are fetched into one file.
///
/// # Errors
/// [`crate::Kind::Io`]; those of fetching.
pub fn stage_weights(
    staging: &mut Staging<'_>,
    file: &str,
    tensors: &[(String, Vec<usize>, &[f32])],
    rest: &Rest<'_>,
) -> Result<()> {
    let mut failed = None;
    let fetch = RefCell::new(&mut failed);
    let written = staging.write(file, |writer| {
        let fetch = |name: &str| {
            (rest.fetch)(name).map_err(|error| {
                let message = error.to_string();
                **fetch.borrow_mut() = Some(error);
                io::Error::other(message)
            })
        };
        write_safetensors_with(writer, tensors, rest.tensors, &fetch, &[("format", "pt")])
    });
    match failed {
        Some(error) => Err(error),
        None => written,
    }
}

/// Writes `config.json`.
///
/// # Errors
/// As [`stage`].
pub fn stage_config(staging: &mut Staging<'_>, source: Source<'_>) -> Result<()> {
    let path = source.dir.join("config.json");
    let text = fs::read_to_string(&path).map_err(|error| Error::io("read", &path, &error))?;
    let mut config = f32_config(&text, &path, source.grown.map(|(_, rows)| rows))?;
    describe_scores(&mut config, source.scored)?;
    staging.write_json("config.json", &config)
}

/// Puts a model's head of scores into its `config.json`, if it has one.
///
/// # Errors
/// [`crate::Kind::Model`]: Transformers has none for the family.
pub fn describe_scores(config: &mut Value, arch: Option<&Arch>) -> Result<()> {
    match (config.as_object_mut(), arch.and_then(|arch| Some((arch, arch.score.as_ref()?)))) {
        (Some(config), Some((arch, head))) => head.describe(arch.family, arch.padding(), config),
        _ => Ok(()),
    }
}

/// Transformers casts on loading to the dtype that `config.json` names; the weights written here are f32.
fn f32_config(text: &str, path: &Path, rows: Option<usize>) -> Result<Value> {
    let mut config: Value = serde_json::from_str(text)
        .map_err(|error| Error::model(format!("{}: not valid JSON: {error}", path.display())))?;
    if let Some(map) = config.as_object_mut() {
        let key = if map.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        map.insert(key.into(), "float32".into());
        // What was quantized has been widened.
        map.remove("quantization_config");
        if let Some(rows) = rows {
            map.insert("vocab_size".into(), rows.into());
        }
    }
    Ok(config)
}

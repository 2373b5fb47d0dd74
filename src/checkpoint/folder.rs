//! A model folder as Transformers loads it: `config.json`, `model.safetensors`, and the tokenizer's files as they were.
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::atomic::Staging;
use crate::error::{Error, Result};
use crate::model::weights::write_safetensors_to;

/// The file with the weights.
pub const WEIGHTS_FILE: &str = "model.safetensors";

/// What stands beside the weights and does not change in training.
pub const COMPANIONS: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
];

fn companions(model_dir: &Path) -> impl Iterator<Item = (&'static str, PathBuf)> {
    COMPANIONS.into_iter().map(move |name| (name, model_dir.join(name))).filter(|(_, path)| path.is_file())
}

/// Bytes of the files that are copied.
pub fn companion_bytes(model_dir: &Path) -> u64 {
    companions(model_dir).filter_map(|(_, path)| path.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// Writes a model folder: `config.json` of `model_dir` with the dtype of the new weights, f32, and its companions.
///
/// # Errors
/// [`crate::Kind::Io`]; [`crate::Kind::Model`] where `config.json` is not valid.
pub fn stage(staging: &mut Staging<'_>, model_dir: &Path, tensors: &[(String, Vec<usize>, &[f32])]) -> Result<()> {
    let path = model_dir.join("config.json");
    let text = fs::read_to_string(&path).map_err(|error| Error::io("read", &path, &error))?;
    staging.write_json("config.json", &f32_config(&text, &path)?)?;
    for (name, path) in companions(model_dir) {
        staging.copy(name, &path)?;
    }
    staging.write(WEIGHTS_FILE, |writer| write_safetensors_to(writer, tensors, &[("format", "pt")]))
}

/// Transformers casts on loading to the dtype that `config.json` names; the weights written here are f32.
fn f32_config(text: &str, path: &Path) -> Result<Value> {
    let mut config: Value = serde_json::from_str(text)
        .map_err(|error| Error::model(format!("{}: not valid JSON: {error}", path.display())))?;
    if let Some(map) = config.as_object_mut() {
        let key = if map.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        map.insert(key.into(), "float32".into());
    }
    Ok(config)
}

//! A merged model as a folder that Transformers loads: shard by shard, a tensor at a time.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::merge::Merged;
use crate::checkpoint::atomic::{self, Staging};
use crate::checkpoint::disk::RealDisk;
use crate::checkpoint::{FILES, folder, preflight};
use crate::config::arch::TensorSpec;
use crate::error::{Error, Result};
use crate::model::weights::{Dtype, Numbers, write_numbers_with};

/// How the folder is written.
#[derive(Debug, Clone, Copy)]
pub struct Form<'a> {
    /// The dtype of its numbers (`None`: each tensor as the base has it).
    pub dtype: Option<Dtype>,
    /// The most bytes of a file, if more than one tensor is in it.
    pub shard_bytes: u64,
    /// Where the tokenizer's files are: the adapter's folder, or the base's.
    pub tokenizer: &'a Path,
    /// The text of a chat template that takes the place of the tokenizer's.
    pub template: Option<&'a str>,
    /// `README.md`.
    pub card: Option<&'a str>,
}

/// A tensor and the dtype that it is written in.
type Planned = (TensorSpec, Dtype);

impl Form<'_> {
    fn plan(&self, merged: &Merged) -> Vec<Planned> {
        let stored = |spec: &TensorSpec| merged.weights.dtype(&spec.name).unwrap_or(Dtype::F32);
        let dtype = |spec: &TensorSpec| self.dtype.unwrap_or_else(|| stored(spec));
        merged.arch.tensors().into_iter().map(|spec| (dtype(&spec), spec)).map(|(dtype, spec)| (spec, dtype)).collect()
    }
}

/// Writes the folder `target`; returns the bytes of its tensors.
///
/// # Errors
/// [`crate::Kind::Io`]: the disk; those of [`Merged::values`].
pub fn write(target: &Path, merged: &Merged, form: &Form<'_>) -> Result<u64> {
    let plan = form.plan(merged);
    let bytes = |planned: &Planned| (planned.0.len() * planned.1.bytes()) as u64;
    let total = plan.iter().map(bytes).sum();
    preflight(target, total + folder::companion_bytes(form.tokenizer) + (1 << 20), FILES + total / form.shard_bytes)?;
    let mut shards: Vec<Vec<Planned>> = vec![Vec::new()];
    let mut filled = 0;
    for planned in plan {
        let size = bytes(&planned);
        if filled > 0 && filled + size > form.shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += size;
        if let Some(shard) = shards.last_mut() {
            shard.push(planned);
        }
    }
    atomic::publish(&RealDisk, target, |staging| {
        staging.write_json("config.json", &config(merged, form)?)?;
        folder::stage_companions(
            staging,
            folder::Source { dir: form.tokenizer, grown: None, template: form.template, scored: None },
        )?;
        if let Some(card) = form.card {
            staging.write("README.md", |writer| writer.write_all(card.as_bytes()))?;
        }
        let count = shards.len();
        let mut map = BTreeMap::new();
        for (number, shard) in shards.iter().enumerate() {
            let name = match count {
                1 => folder::WEIGHTS_FILE.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            write_shard(staging, &name, merged, shard)?;
            map.extend(shard.iter().map(|(spec, _)| (spec.name.clone(), name.clone())));
        }
        if count > 1 {
            let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
            staging.write_json("model.safetensors.index.json", &index)?;
        }
        Ok(())
    })?;
    Ok(total)
}

fn write_shard(staging: &mut Staging<'_>, name: &str, merged: &Merged, shard: &[Planned]) -> Result<()> {
    let specs: BTreeMap<&str, &TensorSpec> = shard.iter().map(|(spec, _)| (spec.name.as_str(), spec)).collect();
    let numbers: Vec<_> = shard
        .iter()
        .map(|(spec, dtype)| (spec.name.clone(), spec.shape.clone(), Numbers::Fetched(spec.len(), *dtype)))
        .collect();
    let failed = RefCell::new(None);
    let fetch = |name: &str| {
        let values = specs.get(name).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        merged.values(values).map_err(|error| {
            let message = error.to_string();
            failed.replace(Some(error));
            io::Error::other(message)
        })
    };
    let written = staging.write(name, |writer| write_numbers_with(writer, &numbers, &fetch, &[("format", "pt")]));
    match failed.take() {
        Some(error) => Err(error),
        None => written,
    }
}

/// The base's `config.json` with the dtype and the vocabulary of what is written.
fn config(merged: &Merged, form: &Form<'_>) -> Result<Value> {
    let path = merged.base.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|error| Error::io("read", &path, &error))?;
    let mut config: Value = serde_json::from_str(&text)
        .map_err(|error| Error::model(format!("{}: not valid JSON: {error}", path.display())))?;
    if let Some(map) = config.as_object_mut() {
        if let Some(dtype) = form.dtype {
            let name = match dtype {
                Dtype::F32 => "float32",
                Dtype::BF16 => "bfloat16",
                Dtype::F16 => "float16",
            };
            let key = if map.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
            map.insert(key.into(), name.into());
        }
        // The base's codes are not what is written.
        map.remove("quantization_config");
        if !merged.arch.new_tokens.is_empty() {
            map.insert("vocab_size".into(), merged.arch.vocab_size.into());
        }
    }
    folder::describe_scores(&mut config, Some(&merged.arch))?;
    Ok(config)
}

//! A merged model as a folder that Transformers loads: shard by shard, a tensor at a time.
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::merge::Merged;
use super::requantize::{Coding, Loss};
use crate::checkpoint::atomic::{self, Staging};
use crate::checkpoint::disk::RealDisk;
use crate::checkpoint::{FILES, folder, preflight};
use crate::config::arch::TensorSpec;
use crate::error::{Error, Result};
use crate::model::weights::{Dtype, Numbers, Parts, write_numbers_with};

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
    /// Which matrices are written in codes, and how; those of no linear layer keep their dtype.
    pub coding: Option<&'a Coding>,
}

/// A tensor and the dtype that it is written in, or that its numbers had before they were coded.
type Planned = (TensorSpec, Dtype);

/// What a folder has come to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Written {
    /// The bytes of its tensors.
    pub bytes: u64,
    /// What coding has changed; zero where nothing is coded.
    pub loss: Loss,
}

impl Form<'_> {
    fn plan(&self, merged: &Merged) -> Vec<Planned> {
        let dtype = |name: &str| self.dtype.or_else(|| merged.weights.dtype(name));
        // Of matrices that the base has in codes, what they were before is not known: as its embedding.
        let plain = dtype("model.embed_tokens.weight").unwrap_or(Dtype::F32);
        let of = |spec: &TensorSpec| match self.coded(&spec.name) {
            Some(_) => dtype(&spec.name).unwrap_or(plain),
            None => dtype(&spec.name).unwrap_or(Dtype::F32),
        };
        merged.arch.tensors().into_iter().map(|spec| (of(&spec), spec)).map(|(dtype, spec)| (spec, dtype)).collect()
    }

    fn coded(&self, name: &str) -> Option<&Coding> {
        self.coding.filter(|coding| coding.has(name))
    }

    /// Bytes of a tensor in its file; about so many where it is coded.
    fn bytes(&self, (spec, dtype): &Planned) -> u64 {
        self.coded(&spec.name).map_or((spec.len() * dtype.bytes()) as u64, |coding| coding.bytes(spec))
    }
}

/// Writes the folder `target`.
///
/// # Errors
/// [`crate::Kind::Io`]: the disk; those of [`Merged::values`]; [`crate::Kind::Model`]: a number that cannot be coded.
pub fn write(target: &Path, merged: &Merged, form: &Form<'_>) -> Result<Written> {
    let plan = form.plan(merged);
    let total = plan.iter().map(|planned| form.bytes(planned)).sum::<u64>();
    preflight(target, total + folder::companion_bytes(form.tokenizer) + (1 << 20), FILES + total / form.shard_bytes)?;
    let mut shards: Vec<Vec<Planned>> = vec![Vec::new()];
    let mut filled = 0;
    for planned in plan {
        let size = form.bytes(&planned);
        if filled > 0 && filled + size > form.shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += size;
        if let Some(shard) = shards.last_mut() {
            shard.push(planned);
        }
    }
    let mut written = Written { bytes: 0, loss: Loss::default() };
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
            let tensors = write_shard(staging, &name, merged, (shard, form), &mut written)?;
            map.extend(tensors.into_iter().map(|tensor| (tensor, name.clone())));
        }
        if count > 1 {
            let index = json!({ "metadata": { "total_size": written.bytes }, "weight_map": map });
            staging.write_json("model.safetensors.index.json", &index)?;
        }
        Ok(())
    })?;
    Ok(written)
}

/// The values of a tensor, all of which are finite in `dtype`.
///
/// # Errors
/// [`crate::Kind::Numeric`], naming the tensor.
pub fn fits(name: &str, values: Vec<f32>, dtype: Dtype) -> Result<Vec<f32>> {
    let Some(index) = dtype.first_overflow(&values) else { return Ok(values) };
    Err(Error::numeric(format!(
        "tensor {name:?} has {} at index {index}, which is not finite in {}: nothing is written",
        values[index],
        dtype.name()
    ))
    .hint("write another dtype, such as bfloat16"))
}

/// Writes a file of tensors; returns their names. Its coded matrices are held meanwhile, all else is made one at a time.
fn write_shard(
    staging: &mut Staging<'_>,
    name: &str,
    merged: &Merged,
    (shard, form): (&[Planned], &Form<'_>),
    written: &mut Written,
) -> Result<Vec<String>> {
    let specs: BTreeMap<&str, &TensorSpec> = shard.iter().map(|(spec, _)| (spec.name.as_str(), spec)).collect();
    let dtypes: BTreeMap<&str, Dtype> = shard.iter().map(|(spec, dtype)| (spec.name.as_str(), *dtype)).collect();
    let (mut coded, mut numbers) = (Vec::new(), Vec::new());
    for (spec, dtype) in shard {
        match form.coded(&spec.name) {
            Some(coding) => coded.push((spec, *dtype, coding.code(merged, spec, &mut written.loss)?)),
            None => numbers.push((spec.name.clone(), spec.shape.clone(), Numbers::Fetched(spec.len(), *dtype))),
        }
    }
    let parts: Vec<_> =
        coded.iter().map(|(spec, dtype, matrix)| Coding::parts(spec, matrix, *dtype)).collect::<Result<_>>()?;
    numbers.extend(parts.iter().flat_map(Parts::tensors));
    let failed = RefCell::new(None);
    let fetch = |name: &str| {
        let values = specs.get(name).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let dtype = dtypes.get(name).copied().unwrap_or(Dtype::F32);
        merged.values(values).and_then(|values| fits(name, values, dtype)).map_err(|error| {
            let message = error.to_string();
            failed.replace(Some(error));
            io::Error::other(message)
        })
    };
    let done = staging.write(name, |writer| write_numbers_with(writer, &numbers, &fetch, &[("format", "pt")]));
    match failed.take() {
        Some(error) => return Err(error),
        None => done?,
    }
    written.bytes += numbers.iter().map(|(_, _, numbers)| numbers.bytes()).sum::<u64>();
    Ok(numbers.into_iter().map(|(name, ..)| name).collect())
}

/// The base's `config.json` with the dtype and the vocabulary of what is written.
fn config(merged: &Merged, form: &Form<'_>) -> Result<Value> {
    let path = merged.base.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|error| Error::io("read", &path, &error))?;
    let mut config: Value = serde_json::from_str(&text)
        .map_err(|error| Error::model(format!("{}: not valid JSON: {error}", path.display())))?;
    if let Some(map) = config.as_object_mut() {
        if let Some(dtype) = form.dtype {
            let key = if map.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
            map.insert(key.into(), dtype.name().into());
        }
        // The base's codes are not what is written.
        map.remove("quantization_config");
        if let Some(coding) = form.coding {
            map.insert("quantization_config".into(), coding.config_json());
        }
        // An adapter may have grown the vocabulary.
        map.insert("vocab_size".into(), merged.arch.vocab_size.into());
    }
    folder::describe_scores(&mut config, Some(&merged.arch))?;
    Ok(config)
}

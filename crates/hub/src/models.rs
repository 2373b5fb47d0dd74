//! Decides which files of a model's or an adapter's repository to download: never code, never pickles.
use std::collections::BTreeSet;

use super::checkout::{Checkout, Snapshot};
use super::{Destination, Hub, Repo, RepoKind};
use tunesmith_base::error::Result;
use tunesmith_config::arch::COMPANIONS;
use tunesmith_config::vision::ENCODER_FILES;
use tunesmith_config::{INSTEAD_OF_GGUF, is_gguf};

/// The part of a model to download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Configuration, tokenizer and the index of the weights. They are enough to read data and to know the model's
    /// tensors.
    Description,
    /// Everything that loading needs, including the weights.
    Whole,
}

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The largest weight index that is read, in bytes. Real ones are smaller.
const INDEX_BYTES: u64 = 64 << 20;

const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

impl Hub<'_> {
    /// Downloads `part` of the files of a model.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: there is no such repository, or it lacks a needed file; the errors of
    /// [`Hub::open`].
    pub fn model(&self, name: &str, revision: Option<&str>, part: Part, place: Destination) -> Result<Snapshot> {
        let checkout = self.open(Repo::new(RepoKind::Model, name)?, revision, place)?;
        if !checkout.has(CONFIG) {
            let hint = if checkout.has(ADAPTER_CONFIG) {
                "it is an adapter: set tuning.adapter to it, and model.name to its base model".to_owned()
            } else if checkout.paths().any(|path| is_gguf(path.as_ref())) {
                format!("it has GGUF files, and tunesmith reads none: {INSTEAD_OF_GGUF}")
            } else {
                format!("it has {}", shown(&checkout))
            };
            return Err(checkout.repo().error(format!("{name} has no {CONFIG}, as a model has it")).hint(hint));
        }
        let mut wanted: Vec<&str> = [CONFIG].into_iter().chain(COMPANIONS).filter(|path| checkout.has(path)).collect();
        for [settings, weights] in ENCODER_FILES {
            if checkout.has(settings) {
                wanted.push(settings);
                wanted.extend((part == Part::Whole && checkout.has(weights)).then_some(weights));
            }
        }
        let is_sharded = !checkout.has(SINGLE) && checkout.has(INDEX);
        match part {
            Part::Description => {
                wanted.extend(is_sharded.then_some(INDEX));
                checkout.fetch(&wanted)?;
            }
            Part::Whole if is_sharded => {
                wanted.push(INDEX);
                checkout.fetch(&wanted)?;
                let shards = shards(&checkout)?;
                checkout.fetch(&shards.iter().map(String::as_str).collect::<Vec<_>>())?;
            }
            Part::Whole if checkout.has(SINGLE) => {
                wanted.push(SINGLE);
                checkout.fetch(&wanted)?;
            }
            Part::Whole => {
                let hint = format!("weights in other formats are not read; it has {}", shown(&checkout));
                return Err(checkout.repo().error(format!("{name} has neither {SINGLE} nor {INDEX}")).hint(hint));
            }
        }
        Ok(checkout.snapshot())
    }

    /// Downloads an adapter in PEFT's format.
    ///
    /// # Errors
    /// As [`Hub::model`].
    pub fn adapter(&self, name: &str, revision: Option<&str>) -> Result<Snapshot> {
        let checkout = self.open(Repo::new(RepoKind::Model, name)?, revision, Destination::Cache)?;
        for needed in [ADAPTER_CONFIG, ADAPTER_WEIGHTS] {
            if !checkout.has(needed) {
                let hint = format!("it has {}", shown(&checkout));
                return Err(checkout.repo().error(format!("{name} has no {needed}, as an adapter has it")).hint(hint));
            }
        }
        checkout.fetch(&[ADAPTER_CONFIG, ADAPTER_WEIGHTS])?;
        Ok(checkout.snapshot())
    }
}

/// The weight files that the index names.
fn shards(checkout: &Checkout<'_>) -> Result<Vec<String>> {
    let path = checkout.path(INDEX);
    let fail = |what: String| checkout.repo().error(format!("{}: {what}", path.display()));
    if checkout.size(INDEX) > INDEX_BYTES {
        return Err(fail(format!("larger than {INDEX_BYTES} bytes")));
    }
    let text = tunesmith_base::files::read(&path, INDEX_BYTES)
        .map_err(|source| tunesmith_base::error::Error::io("read", &path, &source))?;
    let index: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| fail("not valid".to_owned()).caused_by(error))?;
    let map = index.get("weight_map").and_then(serde_json::Value::as_object);
    let map = map.ok_or_else(|| fail("no weight_map".to_owned()))?;
    let names: BTreeSet<&str> = map.values().filter_map(serde_json::Value::as_str).collect();
    let is_shard = |name: &&&str| name.ends_with(".safetensors") && checkout.has(name);
    match names.iter().find(|name| !is_shard(name)) {
        Some(name) => Err(fail(format!("it names {name:?}, which {} does not have", checkout.repo()))),
        None => Ok(names.into_iter().map(str::to_owned).collect()),
    }
}

/// Some of the existing files, for messages.
pub(super) fn shown(checkout: &Checkout<'_>) -> String {
    const SHOWN: usize = 12;
    let paths: Vec<&str> = checkout.paths().filter(|path| !path.starts_with('.')).collect();
    match paths.len() {
        0 => "no files".to_owned(),
        count if count > SHOWN => format!("{}, … ({count} files)", paths[..SHOWN].join(", ")),
        _ => paths.join(", "),
    }
}

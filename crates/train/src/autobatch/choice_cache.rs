//! The cache of chosen sizes on disk, so that the same run is not measured twice.
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

use super::batch_plan::BatchPlan;
use super::choose_batch::Choice;
use tunesmith_base::files::{self, atomic};
use tunesmith_config::{Checkpointing, ConfigValue as _, Node};

/// A choice as JSON on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CachedChoice {
    batch_size: usize,
    grad_accum: usize,
    gradient_checkpointing: serde_json::Value,
    max_tokens_per_pass: Option<usize>,
    /// Peak bytes of the process in the largest pass.
    bytes: u64,
}

/// Reads `true`, `"none"` or `{"full": 2}`, the forms of `train.gradient_checkpointing`.
pub fn read_checkpointing(json: &serde_json::Value) -> Option<Checkpointing> {
    let number = |value: &serde_json::Value| value.as_u64().map(|number| Node::Int(i128::from(number)));
    let node = match json {
        serde_json::Value::Bool(full) => Node::Bool(*full),
        serde_json::Value::String(word) => Node::Str(word.clone()),
        serde_json::Value::Object(blocks) => {
            let blocks = blocks.iter().map(|(key, value)| Some((key.clone(), number(value)?)));
            Node::Map(blocks.collect::<Option<_>>()?)
        }
        _ => return None,
    };
    Checkpointing::from_node(&node).ok()
}

impl CachedChoice {
    /// The part of a choice that is written to disk.
    pub fn new(found: &Choice) -> Self {
        let BatchPlan { batch_size, grad_accum, checkpointing, max_tokens_per_pass } = found.sizes;
        let gradient_checkpointing = checkpointing.to_json();
        Self { batch_size, grad_accum, gradient_checkpointing, max_tokens_per_pass, bytes: found.bytes }
    }

    /// A hash that is equal for equal choices and never 0.
    pub fn hash(&self) -> u64 {
        let text = serde_json::to_vec(self).unwrap_or_default();
        u64::from_le_bytes(blake3::hash(&text).as_bytes()[..8].try_into().expect("a hash has 32 bytes")).max(1)
    }

    /// The sizes, if they still fit into a budget of `bytes`.
    pub fn sizes(&self, bytes: u64) -> Option<BatchPlan> {
        let checkpointing = read_checkpointing(&self.gradient_checkpointing)?;
        (self.bytes <= bytes && self.batch_size > 0 && self.grad_accum > 0).then_some(BatchPlan {
            batch_size: self.batch_size,
            grad_accum: self.grad_accum,
            checkpointing,
            max_tokens_per_pass: self.max_tokens_per_pass,
        })
    }

    /// The path of the file for a fingerprint in a cache folder.
    pub fn path(cache: &Path, fingerprint: &blake3::Hash) -> PathBuf {
        cache.join(format!("probe-{}.json", &fingerprint.to_hex()[..24]))
    }

    /// Reads a file; `None` if it is missing or from another version.
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&files::read_own(path, files::SMALL).ok()?).ok()
    }

    /// Writes the file. Errors are ignored: the next run then measures again.
    pub fn write(&self, path: &Path) {
        let _ = atomic::write(path, &serde_json::to_vec_pretty(self).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_on_disk_reads_back_and_must_still_fit() {
        let root = tempfile::tempdir().unwrap();
        let path = CachedChoice::path(&root.path().join("new"), &blake3::hash(b"x"));
        assert_eq!(CachedChoice::read(&path), None);
        for checkpointing in [Checkpointing::FULL, Checkpointing::NONE, Checkpointing::Blocks { full: 2, none: 0 }] {
            let sizes = BatchPlan { batch_size: 4, grad_accum: 2, checkpointing, max_tokens_per_pass: Some(99) };
            let kept = CachedChoice::new(&Choice { sizes, passes: Vec::new(), reasons: Vec::new(), bytes: 1000 });
            kept.write(&path);
            let read = CachedChoice::read(&path).unwrap();
            assert_eq!(read.sizes(1000), Some(sizes));
            assert_eq!(read.sizes(999), None, "it would not fit any more");
        }
        std::fs::write(&path, "{\"batch_size\": 4}").unwrap();
        assert_eq!(CachedChoice::read(&path), None);
    }
}

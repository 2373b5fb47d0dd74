//! How fast this machine trains, as `tunesmith bench` measured it last: kept in the cache folder, for `tunesmith plan`.
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use tunesmith_base::files::{self, atomic};
use tunesmith_data::cache_dir;
use tunesmith_telemetry::machine::Machine;

/// A measured speed, and what it was measured on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// The processor's name.
    pub processor: String,
    /// Threads.
    pub threads: usize,
    /// Instruction set.
    pub simd: String,
    /// What was trained.
    pub shape: String,
    /// How.
    pub mode: String,
    /// Floating-point operations per second, those of blocks that are run again included.
    pub flops: f64,
}

fn path() -> Option<PathBuf> {
    cache_dir().map(|dir| dir.join("rate.json"))
}

impl Rate {
    /// Keeps it; where the folder cannot be written it is not kept.
    pub fn keep(&self) {
        let (Some(path), Ok(text)) = (path(), serde_json::to_string_pretty(self)) else { return };
        let _ = atomic::write(&path, text.as_bytes());
    }

    /// What was kept of this machine with so many threads.
    pub fn known(threads: usize) -> Option<Self> {
        let rate: Self = serde_json::from_str(&files::read_own_text(&path()?, files::SMALL).ok()?).ok()?;
        let ours = rate.processor == Machine::detect().processor && rate.threads == threads;
        (ours && rate.flops.is_finite() && rate.flops > 0.0).then_some(rate)
    }
}

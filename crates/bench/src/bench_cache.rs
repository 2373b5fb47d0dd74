//! The training speed of this machine as last measured by `tunesmith bench`, cached for `tunesmith plan`.
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use tunesmith_base::files::user_cache;
use tunesmith_base::files::{self, atomic};
use tunesmith_telemetry::machine::MachineInfo;

/// A measured speed, and the machine and setup it holds for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredRate {
    /// The name of the processor.
    pub processor: String,
    /// Threads that shared the work.
    pub threads: usize,
    /// Vector instruction set in use.
    pub simd: String,
    /// The model: name of a built-in shape, or path of a `config.json`.
    pub shape: String,
    /// The training mode: `lora`, `qlora`, another adapter's mode, or `full`.
    pub mode: String,
    /// Floating-point operations per second, including recomputed blocks.
    pub flops: f64,
}

fn path() -> Option<PathBuf> {
    user_cache().map(|dir| dir.join("rate.json"))
}

impl MeasuredRate {
    /// Writes the rate to the cache folder. Errors are ignored.
    pub fn keep(&self) {
        let (Some(path), Ok(text)) = (path(), serde_json::to_string_pretty(self)) else { return };
        let _ = atomic::write(&path, text.as_bytes());
    }

    /// Reads the cached rate. Returns `None` if it is of another processor or number of threads.
    pub fn known(threads: usize) -> Option<Self> {
        let rate: Self = serde_json::from_str(&files::read_own_text(&path()?, files::SMALL).ok()?).ok()?;
        let ours = rate.processor == MachineInfo::detect().processor && rate.threads == threads;
        (ours && rate.flops.is_finite() && rate.flops > 0.0).then_some(rate)
    }
}

//! Training speeds of this machine, as `tunesmith bench` measured them, cached for `tunesmith plan`.
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
    /// Floating-point operations of a token, a measure of the model's size.
    pub flops_per_token: f64,
    /// Floating-point operations per second, including recomputed blocks.
    pub flops: f64,
}

/// The newest rates that are kept.
const MOST: usize = 16;

fn path() -> Option<PathBuf> {
    user_cache().map(|dir| dir.join("rates.json"))
}

/// All cached rates, the oldest first. A file that cannot be read counts as empty.
fn all() -> Vec<MeasuredRate> {
    let text = path().and_then(|path| files::read_own_text(&path, files::SMALL).ok()).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

impl MeasuredRate {
    /// Adds the rate to the cache folder, and drops the one that was measured like it before. Errors are ignored.
    pub fn keep(&self) {
        let mut rates = all();
        let key = |rate: &Self| (rate.processor.clone(), rate.threads, rate.shape.clone(), rate.mode.clone());
        rates.retain(|rate| key(rate) != key(self));
        rates.push(self.clone());
        rates.drain(..rates.len().saturating_sub(MOST));
        let (Some(path), Ok(text)) = (path(), serde_json::to_string_pretty(&rates)) else { return };
        let _ = atomic::write(&path, text.as_bytes());
    }

    /// The cached rate of this processor and number of threads whose model is nearest in size: a small model reaches only a part of the
    /// speed of a large one.
    pub fn known(threads: usize, flops_per_token: f64) -> Option<Self> {
        nearest(all(), &MachineInfo::detect().processor, threads, flops_per_token)
    }
}

fn nearest(rates: Vec<MeasuredRate>, processor: &str, threads: usize, flops_per_token: f64) -> Option<MeasuredRate> {
    let positive = |number: f64| number.is_finite() && number > 0.0;
    let ours = |rate: &MeasuredRate| {
        rate.processor == processor && rate.threads == threads && positive(rate.flops) && positive(rate.flops_per_token)
    };
    let distance = |rate: &MeasuredRate| (rate.flops_per_token / flops_per_token).ln().abs();
    rates.into_iter().filter(ours).min_by(|one, other| distance(one).total_cmp(&distance(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_the_model_nearest_in_size_counts() {
        let rate = |shape: &str, flops_per_token, threads| MeasuredRate {
            processor: "this".into(),
            threads,
            simd: String::new(),
            shape: shape.into(),
            mode: "lora".into(),
            flops_per_token,
            flops: 1e9,
        };
        let rates = [rate("tiny", 1e5, 2), rate("small", 1e8, 2), rate("large", 1e9, 4), rate("broken", f64::NAN, 2)];
        let found = |size, threads| nearest(rates.to_vec(), "this", threads, size).map(|rate| rate.shape);
        assert_eq!(found(1e6, 2), Some("tiny".to_owned()));
        assert_eq!(found(1e9, 2), Some("small".to_owned()));
        assert_eq!(found(1e5, 4), Some("large".to_owned()));
        assert_eq!((found(1e6, 8), nearest(rates.to_vec(), "another", 2, 1e6)), (None, None));
    }
}

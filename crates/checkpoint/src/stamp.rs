//! The stamp of a checkpoint (`backend.json`): the model, data, settings and kernels that the checkpoint belongs to.
//! Resume compares it with the new run, and refuses differences that would change the training curve.
//!
//! - Differences in `mode`, `adapter` and the optimizer are always refused: the tensors would not fit.
//! - Settings that do not shape the curve, such as the length of training, may differ. So may the number of ranks together
//!   with `grad_accum`, if a step keeps its number of rows.
//! - Every other difference is refused unless `--allow` names it.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::stamp_check::as_set;
use super::stamp_settings::{BACKEND_WORD, NEVER, is_compared, is_recorded_if_set};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{Config, nearest, schema};
use tunesmith_model::adapters::{self, Method};
use tunesmith_model::targets::Placement;

/// What a checkpoint belongs to. [`Stamp::new`] makes the stamp of a run, and [`Stamp::compare`] compares two.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stamp {
    /// Version of tunesmith that wrote it.
    pub engine_version: String,
    /// The kernels in use: `fused` or `reference`.
    pub backend: String,
    /// The kernels' instruction set, or the GPU and its libraries: they affect the last bits of results.
    pub simd: String,
    /// Quantization of the base weights: `none`, or the form of their codes.
    pub quantization: String,
    /// Dtype of base weights and activations.
    pub dtype: String,
    /// The value of `tuning.mode`, such as `lora`.
    pub mode: String,
    /// Which modules have adapters, of which rank and scale, and what is trained in full.
    pub adapter: String,
    /// Hash of the base model's weights.
    pub base_model: String,
    /// Hash of the tokenizer that made the training tokens.
    pub tokenizer: String,
    /// Hash of the chat template.
    pub chat_template: String,
    /// Fingerprint of the tokenized training data.
    pub data: String,
    /// Number of ranks that trained together.
    pub world_size: usize,
    /// The settings that shape the training curve, by their paths in the configuration.
    pub training: BTreeMap<String, Value>,
}

/// The kernels and dtypes that a run uses in fact, whatever the configuration asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelInfo {
    /// The kernels in use, for [`Stamp::backend`].
    pub backend: &'static str,
    /// The instruction set, for [`Stamp::simd`].
    pub simd: String,
    /// The format of the quantized base weights, for [`Stamp::quantization`].
    pub quantization: String,
    /// The dtype of base weights and activations, for [`Stamp::dtype`].
    pub dtype: String,
}

/// The hashes that a stamp contains.
#[derive(Debug, Clone, Copy)]
pub struct Hashes<'a> {
    /// The hash of the base weights. For random weights, a description of how they were drawn.
    pub base_model: &'a str,
    /// The hash of the tokenizer, with added tokens.
    pub tokenizer: &'a str,
    /// The hash of the chat template's text.
    pub chat_template: &'a str,
    /// The hash of the tokenized training data.
    pub data: &'a str,
}

/// A field that differs, with its values in the checkpoint and in the new run.
struct Difference {
    key: String,
    saved: String,
    now: String,
}

impl Stamp {
    /// Makes the stamp of a run. `placements` are its adapters. `saved` names the tensors that are trained in full or
    /// by rows, beside the adapters or (with `mode: freeze`) alone. Both are empty in full mode.
    pub fn new(
        config: &Config,
        placements: &[Placement],
        saved: &[String],
        hashes: Hashes<'_>,
        engine: KernelInfo,
    ) -> Self {
        let defaults = Config::default();
        let training = schema::options().filter(|option| is_compared(option)).filter_map(|option| {
            let path = option.path();
            let value = match path.as_str() {
                "train.data_seed" => config.train.data_seed.unwrap_or(config.train.seed).into(),
                _ => (option.get)(config),
            };
            // Some settings are recorded only if they are not the default, so that a checkpoint from before this
            // setting existed can be resumed.
            let told = !is_recorded_if_set(&path) || value != (option.get)(&defaults);
            told.then_some((path, value))
        });
        Self {
            engine_version: env!("CARGO_PKG_VERSION").into(),
            backend: engine.backend.into(),
            simd: engine.simd,
            quantization: engine.quantization,
            dtype: engine.dtype,
            mode: config.tuning.mode.as_str().into(),
            adapter: match adapters::of(&config.tuning).and_then(Method::start) {
                Some(start) => format!("{}; {start}", describe_adapter(placements, saved)),
                None => describe_adapter(placements, saved),
            },
            base_model: hashes.base_model.into(),
            tokenizer: hashes.tokenizer.into(),
            chat_template: hashes.chat_template.into(),
            data: hashes.data.into(),
            world_size: 1,
            training: training.collect(),
        }
    }

    /// Compares the stamp of a checkpoint (`self`, from `dir`) with the stamp `now` of the new run. Returns one line
    /// for each difference that is accepted.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`], with both values of every difference that is refused;
    /// [`tunesmith_base::Kind::Config`]: `allow` names something that is not a field.
    pub fn compare(&self, now: &Self, allow: &[String], dir: &Path) -> Result<Vec<String>> {
        let (saved, now) = (self.fields()?, now.fields()?);
        for key in allow {
            if !now.contains_key(key) || NEVER.contains(&key.as_str()) {
                let names = now.keys().map(String::as_str).filter(|key| !NEVER.contains(key));
                let near = nearest(key, names.clone()).map_or_else(
                    || format!("these may be allowed: {}", names.collect::<Vec<_>>().join(", ")),
                    |name| format!("did you mean {name}?"),
                );
                return Err(Error::config(format!("--allow {key}: no such field, or none that may differ")).hint(near));
            }
        }
        let nothing = Value::Null;
        let keys = saved.keys().chain(now.keys().filter(|key| !saved.contains_key(*key)));
        // If `backend` differs, other kernels are reported already, and the setting for them adds nothing.
        let other_kernels = saved.get("backend") != now.get("backend");
        let keys = keys.filter(|key| *key != BACKEND_WORD || (saved.contains_key(*key) && !other_kernels));
        let differences = keys.filter_map(|key| {
            let (saved, now) = (saved.get(key).unwrap_or(&nothing), now.get(key).unwrap_or(&nothing));
            (saved != now).then(|| Difference { key: key.clone(), saved: show(key, saved), now: show(key, now) })
        });
        // If a step has the same number of rows, it does not matter how many ranks share them.
        let rows = |fields: &BTreeMap<String, Value>| -> Option<u64> {
            let factors = ["world_size", "train.batch_size", "train.grad_accum"].map(|key| fields.get(key)?.as_u64());
            factors.into_iter().product()
        };
        let same_rows = rows(&saved).is_some() && rows(&saved) == rows(&now);
        let passes = |difference: &Difference| {
            (same_rows && ["world_size", "train.grad_accum"].contains(&&*difference.key))
                || allow.contains(&difference.key)
        };
        let (passed, refused): (Vec<_>, Vec<_>) = differences.partition(passes);
        if refused.is_empty() {
            let note = |d: Difference| format!("{} differs: {} in the checkpoint, {} now", d.key, d.saved, d.now);
            return Ok(passed.into_iter().map(note).collect());
        }
        let mut message = format!("{} belongs to another run:", dir.display());
        for difference in &refused {
            let Difference { key, saved, now } = difference;
            let _ = write!(message, "\n    {key}: {saved} in the checkpoint, {now} now"); // a String never fails
        }
        let error = Error::checkpoint(message);
        let may = refused.iter().filter(|difference| !NEVER.contains(&difference.key.as_str()));
        let flags: Vec<_> = may.map(|difference| format!("--allow {}", difference.key)).collect();
        Err(if flags.len() == refused.len() {
            error.hint(format!("set these as they were, or go on in spite of it with {}", flags.join(" ")))
        } else {
            error.hint("set these as they were, or start a new run in another train.output_dir")
        })
    }

    /// All fields in one map, with the values that reading the file would give.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: a field has a value that JSON cannot write.
    pub fn fields(&self) -> Result<BTreeMap<String, Value>> {
        let bad = |error: serde_json::Error| Error::checkpoint("the stamp cannot be written").caused_by(error);
        let text = serde_json::to_string(self).map_err(bad)?;
        let mut fields: BTreeMap<String, Value> = serde_json::from_str(&text).map_err(bad)?;
        if let Some(Value::Object(training)) = fields.remove("training") {
            fields.extend(training);
        }
        Ok(fields)
    }
}

/// Describes adapters in a line: `84 modules, rank 4, alpha 8; 1 tensor in full; <hash>`.
pub(super) fn describe_adapter(placements: &[Placement], saved: &[String]) -> String {
    if placements.is_empty() && saved.is_empty() {
        return "none".into();
    }
    let mut hasher = blake3::Hasher::new();
    let (mut ranks, mut alphas) = (Vec::new(), Vec::new());
    for placement in placements {
        let Placement { module, adapter, .. } = placement;
        hasher.update(format!("{module:?} {}\n", adapter.describe()).as_bytes());
        if let Some(rank) = adapter.rank() {
            ranks.push(rank.r as f64);
            alphas.push(rank.alpha);
        }
    }
    hasher.update(format!("{saved:?}").as_bytes());
    let hash = &hasher.finalize().to_hex()[..16];
    if ranks.is_empty() {
        return format!("{} modules; {} tensors in full; {hash}", placements.len(), saved.len());
    }
    let (ranks, alphas) = (distinct(ranks), distinct(alphas));
    format!("{} modules, rank {ranks}, alpha {alphas}; {} tensors in full; {hash}", placements.len(), saved.len())
}

/// The distinct values in ascending order, separated by slashes.
fn distinct(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    values.dedup();
    values.iter().map(f64::to_string).collect::<Vec<_>>().join("/")
}

/// The value of a field for messages.
pub fn show(key: &str, value: &Value) -> String {
    match value {
        Value::String(text) => as_set(key, text),
        other => other.to_string(),
    }
}

//! Compares the stamp of an adapter's run (`backend.json`) with the model that the adapter is to be merged into or used
//! with.
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::layout::{STAMP, read_json};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::nearest;
use tunesmith_model::quantize::Held;

/// The field with the hash of the base model's weights.
pub const BASE_MODEL: &str = "base_model";
/// The field with the quantization of the base.
const QUANTIZATION: &str = "quantization";

/// Fields that a merge compares, and that `--allow` may let differ.
pub const MAY_DIFFER: [&str; 6] = ["backend", BASE_MODEL, "chat_template", "dtype", QUANTIZATION, "tokenizer"];

/// The stamp of an adapter's run. Stamps of other versions may lack fields; such fields are not compared.
#[derive(Debug)]
pub struct AdapterStamp {
    path: PathBuf,
    fields: Value,
}

impl AdapterStamp {
    /// Reads the stamp in the adapter's folder, as checkpoints have it, or in the parent folder, as a run's result has it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: there is a stamp, and it cannot be read.
    pub fn of(dir: &Path) -> Result<Option<Self>> {
        let real = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let places = [Some(real.join(STAMP)), real.parent().map(|parent| parent.join(STAMP))];
        let Some(path) = places.into_iter().flatten().find(|path| files::is_there(path)) else { return Ok(None) };
        let origin = Self { fields: read_json(&path)?, path };
        match origin.field("base_model") {
            Some(_) => Ok(Some(origin)),
            None => Err(Error::checkpoint(format!("{}: no base_model", origin.path.display()))
                .hint("tunesmith writes it: put the run's backend.json back, or move this file away")),
        }
    }

    /// The text of a field; `None` if it is missing or no text.
    pub fn field(&self, key: &str) -> Option<&str> {
        self.fields[key].as_str()
    }

    /// `data.labels` of the run, if it trained a classifier.
    pub fn labels(&self) -> Option<Vec<String>> {
        let labels = self.fields["training"]["data.labels"].as_array()?;
        labels.iter().map(|label| label.as_str().map(str::to_owned)).collect()
    }

    /// The quantization of the base during the run; `None` if the base was not quantized.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: this version does not know the value of the field.
    pub fn held(&self) -> Result<Option<Held>> {
        let Some(text) = self.field(QUANTIZATION) else { return Ok(None) };
        Held::parse(text).ok_or_else(|| {
            Error::checkpoint(format!("{}: quantization: {text:?} is no form of this version", self.path.display()))
                .hint("use the version of tunesmith that trained the adapter, or a newer one")
        })
    }

    /// Compares the stamp with the same fields `now`. Returns one line for each difference that `allow` accepts.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`] with every other difference, both sides shown.
    pub fn compare(&self, dir: &Path, now: &[(&str, String)], allow: &[String]) -> Result<Vec<String>> {
        let differ = now.iter().filter_map(|(key, now)| {
            let trained = self.field(key).filter(|trained| trained != now)?;
            let (trained, now) = (as_set(key, trained), as_set(key, now));
            Some((*key, format!("{key}: {trained} in its backend.json, {now} here")))
        });
        let (passed, refused): (Vec<_>, Vec<_>) =
            differ.partition(|(key, _)| allow.iter().any(|allowed| allowed == key));
        if refused.is_empty() {
            return Ok(passed.into_iter().map(|(_, text)| text).collect());
        }
        let lines: Vec<String> = refused.iter().map(|(_, text)| format!("\n    {text}")).collect();
        let error = Error::checkpoint(format!(
            "{} was trained on something else than what it is to be used with:{}",
            dir.display(),
            lines.concat()
        ));
        let known = "name what it was trained on; of adapters on top of others, those below too, in their order";
        Err(if refused.iter().all(|(key, _)| MAY_DIFFER.contains(key)) {
            let flags: Vec<String> = refused.iter().map(|(key, _)| format!("--allow {key}")).collect();
            error.hint(format!("{known}; or accept the difference: {}", flags.join(" ")))
        } else {
            error.hint(known)
        })
    }
}

/// The text of a stamp's field as a configuration has it.
pub fn as_set(key: &str, text: &str) -> String {
    if key == QUANTIZATION { Held::as_set(text) } else { text.to_owned() }
}

/// Checks that every field in `--allow` is one of the `compared` fields.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], with the nearest name.
pub fn check_allowed(allow: &[String], compared: &[&str]) -> Result<()> {
    let Some(odd) = allow.iter().find(|key| !compared.contains(&key.as_str())) else { return Ok(()) };
    let error = Error::config(format!("--allow {odd}: no such field, or none that may differ"));
    Err(match nearest(odd, compared.iter().copied()) {
        Some(near) => error.hint(format!("did you mean {near}?")),
        None => error.hint(format!("these may be allowed: {}", compared.join(", "))),
    })
}

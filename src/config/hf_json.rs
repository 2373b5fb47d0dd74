//! Checked reading of a model's `config.json`: values by key, and the refusal of features that are not computed.
use std::fs;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use super::arch::{Family, Rope, RopeScaling};
use crate::error::{Error, Result};

/// Bound of every width, head count and vocabulary: products of two stay far from overflow.
pub(super) const MAX_SIZE: usize = 1 << 24;
/// More than any real `config.json` holds.
const CONFIG_BYTES: u64 = 4 << 20;

/// The text of a small file; none where there is no such file.
pub(super) fn read_text(path: &Path) -> Result<Option<String>> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("open", path, &error)),
    };
    let mut bytes = Vec::new();
    file.take(CONFIG_BYTES + 1).read_to_end(&mut bytes).map_err(|error| Error::io("read", path, &error))?;
    if bytes.len() as u64 > CONFIG_BYTES {
        return Err(Error::model(format!(
            "{}: larger than {CONFIG_BYTES} bytes, expected a small JSON file",
            path.display()
        )));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| {
        Error::model(format!("{}: not UTF-8 at byte {}", path.display(), error.utf8_error().valid_up_to()))
    })
}

/// A parsed JSON object with getters whose errors name the file and the key.
pub(super) struct Source<'a> {
    origin: &'a Path,
    map: Map<String, Value>,
    /// What precedes a key in messages: empty, or the object that holds it, such as `rope_scaling.`.
    prefix: &'static str,
}

impl<'a> Source<'a> {
    pub(super) fn parse(text: &str, origin: &'a Path) -> Result<Self> {
        match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Ok(Self { origin, map, prefix: "" }),
            Ok(other) => {
                Err(Error::model(format!("{}: expected a JSON object, found {}", origin.display(), brief(&other))))
            }
            Err(error) => Err(Error::model(format!("{}: not valid JSON: {error}", origin.display()))),
        }
    }

    pub(super) fn error(&self, message: impl std::fmt::Display) -> Error {
        Error::model(format!("{}: {message}", self.origin.display()))
    }

    /// An error about one key: found and expected.
    fn mismatch(&self, key: &str, expected: &str) -> Error {
        match self.map.get(key) {
            Some(value) => self.error(format!("{}{key} is {}, expected {expected}", self.prefix, brief(value))),
            None => self.error(format!("no key {}{key}, expected {expected}", self.prefix)),
        }
    }

    fn not_yet(&self, what: impl std::fmt::Display) -> Error {
        self.error(format!("not yet: {what}"))
    }

    /// The value unless it is absent or null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is written at all, be it as null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(super) fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        self.size_up_to(key, default, MAX_SIZE)
    }

    pub(super) fn size_up_to(&self, key: &str, default: Option<usize>, most: usize) -> Result<usize> {
        let expected = || self.mismatch(key, &format!("a whole number from 1 to {most}"));
        let found = match self.get(key) {
            Some(value) => value.as_u64().and_then(|value| usize::try_from(value).ok()).ok_or_else(expected)?,
            None => default.ok_or_else(expected)?,
        };
        if (1..=most).contains(&found) { Ok(found) } else { Err(expected()) }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            Some(value) => value.as_bool().ok_or_else(|| self.mismatch(key, "true or false")),
            None => Ok(default),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            Some(value) => match value.as_f64().filter(|value| value.is_finite()) {
                Some(value) => Ok(Some(value)),
                None => Err(self.mismatch(key, "a number")),
            },
            None => Ok(None),
        }
    }

    pub(super) fn positive(&self, key: &str, default: f64) -> Result<f64> {
        let value = self.number(key)?.unwrap_or(default);
        // Small enough that f32, in which it is used, keeps it finite and above zero.
        if (1e-30..=1e30).contains(&value) { Ok(value) } else { Err(self.mismatch(key, "a number above 0")) }
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.mismatch(key, "a string")),
            None => Ok(None),
        }
    }

    /// One id or a list of them; old files write a negative id for none.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let one = std::slice::from_ref(value);
        let mut ids = Vec::new();
        for value in value.as_array().map_or(one, Vec::as_slice) {
            match value.as_i64() {
                Some(id) if id < 0 => {}
                Some(id) if u32::try_from(id).is_ok() => ids.push(id as u32),
                _ => return Err(self.mismatch(key, "a token id, a list of token ids, or null")),
            }
        }
        Ok(ids)
    }

    pub(super) fn family(&self) -> Result<Family> {
        let supported = Family::ALL.map(Family::model_type).join(", ");
        let found =
            self.text("model_type")?.ok_or_else(|| self.mismatch("model_type", &format!("one of {supported}")))?;
        let family = Family::ALL.into_iter().find(|family| family.model_type() == found);
        family.ok_or_else(|| {
            self.not_yet(format!("model_type {found:?}")).hint(format!("supported in this version: {supported}"))
        })
    }

    /// Features that change the numbers and that this version does not compute.
    pub(super) fn refuse_unsupported(&self, family: Family) -> Result<()> {
        if let Some(classes) = self.get("architectures") {
            let expected = family.class_name();
            let has = |class: &Value| class.as_str() == Some(expected);
            let classes = classes.as_array().ok_or_else(|| self.mismatch("architectures", "a list"))?;
            if !classes.is_empty() && !classes.iter().any(has) {
                return Err(self.mismatch("architectures", expected));
            }
        }
        if self.get("quantization_config").is_some() {
            let method = self.get("quantization_config").and_then(|value| value.get("quant_method"));
            let method = method.map_or_else(String::new, |method| format!(" (quant_method {})", brief(method)));
            return Err(self
                .not_yet(format!("quantized base: quantization_config{method}"))
                .hint("use the unquantized model, with weights in f32, bf16 or f16"));
        }
        match self.text("hidden_act")? {
            None | Some("silu" | "swish") => {}
            Some(act) => return Err(self.not_yet(format!("hidden_act {act:?}")).hint("supported: \"silu\"")),
        }
        for key in ["attention_dropout", "hidden_dropout", "residual_dropout", "embd_pdrop", "resid_pdrop"] {
            if self.number(key)?.unwrap_or(0.0) != 0.0 {
                return Err(self.not_yet(format!("{key} other than 0")).hint("set it to 0.0 in config.json"));
            }
        }
        self.refuse_sliding_window(family)?;
        let experts = ["num_experts", "num_local_experts"].into_iter().find(|key| self.get(key).is_some());
        match experts {
            Some(key) => Err(self.not_yet(format!("mixture of experts ({key})"))),
            None => Ok(()),
        }
    }

    fn refuse_sliding_window(&self, family: Family) -> Result<()> {
        if let Some(kinds) = self.get("layer_types") {
            let kinds = kinds.as_array().ok_or_else(|| self.mismatch("layer_types", "a list"))?;
            if let Some(kind) = kinds.iter().find(|kind| kind.as_str() != Some("full_attention")) {
                return Err(self
                    .not_yet(format!("layer_types with {}", brief(kind)))
                    .hint("supported: \"full_attention\""));
            }
            let layers = self.size("num_hidden_layers", None)?;
            if kinds.len() != layers {
                return Err(
                    self.error(format!("layer_types has {} entries, num_hidden_layers is {layers}", kinds.len()))
                );
            }
        }
        // Llama's code never reads the key: where a file sets it, somebody means another model.
        let used = self.flag("use_sliding_window", family == Family::Llama)?;
        if !used || self.get("sliding_window").is_none() {
            return Ok(());
        }
        if family != Family::Llama && self.get("layer_types").is_none() {
            let layers = self.size("num_hidden_layers", None)?;
            let first = self.get("max_window_layers").map_or(Some(28), Value::as_u64);
            if first.is_some_and(|first| first >= layers as u64) {
                return Ok(()); // no block is late enough to have the window
            }
        } else if family != Family::Llama {
            return Ok(()); // layer_types, all full, decide
        }
        Err(self
            .not_yet(format!(
                "sliding-window attention (sliding_window {})",
                self.get("sliding_window").map_or_else(String::new, brief)
            ))
            .hint("if the model attends to the full context, set sliding_window to null in config.json"))
    }

    pub(super) fn head_dim(&self, family: Family, hidden_size: usize, heads: usize) -> Result<usize> {
        let class_default = family == Family::Qwen3 && !self.has("head_dim");
        if self.get("head_dim").is_some() || class_default {
            return self.size("head_dim", Some(128));
        }
        if hidden_size.is_multiple_of(heads) {
            Ok(hidden_size / heads)
        } else {
            Err(self.error(format!(
                "hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
            )))
        }
    }

    /// `rope_scaling` (Transformers 4) or `rope_parameters` (5); theta from there, else from the top, else 10000.
    pub(super) fn rope(&self, max_position_embeddings: usize) -> Result<Rope> {
        let theta = self.positive("rope_theta", 10_000.0)?;
        self.refuse_partial_rotary()?;
        let named = ["rope_scaling", "rope_parameters"].into_iter().find(|key| match self.get(key) {
            Some(Value::Object(map)) => !map.is_empty(),
            Some(_) => true,
            None => false,
        });
        let Some(key) = named else { return Ok(Rope { theta, scaling: RopeScaling::None }) };
        let Some(Value::Object(map)) = self.get(key) else { return Err(self.mismatch(key, "an object or null")) };
        let prefix = if key == "rope_scaling" { "rope_scaling." } else { "rope_parameters." };
        let inner = Source { origin: self.origin, map: map.clone(), prefix };
        if let Some((kind, _)) = inner.map.iter().find(|(_, value)| value.is_object()) {
            return Err(self.not_yet(format!("{key} by layer type ({kind:?})")));
        }
        inner.refuse_partial_rotary()?;
        let theta = inner.positive("rope_theta", theta)?;
        let kind = inner.text("rope_type")?.or(inner.text("type")?).unwrap_or("default");
        match kind {
            "default" => Ok(Rope { theta, scaling: RopeScaling::None }),
            "llama3" => {
                let required = |key| match inner.number(key)? {
                    Some(_) => inner.positive(key, 1.0),
                    None => Err(inner.mismatch(key, "a number above 0")),
                };
                let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
                if high <= low {
                    return Err(inner.mismatch("high_freq_factor", &format!("more than low_freq_factor {low}")));
                }
                let context = inner.size_up_to(
                    "original_max_position_embeddings",
                    Some(max_position_embeddings),
                    usize::MAX >> 1,
                )?;
                let original_max_position_embeddings =
                    self.size_up_to("original_max_position_embeddings", Some(context), usize::MAX >> 1)?;
                let scaling = RopeScaling::Llama3 {
                    factor: required("factor")?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_max_position_embeddings,
                };
                Ok(Rope { theta, scaling })
            }
            other => {
                Err(self.not_yet(format!("{prefix}rope_type {other:?}")).hint("supported: \"default\", \"llama3\""))
            }
        }
    }

    fn refuse_partial_rotary(&self) -> Result<()> {
        match self.number("partial_rotary_factor")? {
            Some(factor) if factor != 1.0 => {
                Err(self.not_yet(format!("{}partial_rotary_factor {factor}", self.prefix)))
            }
            _ => Ok(()),
        }
    }
}

/// A JSON value short enough for a message.
fn brief(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(items) if items.len() > 4 => format!("a list of {}", items.len()),
        _ => {
            let text = value.to_string();
            if text.chars().count() > 80 { text.chars().take(77).collect::<String>() + "..." } else { text }
        }
    }
}

//! Reads the fields of an `adapter_config.json`, and refuses those that ask for something this program does not
//! compute.
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{NO_TARGET, SCORE_MODULES, object};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::{self, temporary};
use tunesmith_config::arch::TokenRows;
use tunesmith_config::{Config, Node, TuningConfig};
use tunesmith_model::adapters::{self, About, KINDS, NO_MODULE};

const CONFIG_BYTES: u64 = 4 << 20;

/// Fields that separate functions read.
const READ_BY_NAME: [&str; 2] = ["layers_pattern", "trainable_token_indices"];

fn titles() -> Vec<&'static str> {
    KINDS.iter().map(|about| about.title).collect()
}

pub(super) struct Source<'a> {
    pub origin: &'a Path,
    pub map: Map<String, Value>,
}

impl Source<'_> {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub fn mismatch(&self, key: &str, expected: &str) -> Error {
        let found = self.map.get(key).map_or_else(|| "missing".into(), ToString::to_string);
        let found: String = found.chars().take(80).collect();
        Error::checkpoint(format!("{}: {key} is {found}, expected {expected}", self.origin.display())).hint(AS_PEFT)
    }

    fn refuse(&self, key: &str) -> Error {
        let found = self.map.get(key).unwrap_or(&Value::Null).to_string();
        let found: String = found.chars().take(80).collect();
        let instead = match key {
            // PiSSA, OLoRA and CorDA take a part out of the base. PEFT converts such adapters when it saves them.
            "init_lora_weights" => {
                "the adapter belongs to a changed base: save it in PEFT with path_initial_model_for_weight_conversion, or merge it there"
                    .to_owned()
            }
            "lora_bias" => MERGE_IN_PEFT.to_owned(),
            _ => format!("this version reads {}", titles().join(", ")),
        };
        Error::checkpoint(format!("{}: not yet: {key} = {found}", self.origin.display())).hint(instead)
    }

    /// The kind of adapter that `peft_type` names.
    pub fn kind(&self) -> Result<&'static About> {
        let known = || {
            let words: Vec<_> = KINDS.iter().map(|about| format!("{:?}", about.peft_type)).collect();
            words.join(" or ")
        };
        match self.get("peft_type") {
            None => Err(self.mismatch("peft_type", &known())),
            Some(word) => {
                let found = KINDS.iter().find(|about| word == about.peft_type);
                found.copied().ok_or_else(|| self.refuse("peft_type"))
            }
        }
    }

    pub fn scores(&self) -> bool {
        self.get("task_type").is_some_and(|task| task == "SEQ_CLS")
    }

    pub fn refuse_unsupported(&self, about: &About) -> Result<()> {
        if self.get("task_type").is_some_and(|task| task != "CAUSAL_LM" && task != "SEQ_CLS") {
            return Err(self.refuse("task_type"));
        }
        let in_use = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Number(number) => number.as_f64() != Some(0.0),
            Value::Array(items) => !items.is_empty(),
            Value::Object(map) => !map.is_empty(),
            _ => true,
        };
        let (fields, keys) = (object(about.fields), about.section.options);
        for (key, value) in self.map.iter().filter(|(key, _)| !READ_BY_NAME.contains(&key.as_str())) {
            let usual = fields.get(key).is_none_or(|usual| usual == value);
            let known = !usual && !about.indifferent.contains(&key.as_str());
            let unknown_switch = key.starts_with("use_") && keys.iter().all(|def| def.name != key);
            if (known || unknown_switch) && in_use(value) {
                return Err(self.refuse(key));
            }
        }
        Ok(())
    }

    /// Reads the settings of this kind of adapter.
    pub fn settings(&self, about: &About) -> Result<TuningConfig> {
        let absent = object(about.absent);
        let mut config = Config::default();
        config.tuning.mode = about.mode;
        for def in about.section.options.iter().filter(|def| !about.ours.contains(&def.name)) {
            let Some(value) = self.get(def.name).or_else(|| absent.get(def.name)) else { continue };
            let read = adapters::of(&config.tuning).and_then(|method| method.read_field(def.name, value));
            let mut value = read.ok_or_else(|| self.refuse(def.name))?;
            if let (Some(all), "modules_to_save") = (value.as_array_mut(), def.name) {
                all.retain(|module| !self.scores() || !SCORE_MODULES.iter().any(|score| module == score));
            }
            if def.name.ends_with("_modules") && (value == json!([]) || value == NO_TARGET) {
                value = NO_MODULE.into();
            }
            if let (Some(word), true) = (value.as_str(), def.name.ends_with("_modules")) {
                // PEFT accepts this word in upper and lower case, and no other word for it.
                match word.to_lowercase().as_str() {
                    "all-linear" => value = "all-linear".into(),
                    "auto" => value = "(?:auto)".into(),
                    _ => {}
                }
            }
            let set = |config: &mut Config, value: &Value| (def.set)(config, &Node::from(value));
            // A single name or number stands for a list with one item.
            let alone = (value.is_string() || value.is_number()) && !def.name.ends_with("_modules");
            let alone = alone.then(|| json!([value]));
            if set(&mut config, &value).is_err() && alone.is_none_or(|list| set(&mut config, &list).is_err()) {
                let error = self.mismatch(def.name, &def.expectation());
                return Err(match value.as_f64() {
                    Some(_) if def.name == "lora_alpha" => error.hint(MERGE_IN_PEFT),
                    _ => error,
                });
            }
        }
        Ok(config.tuning)
    }

    /// A string or a list of strings.
    pub fn strings(&self, key: &str) -> Result<Vec<String>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let strings: Option<Vec<_>> = items.iter().map(|item| item.as_str().map(String::from)).collect();
        strings.ok_or_else(|| self.mismatch(key, "a list of strings"))
    }

    /// `trainable_token_indices`: a list for the embedding, or a list per module.
    pub fn tokens(&self) -> Result<TokenRows> {
        let key = "trainable_token_indices";
        let mismatch = || self.mismatch(key, "a list of token ids, or one each for embed_tokens and lm_head");
        let list = |value: &Value| -> Result<Vec<u32>> {
            let ids = value.as_array().map(|ids| ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()));
            ids.and_then(Iterator::collect::<Option<_>>).ok_or_else(mismatch)
        };
        let mut rows = TokenRows::default();
        match self.get(key) {
            None => {}
            Some(Value::Object(map)) => {
                for (module, ids) in map {
                    match module.rsplit('.').next() {
                        Some("embed_tokens" | "wte") => rows.embedding = list(ids)?,
                        Some("lm_head") => rows.head = list(ids)?,
                        _ => return Err(mismatch()),
                    }
                }
            }
            Some(ids) => rows.embedding = list(ids)?,
        }
        Ok(rows)
    }
}

const MERGE_IN_PEFT: &str = "merge the adapter in PEFT (merge_and_unload), and use the result as the model";

pub(super) const AS_PEFT: &str =
    "an adapter is a folder with adapter_config.json and adapter_model.safetensors, as PEFT writes it";

pub(super) fn read_small(path: &Path) -> Result<String> {
    let put_back = path.parent().and_then(temporary::how_to_put_back);
    let hint = || put_back.clone().unwrap_or_else(|| AS_PEFT.to_owned());
    let fail = |reason: String| Error::checkpoint(format!("{}: {reason}", path.display())).hint(hint());
    let file =
        files::open_member(path).map_err(|error| fail("cannot be read".to_owned()).unless_of_machine(path, &error))?;
    let mut bytes = Vec::new();
    file.take(CONFIG_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| fail("cannot be read".to_owned()).unless_of_machine(path, &error))?;
    if bytes.len() as u64 > CONFIG_BYTES {
        return Err(fail(format!("larger than {CONFIG_BYTES} bytes, expected a small JSON file")));
    }
    String::from_utf8(bytes).map_err(|error| fail(format!("not UTF-8 at byte {}", error.utf8_error().valid_up_to())))
}

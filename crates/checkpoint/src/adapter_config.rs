//! Reads and writes PEFT's `adapter_config.json`. Files of any PEFT version are accepted. A field that asks for a computation
//! which this program does not have is refused by its name.
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::layout::ADAPTER_CONFIG;
use tunesmith_base::Kind;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::arch::{Arch, EMBEDDING, LM_HEAD, TokenRows, Wrapper};
use tunesmith_config::{Config, Mode, Node, TuningConfig};
use tunesmith_model::adapters::{self, About, KINDS, Method, NO_MODULE};
use tunesmith_model::targets::{Placement, Targets, token_rows};

/// The PEFT version whose fields are written.
const PEFT_VERSION: &str = "0.21.2";
const CONFIG_BYTES: u64 = 4 << 20;

/// The fields of an `adapter_config.json` that decide which modules an adapter changes, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// `mode` says the kind of adapter; of the other fields only the section of that kind is used.
    pub tuning: TuningConfig,
    /// Names of the module lists that `layers_to_transform` counts in, such as `layers`; empty: any list.
    pub layers_pattern: Vec<String>,
    /// Single rows of the embedding and of an untied head that are trained: PEFT's `trainable_token_indices`.
    pub token_rows: TokenRows,
    /// The base model's name or folder.
    pub base_model_name_or_path: Option<String>,
    /// Whether it has a classification head: PEFT's task type `SEQ_CLS`.
    pub scores: bool,
    /// Whether it fully trains the matrix that embedding and head share. The weights file holds the matrix under both names.
    pub shares_head: bool,
    /// Its module names, if the language model is part of a multimodal model.
    pub wrapped: Option<Wrapped>,
}

/// Module names of an adapter on a multimodal model. They are full paths: a bare name would also match the vision tower.
#[derive(Debug, Clone, PartialEq)]
pub struct Wrapped {
    wrapper: &'static Wrapper,
    target_modules: Value,
    modules_to_save: Vec<String>,
}

impl Wrapped {
    fn new(wrapper: &'static Wrapper, placements: &[Placement], saved: &[String]) -> Self {
        let named = placements.iter().filter(|placement| placement.experts.is_none());
        let names: Vec<&str> = named.map(|placement| placement.module.as_str()).collect();
        // Grouped by their name within a block, to write one expression if every block has the same modules.
        let mut blocks: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for name in &names {
            let place = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            if let Some((layer, module)) = place {
                blocks.entry(module).or_default().insert(layer);
            }
        }
        let all: BTreeSet<&str> = blocks.values().flatten().copied().collect();
        let listed: usize = blocks.values().map(BTreeSet::len).sum();
        let alike = !blocks.is_empty() && listed == names.len() && blocks.values().all(|layers| *layers == all);
        let whole = all.iter().filter_map(|layer| layer.parse::<usize>().ok()).max() == Some(all.len().wrapping_sub(1));
        let target_modules = if alike && whole {
            let modules: Vec<String> = blocks.keys().map(|module| regex::escape(module)).collect();
            let layers = regex::escape(&wrapper.module("model.layers"));
            format!(r"{layers}\.\d+\.({})", modules.join("|")).into()
        } else {
            names.iter().map(|name| wrapper.module(name)).collect::<BTreeSet<_>>().into_iter().collect()
        };
        let module =
            |tensor: &String| wrapper.module(tensor.rsplit_once('.').map_or(tensor.as_str(), |(name, _)| name));
        let modules_to_save = saved.iter().map(module).collect::<BTreeSet<_>>().into_iter().collect();
        Self { wrapper, target_modules, modules_to_save }
    }

    /// Replaces the fields that name modules by the full paths.
    fn write(&self, fields: &mut Map<String, Value>) {
        for (key, value) in &mut *fields {
            match (key.as_str(), value) {
                ("target_modules", value) => *value = self.target_modules.clone(),
                ("exclude_modules" | "layers_to_transform" | "layers_pattern", value) => *value = Value::Null,
                ("modules_to_save", value) if !self.modules_to_save.is_empty() => *value = json!(self.modules_to_save),
                ("feedforward_modules" | "target_parameters", Value::Array(names)) => {
                    for name in names {
                        *name = name.as_str().map_or(Value::Null, |name| self.wrapper.module(name).into());
                    }
                }
                ("feedforward_modules", Value::String(pattern)) => *pattern = self.wrapper.pattern(pattern),
                ("rank_pattern" | "alpha_pattern", Value::Object(patterns)) => {
                    let own = std::mem::take(patterns);
                    patterns.extend(own.into_iter().map(|(key, value)| (self.wrapper.pattern(&key), value)));
                }
                _ => {}
            }
        }
    }
}

/// What PEFT lists in `modules_to_save` of every `SEQ_CLS` adapter, whatever the model's head is called.
const SCORE_MODULES: [&str; 2] = ["classifier", "score"];

impl AdapterConfig {
    /// The settings to save for an adapter that `tuning` describes and that was placed at `placements`.
    pub fn of(tuning: &TuningConfig, placements: &[Placement], base_model: Option<&str>) -> Self {
        let mut own = TuningConfig { mode: tuning.mode, ..TuningConfig::default() };
        if let Some(about) = adapters::of(tuning).map(Method::about) {
            own = copied(about, |_| true, tuning, &own);
        }
        if let Some(method) = adapters::of(tuning) {
            method.write(placements, &mut own);
        }
        Self {
            tuning: own,
            layers_pattern: Vec::new(),
            token_rows: TokenRows::default(),
            base_model_name_or_path: base_model.map(Into::into),
            scores: false,
            shares_head: false,
            wrapped: None,
        }
    }

    /// The name in the adapter's files of the tensor or module `plain` of the language model.
    pub fn stored_name(&self, plain: &str) -> String {
        self.wrapped.as_ref().map_or_else(|| plain.to_owned(), |wrapped| wrapped.wrapper.module(plain))
    }

    /// These settings in the form for the model `arch`, which may be part of a multimodal model.
    ///
    /// # Errors
    /// The settings do not fit the model.
    pub fn on(mut self, arch: &Arch) -> Result<Self> {
        let targets = self.targets();
        self.shares_head = targets.trains_shared(arch)?;
        self.wrapped = match arch.wrapper {
            Some(wrapper) => Some(Wrapped::new(wrapper, &self.place(arch)?, &targets.saved_tensors(arch)?)),
            None => None,
        };
        Ok(self)
    }

    /// The settings of its kind of adapter.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: its mode has no adapter.
    fn method(&self) -> Result<&dyn Method> {
        adapters::of(&self.tuning).ok_or_else(|| {
            Error::checkpoint(format!("mode {} has no adapter", self.tuning.mode)).hint("set tuning.mode: lora")
        })
    }

    /// Which modules it selects.
    pub fn targets(&self) -> Targets {
        Targets { strict: false, layers_pattern: self.layers_pattern.clone(), ..Targets::of(&self.tuning) }
    }

    /// The modules of the model that it changes, in model order.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: it does not fit the model.
    pub fn place(&self, arch: &Arch) -> Result<Vec<Placement>> {
        self.targets().place(arch, self.method()?).map_err(|error| error.with_kind(Kind::Checkpoint))
    }

    /// Adds the vocabulary's `tables` to `modules_to_save`. If the settings list none of them, embedding and head may share
    /// their matrix.
    pub(super) fn save_whole(&mut self, tables: &[&str]) {
        let lora = &mut self.tuning.lora;
        let named = |table: &str| lora.modules_to_save.iter().any(|module| module.ends_with(table));
        let more: Vec<String> = tables.iter().filter(|table| !named(table)).map(|&table| table.to_owned()).collect();
        if self.tuning.mode == Mode::Lora && !more.is_empty() {
            lora.ensure_weight_tying |= more.len() == tables.len();
            lora.modules_to_save.extend(more);
        }
    }

    /// Names and shapes of its tensors on a model.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: it does not fit the model.
    pub fn tensors(&self, arch: &Arch) -> Result<Vec<(String, Vec<usize>)>> {
        let arch = Arch { token_rows: self.token_rows.clone(), ..arch.clone() };
        let tensors = self.targets().tensors(&arch, &self.place(&arch)?);
        tensors.map_err(|error| error.with_kind(Kind::Checkpoint))
    }

    /// Adds what the model trains besides adapters: rows of new tokens (`trainable_token_indices`) and a classification head.
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn with_tokens(mut self, arch: &Arch) -> Result<Self> {
        self.scores = arch.score.is_some();
        let tensors = self.targets().token_tensors(arch)?;
        let rows = |tensor: &str| {
            let trained = tensors.iter().any(|(name, _)| *name == token_rows(tensor));
            if trained { arch.rows_of(tensor).to_vec() } else { Vec::new() }
        };
        self.token_rows = TokenRows { embedding: rows(EMBEDDING), head: rows(LM_HEAD) };
        self.on(arch)
    }

    /// Reads `dir/adapter_config.json`.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: a missing or malformed file, or a feature that is not supported, by its name.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join(ADAPTER_CONFIG);
        let text = read_small(&path)?;
        Self::from_json(&text, &path)
    }

    /// Reads the text of an `adapter_config.json`; `origin` is named in errors.
    ///
    /// # Errors
    /// As [`AdapterConfig::from_dir`].
    pub fn from_json(text: &str, origin: &Path) -> Result<Self> {
        let source = match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Source { origin, map },
            Ok(_) => {
                return Err(Error::checkpoint(format!("{}: expected a JSON object", origin.display())).hint(AS_PEFT));
            }
            Err(error) => {
                let message = format!("{}: not valid JSON: {error}", origin.display());
                return Err(Error::checkpoint(message).hint("the file is damaged: copy the adapter again"));
            }
        };
        let about = source.kind()?;
        source.refuse_unsupported(about)?;
        if source.get("target_modules").is_none() {
            return Err(source.mismatch("target_modules", "a list of names or a regular expression"));
        }
        Ok(Self {
            tuning: source.settings(about)?,
            layers_pattern: source.strings("layers_pattern")?,
            token_rows: source.tokens()?,
            base_model_name_or_path: source.get("base_model_name_or_path").and_then(Value::as_str).map(Into::into),
            scores: source.scores(),
            shares_head: false,
            wrapped: None,
        })
    }

    /// The adapter's settings as a configuration, to continue its training. Modules have their full names, because a
    /// configuration has no `layers_pattern`. Settings that are not the adapter's stay as in `like`.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`] where the adapter does not fit the model.
    pub fn settings(&self, arch: &Arch, like: &TuningConfig) -> Result<TuningConfig> {
        let (method, placements) = (self.method()?, self.place(arch)?);
        let mut listed = TuningConfig { mode: self.tuning.mode, ..like.clone() };
        method.list(&placements, &mut listed);
        let about = method.about();
        Ok(copied(about, |key| about.ours.contains(&key), like, &listed))
    }

    /// The JSON of `adapter_config.json`, with every field that PEFT 0.21 writes.
    pub fn to_json(&self) -> Value {
        let Some(method) = adapters::of(&self.tuning) else { return Value::Null };
        let about = method.about();
        let mut fields = object(about.fields);
        let (task, head) = if self.scores { ("SEQ_CLS", &SCORE_MODULES[..]) } else { ("CAUSAL_LM", &[][..]) };
        let config = Config { tuning: self.tuning.clone(), ..Config::default() };
        for def in about.section.options.iter().filter(|def| !about.ours.contains(&def.name)) {
            fields.insert(def.name.to_owned(), method.write_field(def.name, tidy(def.name, (def.get)(&config))));
        }
        if let Some(saved) = fields.get_mut("modules_to_save") {
            let own = saved.as_array().into_iter().flatten().cloned();
            let all: Vec<Value> = head.iter().map(|&module| module.into()).chain(own).collect();
            *saved = if all.is_empty() { Value::Null } else { all.into() };
        }
        for (key, value) in [
            ("layers_pattern", tidy("layers_pattern", json!(self.layers_pattern))),
            ("trainable_token_indices", self.tokens_json()),
        ] {
            if let Some(field) = fields.get_mut(key) {
                *field = value;
            }
        }
        if let Some(wrapped) = &self.wrapped {
            wrapped.write(&mut fields);
        }
        let common = json!({
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model_name_or_path,
            "inference_mode": true,
            "peft_type": about.peft_type,
            "peft_version": PEFT_VERSION,
            "revision": null,
            "task_type": task,
        });
        fields.extend(common.as_object().cloned().unwrap_or_default());
        // In the order of their names, as PEFT sorts them.
        fields.into_iter().collect::<BTreeMap<_, _>>().into_iter().collect::<Map<_, _>>().into()
    }
}

/// Copies into `to` those settings of an adapter's kind from `from` whose names `wanted` accepts.
pub fn copied(
    about: &About,
    wanted: impl Fn(&'static str) -> bool,
    from: &TuningConfig,
    to: &TuningConfig,
) -> TuningConfig {
    let from = Config { tuning: from.clone(), ..Config::default() };
    let mut to = Config { tuning: to.clone(), ..Config::default() };
    for def in about.section.options.iter().filter(|def| wanted(def.name)) {
        // A value that a configuration holds is one that it accepts.
        let set = (def.set)(&mut to, &Node::from(&(def.get)(&from)));
        debug_assert!(set.is_ok(), "{}: {set:?}", def.path());
    }
    to.tuning
}

/// Parses a JSON object of a kind's description.
fn object(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).unwrap_or_default()
}

/// A value in PEFT's style: whole numbers without a point, names sorted, `null` for an empty list.
fn tidy(key: &str, value: Value) -> Value {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(whole) if whole.fract() == 0.0 && whole.abs() < 1e15 && !key.ends_with("dropout") => {
                (whole as i64).into()
            }
            _ => Value::Number(number),
        },
        Value::String(word) if key.ends_with("_modules") && word == NO_MODULE => Value::Array(Vec::new()),
        Value::Array(mut items) if key.ends_with("_modules") => {
            items.sort_by(|one, other| one.as_str().cmp(&other.as_str()));
            items.into()
        }
        Value::Array(items) if items.is_empty() => Value::Null,
        Value::Object(map) => map.into_iter().map(|(name, value)| (name, tidy(key, value))).collect(),
        other => other,
    }
}

impl AdapterConfig {
    fn tokens_json(&self) -> Value {
        let TokenRows { embedding, head } = &self.token_rows;
        let rows = [("embed_tokens", embedding), ("lm_head", head)].into_iter().filter(|(_, rows)| !rows.is_empty());
        let modules: Map<_, _> = rows.map(|(module, rows)| (module.to_owned(), json!(rows))).collect();
        if modules.is_empty() { Value::Null } else { modules.into() }
    }
}

/// Fields that functions of their own read.
const READ_BY_NAME: [&str; 2] = ["layers_pattern", "trainable_token_indices"];

fn titles() -> Vec<&'static str> {
    KINDS.iter().map(|about| about.title).collect()
}

struct Source<'a> {
    origin: &'a Path,
    map: Map<String, Value>,
}

impl Source<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn mismatch(&self, key: &str, expected: &str) -> Error {
        let found = self.map.get(key).map_or_else(|| "missing".into(), ToString::to_string);
        let found: String = found.chars().take(80).collect();
        Error::checkpoint(format!("{}: {key} is {found}, expected {expected}", self.origin.display())).hint(AS_PEFT)
    }

    fn refuse(&self, key: &str) -> Error {
        let found = self.map.get(key).unwrap_or(&Value::Null).to_string();
        let found: String = found.chars().take(80).collect();
        Error::checkpoint(format!("{}: not yet: {key} = {found}", self.origin.display()))
            .hint(format!("this version reads {}", titles().join(", ")))
    }

    /// The kind of adapter that `peft_type` names.
    fn kind(&self) -> Result<&'static About> {
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

    fn scores(&self) -> bool {
        self.get("task_type").is_some_and(|task| task == "SEQ_CLS")
    }

    fn refuse_unsupported(&self, about: &About) -> Result<()> {
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

    /// Reads the settings of a kind.
    fn settings(&self, about: &About) -> Result<TuningConfig> {
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
            if def.name.ends_with("_modules") && value == json!([]) {
                value = NO_MODULE.into();
            }
            if let (Some(word), true) = (value.as_str(), def.name.ends_with("_modules")) {
                // PEFT reads this word in any case, and no second word for it.
                match word.to_lowercase().as_str() {
                    "all-linear" => value = "all-linear".into(),
                    "auto" => value = "(?:auto)".into(),
                    _ => {}
                }
            }
            let set = |config: &mut Config, value: &Value| (def.set)(config, &Node::from(value));
            // One name or number stands for a list of it.
            let alone = (value.is_string() || value.is_number()) && !def.name.ends_with("_modules");
            let alone = alone.then(|| json!([value]));
            if set(&mut config, &value).is_err() && alone.is_none_or(|list| set(&mut config, &list).is_err()) {
                return Err(self.mismatch(def.name, &def.expectation()));
            }
        }
        Ok(config.tuning)
    }

    /// A string or a list of strings.
    fn strings(&self, key: &str) -> Result<Vec<String>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let strings: Option<Vec<_>> = items.iter().map(|item| item.as_str().map(String::from)).collect();
        strings.ok_or_else(|| self.mismatch(key, "a list of strings"))
    }

    /// `trainable_token_indices`: a list for the embedding, or a list a module.
    fn tokens(&self) -> Result<TokenRows> {
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
                        Some("embed_tokens") => rows.embedding = list(ids)?,
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

const AS_PEFT: &str =
    "an adapter is a folder with adapter_config.json and adapter_model.safetensors, as PEFT writes it";

fn read_small(path: &Path) -> Result<String> {
    let fail = |reason: String| Error::checkpoint(format!("{}: {reason}", path.display())).hint(AS_PEFT);
    let file = files::open_member(path)
        .map_err(|error| fail(format!("cannot be read: {error}")).unless_of_machine(path, &error))?;
    let mut bytes = Vec::new();
    file.take(CONFIG_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| fail(format!("cannot be read: {error}")).unless_of_machine(path, &error))?;
    if bytes.len() as u64 > CONFIG_BYTES {
        return Err(fail(format!("larger than {CONFIG_BYTES} bytes, expected a small JSON file")));
    }
    String::from_utf8(bytes).map_err(|error| fail(format!("not UTF-8 at byte {}", error.utf8_error().valid_up_to())))
}

//! Reads and writes PEFT's `adapter_config.json`. Files of any PEFT version are accepted. A field that asks for a computation
//! which this program does not have is refused by its name.
mod own_names;
mod read_back;
mod source;
mod tying;
mod wrapped;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use self::source::{AS_PEFT, Source, read_small};
pub use self::wrapped::Wrapped;
use super::layout::ADAPTER_CONFIG;
use super::tensors::Tensors;
use super::untouched::Untouched;
use tunesmith_base::Kind;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, EMBEDDING, LM_HEAD, ModuleNames, TokenRows};
use tunesmith_config::{Config, Mode, Node, TuningConfig, refuse_gguf};
use tunesmith_model::adapters::{self, About, Method, NO_MODULE};
use tunesmith_model::targets::{Placement, Targets, token_rows};

/// The PEFT version whose fields are written.
const PEFT_VERSION: &str = "0.21.2";

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
    /// Whether the adapter has a classification head: PEFT's task type `SEQ_CLS`.
    pub scores: bool,
    /// Whether the adapter fully trains the matrix that embedding and head share. The weights file then has the matrix
    /// under both names.
    pub shares_head: bool,
    /// The family's module names in Transformers, if they differ from the engine's.
    pub own_names: Option<&'static ModuleNames>,
    /// The adapter's module names, if the language model is part of a multimodal model.
    pub wrapped: Option<Wrapped>,
    /// Tensors of an encoder and a connector that an earlier stage has trained and that this one keeps. They are saved
    /// with the adapter.
    pub kept: Arc<Tensors>,
    /// Tensors that are saved only because PEFT saves their modules whole ([`Untouched`]). They are copied while the
    /// adapter is written.
    pub untouched: Arc<Untouched>,
    /// The file that the settings were read from, for errors; `None` for the adapter of a run.
    pub origin: Option<Arc<Path>>,
}

/// PEFT's word in `target_modules` of an adapter that has only `modules_to_save`. It refuses an empty list.
const NO_TARGET: &str = "dummy-target-modules";
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
            own_names: None,
            wrapped: None,
            kept: Arc::default(),
            untouched: Arc::default(),
            origin: None,
        }
    }

    /// Adds to an error about the settings of a file its path, and the keys as they are written there.
    pub(super) fn about(&self, error: Error) -> Error {
        let error = error.with_kind(Kind::Checkpoint);
        let Some(path) = &self.origin else { return error };
        let path = path.display().to_string();
        if error.message().starts_with(&path) {
            return error;
        }
        error.of_key(&format!("{}.", self.targets().section), "").context(path)
    }

    /// The name of the tensor or module `plain` of the language model in the adapter's files.
    pub fn stored_name(&self, plain: &str) -> String {
        let naming = self.wrapped.as_ref().map(|wrapped| wrapped.wrapper.naming);
        let naming = naming.or_else(|| self.own_names?.naming);
        naming.map_or_else(|| plain.to_owned(), |naming| naming.stored(plain))
    }

    /// These settings in the form for the model `arch`, which may be part of a multimodal model.
    ///
    /// # Errors
    /// The settings do not fit the model.
    pub fn on(mut self, arch: &Arch) -> Result<Self> {
        self.save_vision(arch);
        let targets = self.targets();
        self.shares_head = targets.trains_shared(arch).map_err(|error| self.about(error))?;
        self.own_names = Some(arch.module_names).filter(|names| names.naming.is_some() && arch.wrapper.is_none());
        self.wrapped = match arch.wrapper {
            Some(wrapper) => {
                let beside = arch.vision.iter().flat_map(|vision| vision.saved_modules()).collect();
                Some(Wrapped::new(wrapper, &self.place(arch)?, &self.saved_tensors(arch)?, beside))
            }
            None => None,
        };
        Ok(self)
    }

    /// Adds to `modules_to_save` the tensors of an encoder and a connector that are trained in full, as PEFT does.
    fn save_vision(&mut self, arch: &Arch) {
        let modules = arch.vision.iter().flat_map(|vision| vision.saved_modules());
        let Some(saved) = self.tuning.modules_to_save_mut() else { return };
        for module in modules {
            if !saved.contains(&module) {
                saved.push(module);
            }
        }
    }

    /// The settings of its kind of adapter.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: its mode has no adapter.
    fn method(&self) -> Result<&dyn Method> {
        adapters::of(&self.tuning).ok_or_else(|| {
            self.about(Error::checkpoint(format!("mode {} has no adapter", self.tuning.mode)))
                .hint("set tuning.mode: lora")
        })
    }

    /// The rules by which the settings select modules of a model. Errors of these rules do not name the file, so use
    /// the functions below.
    pub(super) fn targets(&self) -> Targets {
        Targets { strict: false, layers_pattern: self.layers_pattern.clone(), ..Targets::of(&self.tuning) }
    }

    /// The modules that the adapter changes, in model order.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: it does not fit the model.
    pub fn place(&self, arch: &Arch) -> Result<Vec<Placement>> {
        self.targets().place(arch, self.method()?).map_err(|error| self.about(error))
    }

    /// As [`Targets::saved_tensors`].
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: it does not fit the model.
    pub fn saved_tensors(&self, arch: &Arch) -> Result<Vec<String>> {
        self.targets().saved_tensors(arch).map_err(|error| self.about(error))
    }

    /// As [`Targets::names_beside`].
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: it does not fit the model.
    pub(super) fn names_beside(&self, arch: &Arch, placements: &[Placement]) -> Result<Vec<String>> {
        self.targets().names_beside(arch, placements).map_err(|error| self.about(error))
    }

    /// As [`Targets::renamed`].
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: it does not fit the model.
    pub(super) fn renamed(&self, arch: &Arch, placements: &[Placement]) -> Result<Vec<(String, String)>> {
        self.targets().renamed(arch, placements).map_err(|error| self.about(error))
    }

    /// Adds the vocabulary's `tables` to `modules_to_save`. If the settings list none of them, embedding and head may share
    /// their matrix.
    pub(super) fn save_whole(&mut self, tables: &[&str]) {
        let lora = &mut self.tuning.lora;
        // GPT-2 has another name for the embedding.
        let is =
            |module: &str, table: &str| module.ends_with(table) || table == "embed_tokens" && module.ends_with("wte");
        let named = |table: &str| lora.modules_to_save.iter().any(|module| is(module, table));
        let more: Vec<String> = tables.iter().filter(|table| !named(table)).map(|&table| table.to_owned()).collect();
        if self.tuning.mode == Mode::Lora && !more.is_empty() {
            lora.ensure_weight_tying |= more.len() == tables.len();
            lora.modules_to_save.extend(more);
        }
    }

    /// Names and shapes of the adapter's tensors on a model.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: it does not fit the model.
    pub fn tensors(&self, arch: &Arch) -> Result<Vec<(String, Vec<usize>)>> {
        let arch = Arch { token_rows: self.token_rows.clone(), ..arch.clone() };
        let tensors = self.targets().tensors(&arch, &self.place(&arch)?);
        tensors.map_err(|error| self.about(error))
    }

    /// Adds what the model trains beside adapters: rows of new tokens (`trainable_token_indices`) and a classification
    /// head.
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn with_tokens(mut self, arch: &Arch) -> Result<Self> {
        self.scores = arch.score.is_some();
        let tensors = self.targets().token_tensors(arch).map_err(|error| self.about(error))?;
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
    /// [`Kind::Checkpoint`]: the file is missing or malformed, or asks for a feature that is not supported; the message
    /// names it.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        refuse_gguf(dir).map_err(|error| error.with_kind(Kind::Checkpoint))?;
        let path = dir.join(ADAPTER_CONFIG);
        let text = read_small(&path)?;
        let mut config = Self::from_json(&text, &path)?;
        config.tie_as_peft(dir);
        Ok(config)
    }

    /// Reads the text of an `adapter_config.json`; `origin` is named in errors.
    ///
    /// # Errors
    /// As [`AdapterConfig::from_dir`].
    pub fn from_json(text: &str, origin: &Path) -> Result<Self> {
        let mut source = match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Source { origin, map },
            Ok(_) => {
                return Err(Error::checkpoint(format!("{}: expected a JSON object", origin.display())).hint(AS_PEFT));
            }
            Err(error) => {
                let message = format!("{}: not valid JSON", origin.display());
                return Err(Error::checkpoint(message)
                    .caused_by(error)
                    .hint("the file is damaged: copy the adapter again"));
            }
        };
        let about = source.kind()?;
        source.refuse_unsupported(about)?;
        if source.get("target_modules").is_none() && !source.strings("target_parameters")?.is_empty() {
            source.map.insert("target_modules".to_owned(), json!([]));
        }
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
            own_names: None,
            wrapped: None,
            kept: Arc::default(),
            untouched: Arc::default(),
            origin: Some(origin.into()),
        })
    }

    /// The adapter's settings as a configuration, to continue its training. Modules have their full names, because a
    /// configuration has no `layers_pattern`. `modules_to_save` that the model does not have are left out. All settings
    /// that are not the adapter's are those of `like`.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: the adapter does not fit the model.
    pub fn settings(&self, arch: &Arch, like: &TuningConfig) -> Result<TuningConfig> {
        let (method, placements) = (self.method()?, self.place(arch)?);
        let mut listed = TuningConfig { mode: self.tuning.mode, ..like.clone() };
        method.list(&placements, &mut listed);
        let idle = self.targets().idle_modules(arch);
        if let Some(saved) = listed.modules_to_save_mut() {
            saved.retain(|module| !idle.contains(module));
        }
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
        if let Some(names) = self.own_names {
            own_names::write(names, &mut fields);
        }
        let on_parameters =
            fields.get("target_parameters").is_some_and(|names| !names.is_null() && *names != json!([]));
        if let Some(modules) = fields.get_mut("target_modules").filter(|names| **names == json!([]) && !on_parameters) {
            *modules = NO_TARGET.into();
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
        // Sorted by name, as PEFT does.
        fields.into_iter().collect::<BTreeMap<_, _>>().into_iter().collect::<Map<_, _>>().into()
    }

    /// The value of `trainable_token_indices`: a list of rows per module, or null.
    fn tokens_json(&self) -> Value {
        let TokenRows { embedding, head } = &self.token_rows;
        let rows = [("embed_tokens", embedding), ("lm_head", head)].into_iter().filter(|(_, rows)| !rows.is_empty());
        let modules: Map<_, _> = rows.map(|(module, rows)| (module.to_owned(), json!(rows))).collect();
        if modules.is_empty() { Value::Null } else { modules.into() }
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
        // The value comes from a configuration, so setting it cannot fail.
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

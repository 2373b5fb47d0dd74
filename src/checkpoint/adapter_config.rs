//! PEFT's `adapter_config.json`. Files of other PEFT versions are read as long as nothing in them changes the numbers
//! in a way that is not computed here; such a feature is refused by its name.
use std::fs;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::peft::CONFIG_FILE;
use crate::Kind;
use crate::config::arch::Arch;
use crate::config::{Bias, Ia3Config, InitLora, LoraConfig, Mode, Patterns, TargetModules, TuningConfig};
use crate::error::{Error, Result};
use crate::model::targets::{Placement, Side, Targets};

/// The version whose fields are written.
const PEFT_VERSION: &str = "0.21.2";
const CONFIG_BYTES: u64 = 4 << 20;

/// An `adapter_config.json`: what decides the adapter's numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// Where adapters go, of which rank and scale.
    pub targets: Targets,
    /// Dropout of the adapter's inputs in training.
    pub lora_dropout: f64,
    /// How A and B started; of no effect once they are stored.
    pub init_lora_weights: Value,
    /// Rows of the embedding, and of a head of its own, that are trained by themselves.
    pub trained_tokens: Vec<u32>,
    /// The tensors with such rows, by PEFT's names (`embed_tokens`, `lm_head`).
    pub token_modules: Vec<String>,
    /// The base model's name or folder.
    pub base_model_name_or_path: Option<String>,
    /// Whether a head of scores belongs to it: PEFT's task `SEQ_CLS`.
    pub scores: bool,
}

/// The modules of a head of scores that PEFT lists in `modules_to_save` of every such adapter, whatever the model has.
const SCORE_MODULES: [&str; 2] = ["classifier", "score"];

impl AdapterConfig {
    /// The configuration of an adapter that a configuration has placed.
    pub fn of(tuning: &TuningConfig, placements: &[Placement], base_model: Option<&str>) -> Self {
        if tuning.mode != Mode::Ia3 {
            return Self::new(&tuning.lora, placements, base_model);
        }
        // By full names, since PEFT wants each of `feedforward_modules` to be one of `target_modules`.
        let names = |wanted: fn(&Placement) -> bool| {
            let named = placements.iter().filter(|placement| wanted(placement));
            TargetModules::List(named.map(|placement| placement.module.clone()).collect())
        };
        let targets = Targets {
            target_modules: names(|_| true),
            exclude_modules: None,
            feedforward: Some(names(|placement| placement.factors == Some(Side::Input))),
            strict: false,
            ..Targets::of(tuning)
        };
        Self {
            targets,
            lora_dropout: 0.0,
            init_lora_weights: Value::Bool(true),
            trained_tokens: Vec::new(),
            token_modules: Vec::new(),
            base_model_name_or_path: base_model.map(Into::into),
            scores: false,
        }
    }

    /// The configuration of an adapter placed by `lora` on `arch`: like PEFT, `auto` is written as full module names.
    pub fn new(lora: &LoraConfig, placements: &[Placement], base_model: Option<&str>) -> Self {
        let mut targets = Targets::from(lora);
        if targets.target_modules == TargetModules::AllLinear {
            targets.target_modules = TargetModules::List(
                placements.iter().filter(|p| p.experts.is_none()).map(|p| p.module.clone()).collect(),
            );
        }
        Self {
            targets: Targets { strict: false, ..targets },
            lora_dropout: lora.lora_dropout,
            init_lora_weights: match lora.init_lora_weights {
                // PEFT would quantize the base again on loading; the values are stored.
                InitLora::Kaiming | InitLora::Loftq => true.into(),
                InitLora::Random => false.into(),
                InitLora::Gaussian => "gaussian".into(),
                InitLora::Pissa => "pissa".into(),
                InitLora::PissaRounds(rounds) => format!("pissa_niter_{rounds}").into(),
            },
            trained_tokens: Vec::new(),
            token_modules: Vec::new(),
            base_model_name_or_path: base_model.map(Into::into),
            scores: false,
        }
    }

    /// With what the model has beside: the rows of new tokens, which PEFT calls `trainable_token_indices`, a head of scores.
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn with_tokens(mut self, arch: &Arch) -> Result<Self> {
        self.scores = arch.score.is_some();
        let tensors = self.targets.token_tensors(arch)?;
        let module = |name: &str| if name.starts_with("lm_head") { "lm_head" } else { "embed_tokens" };
        self.token_modules = tensors.iter().map(|(name, _)| module(name).to_owned()).collect();
        self.trained_tokens = if tensors.is_empty() { Vec::new() } else { arch.new_tokens.clone() };
        Ok(self)
    }

    /// Reads `dir/adapter_config.json`.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: a missing or malformed file, or a feature that is not supported, by its name.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG_FILE);
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
            Ok(_) => return Err(Error::checkpoint(format!("{}: expected a JSON object", origin.display()))),
            Err(error) => return Err(Error::checkpoint(format!("{}: not valid JSON: {error}", origin.display()))),
        };
        source.refuse_unsupported()?;
        let Some(target_modules) = source.modules("target_modules")? else {
            return Err(source.mismatch("target_modules", "a list of names or a regular expression"));
        };
        let (trained_tokens, token_modules) = source.tokens()?;
        let scores = source.get("task_type").is_some_and(|task| task == "SEQ_CLS");
        let mut modules_to_save = source.strings("modules_to_save")?;
        modules_to_save.retain(|module| !scores || !SCORE_MODULES.contains(&module.as_str()));
        Ok(Self {
            trained_tokens,
            token_modules,
            targets: Targets {
                target_modules,
                target_parameters: source.strings("target_parameters")?,
                exclude_modules: source.modules("exclude_modules")?,
                layers_to_transform: source.layers()?,
                layers_pattern: source.strings("layers_pattern")?,
                modules_to_save,
                r: source.rank(source.get("r").unwrap_or(&json!(8)), "r")?,
                lora_alpha: source.positive(source.get("lora_alpha").unwrap_or(&json!(8)), "lora_alpha")?,
                use_rslora: source.flag("use_rslora")?,
                use_dora: source.flag("use_dora")?,
                bias: match source.get("bias").map_or(Some("none"), Value::as_str) {
                    Some("none") => Bias::None,
                    Some("all") => Bias::All,
                    Some("lora_only") => Bias::LoraOnly,
                    _ => return Err(source.mismatch("bias", "none, all or lora_only")),
                },
                rank_pattern: source.patterns("rank_pattern", |value| source.rank(value, "rank_pattern"))?,
                alpha_pattern: source.patterns("alpha_pattern", |value| source.positive(value, "alpha_pattern"))?,
                feedforward: match source.get("peft_type").and_then(Value::as_str) {
                    Some("IA3") => match source.modules("feedforward_modules")? {
                        None => return Err(source.mismatch("feedforward_modules", "a list or a regular expression")),
                        some => some,
                    },
                    _ => None,
                },
                strict: false,
            },
            lora_dropout: match source.get("lora_dropout").map_or(Some(0.0), Value::as_f64) {
                Some(dropout) if (0.0..1.0).contains(&dropout) => dropout,
                _ => return Err(source.mismatch("lora_dropout", "a number from 0 to below 1")),
            },
            init_lora_weights: source.get("init_lora_weights").cloned().unwrap_or(Value::Bool(true)),
            base_model_name_or_path: source.get("base_model_name_or_path").and_then(Value::as_str).map(Into::into),
            scores,
        })
    }

    /// The settings of (IA)³ as a configuration's, to go on training it, with the modules by their full names.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`] where the adapter does not fit the model.
    pub fn ia3_config(&self, arch: &Arch) -> Result<Ia3Config> {
        let placements = self.targets.place(arch).map_err(|error| error.with_kind(Kind::Checkpoint))?;
        let names = |wanted: &dyn Fn(&Placement) -> bool| {
            let named = placements.iter().filter(|placement| wanted(placement));
            named.map(|placement| placement.module.clone()).collect::<Vec<_>>()
        };
        let inputs = names(&|placement| placement.factors == Some(Side::Input));
        Ok(Ia3Config {
            target_modules: Some(TargetModules::List(names(&|_| true))),
            // An empty list would say that a configuration names nothing.
            feedforward_modules: Some(match inputs.as_slice() {
                [] => TargetModules::Regex("^$".into()),
                _ => TargetModules::List(inputs),
            }),
            exclude_modules: None,
            modules_to_save: self.targets.modules_to_save.clone(),
        })
    }

    /// The adapter's settings as a configuration's, to go on training it: where a setting cannot be written there
    /// (`exclude_modules`, `layers_pattern`), the modules are listed by their full names instead.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`] where the adapter does not fit the model.
    pub fn lora_config(&self, arch: &Arch, like: &LoraConfig) -> Result<LoraConfig> {
        let targets = self.targets.clone();
        let placements = targets.place(arch).map_err(|error| error.with_kind(Kind::Checkpoint))?;
        let modules = placements.iter().filter(|placement| placement.experts.is_none());
        let listed = modules.map(|placement| placement.module.clone()).collect();
        let by_name = |value: fn(&Placement) -> f64| {
            placements.iter().map(move |p| (format!("^{}", regex::escape(&p.key)), value(p)))
        };
        #[allow(clippy::needless_update, reason = "settings of training alone are none of an adapter's")]
        Ok(LoraConfig {
            r: targets.r,
            lora_alpha: targets.lora_alpha,
            lora_dropout: self.lora_dropout,
            target_modules: TargetModules::List(listed),
            use_rslora: targets.use_rslora,
            use_dora: targets.use_dora,
            bias: targets.bias,
            exclude_modules: None,
            target_parameters: targets.target_parameters,
            init_lora_weights: match self.init_lora_weights.as_str() {
                Some("pissa") => InitLora::Pissa,
                _ => InitLora::Kaiming,
            },
            rank_pattern: Patterns(
                by_name(|p| p.r as f64).filter(|(_, r)| *r != targets.r as f64).map(|(k, r)| (k, r as usize)).collect(),
            ),
            alpha_pattern: Patterns(by_name(|p| p.alpha).filter(|(_, alpha)| *alpha != targets.lora_alpha).collect()),
            layers_to_transform: None,
            modules_to_save: targets.modules_to_save,
            ..like.clone()
        })
    }

    /// The file's text, with every field that PEFT 0.21 writes.
    pub fn to_json(&self) -> Value {
        let targets = &self.targets;
        let list = |strings: &[String]| if strings.is_empty() { Value::Null } else { json!(strings) };
        let (task, head) = if self.scores { ("SEQ_CLS", &SCORE_MODULES[..]) } else { ("CAUSAL_LM", &[][..]) };
        let saved = head.iter().map(|&module| module.to_owned()).chain(targets.modules_to_save.iter().cloned());
        let saved: Vec<String> = saved.collect();
        if let Some(feedforward) = &targets.feedforward {
            return json!({
                "auto_mapping": null,
                "base_model_name_or_path": self.base_model_name_or_path,
                "exclude_modules": targets.exclude_modules.as_ref().map(modules_json),
                "fan_in_fan_out": false,
                "feedforward_modules": modules_json(feedforward),
                "inference_mode": true,
                "init_ia3_weights": true,
                "modules_to_save": list(&saved),
                "peft_type": "IA3",
                "peft_version": PEFT_VERSION,
                "revision": null,
                "target_modules": modules_json(&targets.target_modules),
                "task_type": task,
            });
        }
        json!({
            "alora_invocation_tokens": null,
            "alpha_pattern": patterns_json(&targets.alpha_pattern, |alpha| number(*alpha)),
            "arrow_config": null,
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model_name_or_path,
            "bias": targets.bias.as_str(),
            "corda_config": null,
            "ensure_weight_tying": false,
            "eva_config": null,
            "exclude_modules": targets.exclude_modules.as_ref().map(modules_json),
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": self.init_lora_weights,
            "kasa_config": null,
            "layer_replication": null,
            "layers_pattern": list(&targets.layers_pattern),
            "layers_to_transform": targets.layers_to_transform,
            "loftq_config": {},
            "lora_alpha": number(targets.lora_alpha),
            "lora_bias": false,
            "lora_dropout": self.lora_dropout,
            "lora_ga_config": null,
            "megatron_config": null,
            "megatron_core": "megatron.core",
            "modules_to_save": list(&saved),
            "monteclora_config": null,
            "peft_type": "LORA",
            "peft_version": PEFT_VERSION,
            "qalora_group_size": 16,
            "r": targets.r,
            "rank_pattern": patterns_json(&targets.rank_pattern, |rank| (*rank).into()),
            "revision": null,
            "target_modules": modules_json(&targets.target_modules),
            "target_parameters": list(&targets.target_parameters),
            "task_type": task,
            "trainable_token_indices": self.tokens_json(),
            "use_bdlora": null,
            "use_dora": targets.use_dora,
            "use_qalora": false,
            "use_rslora": targets.use_rslora,
            "velora_config": null,
        })
    }
}

impl AdapterConfig {
    fn tokens_json(&self) -> Value {
        let modules = self.token_modules.iter().map(|module| (module.clone(), json!(self.trained_tokens)));
        if self.trained_tokens.is_empty() { Value::Null } else { modules.collect::<Map<_, _>>().into() }
    }
}

/// Whole numbers without a point, as PEFT's users write them.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { Value::from(value as i64) } else { value.into() }
}

fn modules_json(modules: &TargetModules) -> Value {
    match modules {
        TargetModules::AllLinear => "all-linear".into(),
        TargetModules::Regex(pattern) => pattern.as_str().into(),
        TargetModules::List(names) => {
            let mut names = names.clone();
            names.sort();
            json!(names)
        }
    }
}

fn patterns_json<T>(patterns: &Patterns<T>, value: impl Fn(&T) -> Value) -> Value {
    patterns.0.iter().map(|(key, item)| (key.clone(), value(item))).collect::<Map<_, _>>().into()
}

/// Features that change the numbers: absent, null, false or empty, or refused.
const UNSUPPORTED: [&str; 13] = [
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "megatron_config",
    "use_qalora",
    "use_bdlora",
    "ensure_weight_tying",
    "nefttune_noise_alpha",
];

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
        Error::checkpoint(format!("{}: {key} is {found}, expected {expected}", self.origin.display()))
    }

    fn refuse(&self, key: &str) -> Error {
        let found = self.map.get(key).unwrap_or(&Value::Null).to_string();
        let found: String = found.chars().take(80).collect();
        Error::checkpoint(format!("{}: not yet: {key} = {found}", self.origin.display()))
            .hint("this version reads LoRA (also DoRA, rsLoRA, rank and alpha patterns, modules_to_save) and (IA)³")
    }

    fn refuse_unsupported(&self) -> Result<()> {
        let one_of = |key: &str, accepted: &[&str]| match self.get(key) {
            Some(value) if !accepted.iter().any(|accepted| value == accepted) => Err(self.refuse(key)),
            _ => Ok(()),
        };
        if self.get("peft_type").is_none() {
            return Err(self.mismatch("peft_type", "\"LORA\" or \"IA3\""));
        }
        one_of("peft_type", &["LORA", "IA3"])?;
        one_of("task_type", &["CAUSAL_LM", "SEQ_CLS"])?;
        // Ways to start that also change the base weights: their adapters fit another base.
        if self.get("init_lora_weights").is_some_and(|init| !init.is_boolean()) {
            one_of("init_lora_weights", &["gaussian", "eva", "orthogonal", "pissa"])?;
        }
        let in_use = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(items) => !items.is_empty(),
            Value::Object(map) => !map.is_empty(),
            _ => true,
        };
        for (key, value) in &self.map {
            let unknown_switch = key.starts_with("use_") && !["use_rslora", "use_dora"].contains(&key.as_str());
            if (UNSUPPORTED.contains(&key.as_str()) || unknown_switch) && in_use(value) {
                return Err(self.refuse(key));
            }
        }
        Ok(())
    }

    fn flag(&self, key: &str) -> Result<bool> {
        self.get(key).map_or(Some(false), Value::as_bool).ok_or_else(|| self.mismatch(key, "true or false"))
    }

    fn rank(&self, value: &Value, key: &str) -> Result<usize> {
        let rank = value.as_u64().filter(|rank| (1..=1 << 16).contains(rank));
        rank.map(|rank| rank as usize).ok_or_else(|| self.mismatch(key, "a rank from 1 to 65536"))
    }

    fn positive(&self, value: &Value, key: &str) -> Result<f64> {
        let found = value.as_f64().filter(|number| *number > 0.0 && number.is_finite());
        found.ok_or_else(|| self.mismatch(key, "a number above 0"))
    }

    /// A string or a list of strings.
    fn strings(&self, key: &str) -> Result<Vec<String>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let strings: Option<Vec<_>> = items.iter().map(|item| item.as_str().map(String::from)).collect();
        strings.ok_or_else(|| self.mismatch(key, "a list of strings"))
    }

    fn modules(&self, key: &str) -> Result<Option<TargetModules>> {
        Ok(match self.get(key) {
            None => None,
            Some(Value::String(word)) if word.eq_ignore_ascii_case("all-linear") => Some(TargetModules::AllLinear),
            Some(Value::String(pattern)) => Some(TargetModules::Regex(pattern.clone())),
            Some(_) => Some(TargetModules::List(self.strings(key)?)),
        })
    }

    /// `trainable_token_indices`: a list for the embedding, or a list a module; all lists alike.
    fn tokens(&self) -> Result<(Vec<u32>, Vec<String>)> {
        let key = "trainable_token_indices";
        let expected = "a list of token ids, the same for embed_tokens and lm_head";
        let list = |value: &Value| -> Option<Vec<u32>> {
            value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
        };
        match self.get(key) {
            None => Ok((Vec::new(), Vec::new())),
            Some(Value::Object(map)) => {
                let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
                let modules: Vec<String> = map.keys().map(|name| last(name)).collect();
                let mut lists = map.values().map(list);
                let first = lists.next().flatten().ok_or_else(|| self.mismatch(key, expected))?;
                let known = modules.iter().all(|name| ["embed_tokens", "lm_head"].contains(&name.as_str()));
                if !known || lists.any(|other| other.as_ref() != Some(&first)) {
                    return Err(self.mismatch(key, expected));
                }
                Ok((first, modules))
            }
            Some(value) => match list(value) {
                Some(tokens) if tokens.is_empty() => Ok((tokens, Vec::new())),
                Some(tokens) => Ok((tokens, vec!["embed_tokens".to_owned()])),
                None => Err(self.mismatch(key, expected)),
            },
        }
    }

    fn layers(&self) -> Result<Option<Vec<usize>>> {
        let key = "layers_to_transform";
        let Some(value) = self.get(key) else { return Ok(None) };
        let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let layers: Option<Vec<_>> = items.iter().map(|item| item.as_u64().map(|layer| layer as usize)).collect();
        layers.map(Some).ok_or_else(|| self.mismatch(key, "block numbers"))
    }

    fn patterns<T>(&self, key: &str, read: impl Fn(&Value) -> Result<T>) -> Result<Patterns<T>> {
        match self.get(key) {
            None => Ok(Patterns(Vec::new())),
            Some(Value::Object(map)) => {
                let pairs = map.iter().map(|(pattern, value)| Ok((pattern.clone(), read(value)?)));
                pairs.collect::<Result<_>>().map(Patterns)
            }
            Some(_) => Err(self.mismatch(key, "an object")),
        }
    }
}

fn read_small(path: &Path) -> Result<String> {
    let fail = |reason: String| Error::checkpoint(format!("{}: {reason}", path.display()));
    let file = fs::File::open(path).map_err(|error| {
        fail(format!("cannot be read: {error}"))
            .hint("an adapter is a folder with adapter_config.json and adapter_model.safetensors, as PEFT writes it")
    })?;
    let mut bytes = Vec::new();
    file.take(CONFIG_BYTES + 1).read_to_end(&mut bytes).map_err(|error| fail(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > CONFIG_BYTES {
        return Err(fail(format!("larger than {CONFIG_BYTES} bytes, expected a small JSON file")));
    }
    String::from_utf8(bytes).map_err(|error| fail(format!("not UTF-8 at byte {}", error.utf8_error().valid_up_to())))
}

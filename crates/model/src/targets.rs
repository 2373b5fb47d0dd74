//! Which linear modules get an adapter, with which rank and scale. The rules are PEFT's, on Hugging Face's names of
//! modules:
//!
//! - `target_modules` as a list: modules whose name is an entry or ends with `.entry`. `auto` (ours) and `all-linear`:
//!   every linear module of the decoder blocks. Any other string: a regular expression that matches the whole name.
//! - routers and experts, which are parameters in Transformers 5 and not modules: `parameters`.
//! - `layers_to_transform`: only those blocks, for modules found by suffix (a full name in the list always counts).
//! - modules below one of `modules_to_save` never get an adapter.
//! - `rank_pattern`, `alpha_pattern`: the first key for which `(.*\.)?(key)$` matches the name.
//! - scale: `alpha / r`, with rsLoRA `alpha / sqrt(r)`.
//! - `feedforward_modules` as a list: a module whose name ends with an entry, dot or not.
mod exclusions;
mod parameters;
mod rules;
mod saved;

use std::collections::{BTreeMap, BTreeSet};

use super::adapters::{self, Method};
pub use super::adapters::{Placement, Ranks, Targets};
use super::names::ends_with_module;
pub use super::names::{is_vocabulary, peft_name, token_rows};
use parameters::Parameter;
use rules::Rules;
use saved::{ends_with, is_saved_of_vision};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::adapters::lora::LoraConfig;
use tunesmith_config::adapters::oft::OftConfig;
use tunesmith_config::arch::{Arch, EMBEDDING, LM_HEAD, LinearSpec};
use tunesmith_config::{Bias, TargetModules, TuningConfig, nearest};

/// Larger than any useful rank. It keeps the rank that a file claims from becoming a huge allocation.
const MAX_RANK: usize = 1 << 16;

impl Targets {
    /// The targets that a configuration's section of `tuning` names.
    pub fn of(tuning: &TuningConfig) -> Self {
        adapters::of(tuning).map_or_else(Self::default, Method::targets)
    }
}

/// The adapters that a configuration asks for, in model order; none where weights of the model itself are trained.
///
/// # Errors
/// As [`Targets::place`].
pub fn placed(arch: &Arch, tuning: &TuningConfig) -> Result<Vec<Placement>> {
    adapters::of(tuning).map_or_else(|| Ok(Vec::new()), |method| place(arch, method))
}

/// The adapters of a kind with these settings, in model order.
///
/// # Errors
/// As [`Targets::place`].
pub fn place(arch: &Arch, method: &dyn Method) -> Result<Vec<Placement>> {
    method.targets().place(arch, method)
}

impl Targets {
    /// The `modules_to_save` that are each trained with a copy of their own, even if they share a matrix: for
    /// [`Arch::separate`]. None with `ensure_weight_tying`.
    pub fn apart(&self) -> &[String] {
        if self.ensure_weight_tying { &[] } else { &self.modules_to_save }
    }

    /// The adapters that `method` puts on these targets, in model order.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: nothing matches (with the nearest names), something matches that cannot have an adapter, or
    /// settings that do not go with each other.
    pub fn place(&self, arch: &Arch, method: &dyn Method) -> Result<Vec<Placement>> {
        if arch.module_names.transposed && self.section == OftConfig::SECTION {
            return Err(Error::config(format!("tuning.oft on {}, on which PEFT takes none", arch.family.model_type))
                .hint("set tuning.mode: lora"));
        }
        let rules = Rules::compile(self, arch)?;
        let of_vision = arch.vision.iter().flat_map(|vision| vision.adapted_linears());
        let of_vision: Vec<Placement> = of_vision.map(|linear| rules.placement(&linear, method, None, 1)).collect();
        if arch.freezes_language() {
            self.check_placed(&of_vision, method)?;
            if self.strict {
                self.refuse_unused_patterns(&of_vision, &rules)?;
            }
            return Ok(of_vision);
        }
        let beyond = self.layers_to_transform.iter().flatten().find(|&&layer| layer >= arch.num_hidden_layers);
        if let Some(layer) = beyond.filter(|_| self.strict) {
            return Err(Error::config(format!(
                "{}.layers_to_transform: there is no block {layer}, expected 0 to {}",
                self.section,
                arch.num_hidden_layers - 1
            )));
        }
        let linears = arch.linear_modules();
        let blocks: Vec<&LinearSpec> = linears.iter().filter(|linear| !linear.is_head()).collect();
        let on_parameters = self.parameters(arch, &rules)?;
        if !matches!(self.target_modules, TargetModules::Auto | TargetModules::AllLinear) {
            let plain: BTreeSet<&str> = blocks.iter().map(|linear| linear.name.as_str()).collect();
            let renamed: BTreeSet<&str> = on_parameters.iter().map(Parameter::module).collect();
            let other = |name: &&String| !plain.contains(name.as_str()) && !renamed.contains(name.as_str());
            if let Some(other) = modules(arch).iter().filter(other).find(|name| rules.targets(name)) {
                return Err(self.unsupported_target(arch, other));
            }
        }
        self.refuse_former(arch, &blocks, &rules)?;
        self.refuse_mamba(arch, &blocks, &rules)?;
        let open = |name: &str| !self.is_former(arch, name) && !self.is_closed(arch, name);
        let has_adapter = |linear: &&&LinearSpec| rules.targets(&linear.name) && open(&linear.name);
        let placed = blocks.iter().filter(has_adapter).map(|linear| rules.placement(linear, method, None, 1));
        let mut placed: Vec<Placement> = placed.collect();
        // The file of an adapter that trains only `modules_to_save` targets no module.
        let names_none = matches!(&self.target_modules, TargetModules::Regex(rule) if rule == adapters::NO_MODULE);
        let whole_alone = names_none && !self.modules_to_save.is_empty();
        let nothing = placed.is_empty() && on_parameters.is_empty() && self.target_parameters.is_empty();
        // The file of an adapter on an image encoder alone names no module of the language model.
        let is_of_vision = |entry: &String| of_vision.iter().any(|placement| placement.module == *entry);
        let names_vision = matches!(&self.target_modules, TargetModules::List(entries) if !entries.is_empty() && entries.iter().all(is_of_vision));
        if nothing && !whole_alone && !names_vision {
            return Err(self.nothing_matches(arch, &blocks));
        }
        self.check_parameters(arch, &placed, &on_parameters)?;
        placed.extend(on_parameters.iter().map(|parameter| parameter.placement(&rules, method)));
        placed.extend(of_vision);
        self.check_placed(&placed, method)?;
        if self.strict {
            self.refuse_unused(arch, &blocks, &placed, &rules)?;
        }
        Ok(placed)
    }

    /// Refuses ranks out of range, and what `method` cannot do on these modules.
    fn check_placed(&self, placed: &[Placement], method: &dyn Method) -> Result<()> {
        let rank = |placement: &Placement| placement.adapter.rank().map_or(1, |rank| rank.r);
        if let Some(large) = placed.iter().find(|placed| !(1..=MAX_RANK).contains(&rank(placed))) {
            let message = format!("rank {} of {}, expected 1 to {MAX_RANK}", rank(large), large.module);
            return Err(Error::config(format!("{}: {message}", self.section)));
        }
        method.check(placed)
    }

    /// Whether an expression matches no module by its name in Transformers, but some by another name: PEFT would then
    /// not find them.
    ///
    /// # Errors
    /// As [`Targets::place`].
    pub fn needs_other_names(&self, arch: &Arch) -> Result<bool> {
        Ok(Rules::compile(self, arch)?.needs_other_names())
    }

    /// Whether PEFT refuses a low-rank adapter on the module: `out_proj` in Nemotron-H, whose kernels read the weight
    /// directly.
    fn is_closed(&self, arch: &Arch, module: &str) -> bool {
        self.ranks.is_some() && arch.family.model_type == "nemotron_h" && last(module) == "out_proj"
    }

    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: such a module is asked for; `auto` leaves them out.
    fn refuse_mamba(&self, arch: &Arch, blocks: &[&LinearSpec], rules: &Rules<'_>) -> Result<()> {
        let asked = |name: &str| self.is_closed(arch, name) && rules.targets(name);
        let found = blocks.iter().map(|linear| linear.name.as_str()).find(|name| asked(name));
        match found.filter(|_| self.target_modules != TargetModules::Auto) {
            Some(name) => Err(Error::config(format!(
                "{}.target_modules: {name} matches, on which PEFT takes no LoRA in {}",
                self.section, arch.family.model_type
            ))
            .hint("set target_modules: auto, or name modules such as [in_proj, q_proj, v_proj, up_proj, down_proj]")),
            None => Ok(()),
        }
    }

    /// The entries of `modules_to_save` that match no module of the model. PEFT's adapters may list some, without
    /// effect.
    pub fn idle_modules(&self, arch: &Arch) -> Vec<String> {
        let modules = modules(arch);
        let idle = |entry: &&String| {
            !modules.iter().any(|name| ends_with(arch, name, entry)) && !is_saved_of_vision(arch, entry)
        };
        self.modules_to_save.iter().filter(idle).cloned().collect()
    }

    /// Whether a matrix that is both embedding and head is trained in full. PEFT's file then holds it under both names.
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn trains_shared(&self, arch: &Arch) -> Result<bool> {
        Ok(arch.ties_head() && self.saved_tensors(arch)?.iter().any(|name| name == EMBEDDING))
    }

    /// The tensors of which single rows are trained (`arch.token_rows`), under their names in an adapter's file, with
    /// the shape of these rows. A table that is trained in full is not among them.
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn token_tensors(&self, arch: &Arch) -> Result<Vec<(String, Vec<usize>)>> {
        if arch.token_rows.is_empty() {
            return Ok(Vec::new());
        }
        if self.strict && arch.naming().is_none() && arch.is_renamed() {
            return Err(Error::config(format!(
                "not yet: rows of tokens of {} beside adapters",
                arch.family.model_type
            ))
            .hint("PEFT would look for them by another name; set tuning.mode: full, or leave out tuning.new_tokens"));
        }
        let saved = self.saved_tensors(arch)?;
        let names = arch.tensors().into_iter().map(|spec| spec.name).filter(|name| !saved.contains(name));
        let rows = names.map(|name| (arch.rows_of(&name).len(), name)).filter(|(rows, _)| *rows > 0);
        Ok(rows.map(|(rows, name)| (token_rows(&name), vec![rows, arch.hidden_size])).collect())
    }

    /// Every trained tensor, with its shape: those of these adapters, and those of [`Targets::beside`].
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn tensors(&self, arch: &Arch, placements: &[Placement]) -> Result<Vec<(String, Vec<usize>)>> {
        let beside = self.beside(arch, placements)?;
        Ok(placements.iter().flat_map(Placement::tensors).chain(beside).collect())
    }

    /// Every trained tensor beside those of adapters, under its name in an adapter's file, with its shape: biases, those
    /// trained in full, rows of new tokens.
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn beside(&self, arch: &Arch, placements: &[Placement]) -> Result<Vec<(String, Vec<usize>)>> {
        let of_vision = arch.vision.iter().flat_map(|vision| vision.trained_tensors());
        let of_vision = of_vision.map(|spec| (spec.name, spec.shape));
        let (saved, biases) = (self.saved_tensors(arch)?, self.biases(arch, placements));
        if saved.is_empty() && biases.is_empty() {
            return Ok(self.token_tensors(arch)?.into_iter().chain(of_vision).collect());
        }
        let sizes: BTreeMap<String, Vec<usize>> =
            arch.tensors().into_iter().map(|spec| (spec.name, spec.shape)).collect();
        let shape = |name: &str| sizes.get(name).cloned().unwrap_or_default();
        let mut tensors: Vec<_> = saved.into_iter().map(|name| (peft_name(&name), shape(&name))).collect();
        let biases = biases.into_iter().map(|(tensor, name)| (name, shape(&tensor)));
        // A bias may belong to a module of `modules_to_save`.
        let biases: Vec<_> = biases.filter(|(name, _)| tensors.iter().all(|(other, _)| other != name)).collect();
        tensors.extend(biases);
        tensors.extend(self.token_tensors(arch)?);
        tensors.extend(of_vision);
        Ok(tensors)
    }

    /// The names that an adapter's file has for the tensors of [`Targets::beside`].
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn names_beside(&self, arch: &Arch, placements: &[Placement]) -> Result<Vec<String>> {
        let head = self.trains_shared(arch)?.then(|| LM_HEAD.to_owned());
        Ok(self.beside(arch, placements)?.into_iter().map(|(name, _)| name).chain(head).collect())
    }

    /// The tensors that are trained beside the adapters and that an adapter's file names differently: biases, routers.
    /// Each with its name in the model, then in the file.
    ///
    /// # Errors
    /// As [`Targets::saved_tensors`].
    pub fn renamed(&self, arch: &Arch, placements: &[Placement]) -> Result<Vec<(String, String)>> {
        let saved = self.saved_tensors(arch)?.into_iter().map(|name| (peft_name(&name), name));
        let other = saved.filter(|(peft, name)| peft != name).map(|(peft, name)| (name, peft));
        Ok(self.biases(arch, placements).into_iter().chain(other).collect())
    }

    /// The biases that are trained, each with its name in the model, then in an adapter's file.
    fn biases(&self, arch: &Arch, placements: &[Placement]) -> Vec<(String, String)> {
        if self.bias == Bias::None || arch.freezes_language() {
            return Vec::new();
        }
        let placed: BTreeSet<&str> = placements.iter().map(|placement| placement.module.as_str()).collect();
        let biases = arch.tensors().into_iter().map(|spec| spec.name);
        let named = biases.filter_map(|name| {
            // Those of routed experts are stacked in Transformers (`down_proj_bias`), and PEFT trains what is called `.bias`.
            let module = name.strip_suffix(".bias").filter(|module| !module.contains(".experts."))?;
            match (self.bias, placed.contains(module)) {
                (Bias::All, false) => Some((name.clone(), name.clone())),
                // PEFT's wrapper of a module with an adapter holds the module itself as `base_layer`.
                (Bias::All | Bias::LoraOnly, true) => Some((name.clone(), format!("{module}.base_layer.bias"))),
                _ => None,
            }
        });
        named.collect()
    }

    fn nothing_matches(&self, arch: &Arch, blocks: &[&LinearSpec]) -> Error {
        let (section, targets) = (self.section, show(&self.target_modules));
        let error = Error::config(format!("{section}.target_modules: no module matches {targets}"));
        if let Some(hint) = self.hint_blocks(arch) {
            return match (&self.target_modules, blocks.first()) {
                (TargetModules::Regex(_), Some(linear)) => {
                    error.hint(format!("an expression must match a whole name, such as {}; {hint}", linear.name))
                }
                _ => error.hint(hint),
            };
        }
        let names = blocks.iter().map(|linear| last(&linear.name)).collect::<BTreeSet<_>>();
        match &self.target_modules {
            TargetModules::Regex(text) if names.contains(text.as_str()) => error.hint(format!(
                "an expression must match a whole name; for the modules whose names end with it, write a list: [{text}]"
            )),
            TargetModules::List(entries) if entries.len() == 1 => hint_nearest(error, &entries[0], names),
            _ => error.hint(format!("linear modules: {}", names.into_iter().collect::<Vec<_>>().join(", "))),
        }
    }

    /// A hint on what to set instead of block numbers in `target_modules`. `None` if it has no block numbers, or if
    /// this kind of adapter has no `layers_to_transform`.
    fn hint_blocks(&self, arch: &Arch) -> Option<String> {
        let numbers_blocks = match &self.target_modules {
            TargetModules::List(entries) => entries.iter().any(|entry| numbers_blocks(entry)),
            TargetModules::Regex(pattern) => numbers_blocks(pattern),
            TargetModules::Auto | TargetModules::AllLinear => false,
        };
        let has_layers = [LoraConfig::SECTION, OftConfig::SECTION].contains(&self.section);
        (numbers_blocks && has_layers).then(|| {
            format!(
                "to adapt some of the blocks 0 to {}, list modules without them, such as [q_proj, v_proj], and set \
                 {}.layers_to_transform: [0]",
                arch.num_hidden_layers.saturating_sub(1),
                self.section
            )
        })
    }

    fn unsupported_target(&self, arch: &Arch, module: &str) -> Error {
        let section = self.section;
        match module {
            "lm_head" | "model.embed_tokens" => {
                let name = last(module);
                let error = Error::config(format!("{section}.target_modules: not yet: an adapter on {name}"));
                if !self.strict {
                    return error.hint("merge the adapter in PEFT (merge_and_unload), and use the result as the model");
                }
                error.hint(format!("train it in full with {section}.modules_to_save: [{name}]"))
            }
            _ if module.ends_with(".mlp.gate") => Error::config(format!(
                "{section}.target_modules: {module} matches, a router, which PEFT knows as a parameter"
            ))
            .hint("with tuning.mode: lora name it in target_parameters: [mlp.gate.weight]"),
            _ => Error::config(format!("{section}.target_modules: {module} matches, which is not a linear module"))
                .hint(
                    self.hint_blocks(arch).unwrap_or_else(|| {
                        "name linear modules only, such as [q_proj, v_proj], or use auto".to_owned()
                    }),
                ),
        }
    }

    /// Refuses entries that have no effect: in a configuration they are typing errors.
    fn refuse_unused(
        &self,
        arch: &Arch,
        blocks: &[&LinearSpec],
        placed: &[Placement],
        rules: &Rules<'_>,
    ) -> Result<()> {
        if let TargetModules::List(entries) = &self.target_modules {
            let former = self.former_names(arch);
            let names: Vec<String> = blocks.iter().flat_map(|linear| arch.names(&linear.name)).collect();
            let is_used = |entry: &str| {
                names.iter().any(|name| ends_with_module(name, entry))
                    || former.iter().any(|name| ends_with_module(name, entry))
                    // Of an adapter's file, those of an image encoder.
                    || placed.iter().any(|placement| placement.module == entry)
            };
            let unused = entries.iter().find(|entry| !is_used(entry));
            if let Some(entry) = unused {
                let section = self.section;
                let error =
                    Error::config(format!("{section}.target_modules: {entry:?} is no linear module of the model"));
                if let Some(hint) = self.hint_blocks(arch).filter(|_| numbers_blocks(entry)) {
                    return Err(error.hint(hint));
                }
                return Err(hint_nearest(error, entry, blocks.iter().map(|linear| last(&linear.name))));
            }
        }
        self.refuse_unused_patterns(placed, rules)
    }

    /// Refuses keys of `rank_pattern` and `alpha_pattern` that match no module with an adapter.
    fn refuse_unused_patterns(&self, placed: &[Placement], rules: &Rules<'_>) -> Result<()> {
        let ranks =
            self.ranks.iter().flat_map(|ranks| ranks.rank_pattern.0.iter().map(|(key, _)| ("rank_pattern", key)));
        let alphas =
            self.ranks.iter().flat_map(|ranks| ranks.alpha_pattern.0.iter().map(|(key, _)| ("alpha_pattern", key)));
        let known: Vec<_> = placed.iter().map(|placement| rules.known_as(&placement.key)).collect();
        let compiled = rules.ranks.iter().map(|(key, _)| key).chain(rules.alphas.iter().map(|(key, _)| key));
        for ((option, written), key) in ranks.chain(alphas).zip(compiled) {
            if !known.iter().any(|names| key.is_key_of(names)) {
                let message = format!("{}.{option}: {written:?} matches no module that has an adapter", self.section);
                return Err(
                    Error::config(message).hint("a key matches the end of a module's name, such as mlp.down_proj")
                );
            }
        }
        Ok(())
    }
}

/// Every module of the model by name: those that own tensors, and those that contain them.
fn modules(arch: &Arch) -> Vec<String> {
    let (mut seen, mut modules) = (BTreeSet::new(), Vec::new());
    let linears = arch.linear_modules().into_iter().map(|linear| linear.name);
    let owners =
        arch.tensors().into_iter().map(|spec| peft_name(spec.name.rsplit_once('.').map_or("", |(module, _)| module)));
    // Experts are parameters in Transformers 5, not modules, whatever their tensors are called on disk.
    for owner in owners.chain(linears).filter(|owner| !owner.contains(".experts.")) {
        let ends = owner.match_indices('.').map(|(at, _)| at).chain([owner.len()]);
        for name in ends.map(|end| &owner[..end]) {
            if seen.insert(name.to_owned()) {
                modules.push(name.to_owned());
            }
        }
    }
    modules
}

/// Whether an entry or an expression names blocks by their numbers, as `layers.0.mlp` and `.*layers\.[01]\..*` do.
fn numbers_blocks(text: &str) -> bool {
    let after = text.split_once("layers").map(|(_, after)| after.strip_prefix('\\').unwrap_or(after));
    after.and_then(|after| after.strip_prefix('.')).is_some_and(|block| !block.is_empty())
}

fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

fn show(modules: &TargetModules) -> String {
    match modules {
        TargetModules::Auto => "auto".into(),
        TargetModules::AllLinear => "all-linear".into(),
        TargetModules::List(entries) => format!("{entries:?}"),
        TargetModules::Regex(pattern) => format!("the expression {pattern:?}"),
    }
}

fn hint_nearest<'n>(error: Error, entry: &str, names: impl IntoIterator<Item = &'n str>) -> Error {
    let names: BTreeSet<&str> = names.into_iter().collect();
    match nearest(entry, names.iter().copied()) {
        Some(name) => error.hint(format!("did you mean {name}?")),
        None => error.hint(format!("known: {}", names.into_iter().collect::<Vec<_>>().join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn biases_of_experts_are_trained_by_no_adapter_as_in_peft() {
        let config = r#"{"model_type": "gpt_oss", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
            "layer_types": ["full_attention"], "attention_bias": true}"#;
        let arch = Arch::from_json(config, Path::new("config.json")).unwrap();
        let modules = TargetModules::List(vec!["q_proj".to_owned()]);
        let lora = LoraConfig { target_modules: modules, bias: Bias::All, ..LoraConfig::default() };
        let placements = place(&arch, &lora).unwrap();
        let mut names = lora.targets().names_beside(&arch, &placements).unwrap();
        names.sort_unstable();
        // Parameters of Transformers' class whose names end in `.bias`; the experts' are `gate_up_proj_bias` and `down_proj_bias`.
        let attention = ["k_proj.bias", "o_proj.bias", "q_proj.base_layer.bias", "v_proj.bias"];
        let expected = attention.map(|name| format!("model.layers.0.self_attn.{name}"));
        assert_eq!(names[0], "model.layers.0.mlp.router.bias");
        assert_eq!(names[1..], expected);
    }

    /// PEFT sees one name of a module, so what an expression excludes by look-ahead is not found under another name.
    #[test]
    fn expressions_match_the_names_of_transformers() {
        let gpt2 = r#"{"model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_layer": 2, "n_head": 2, "n_positions": 8,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}"#;
        let gemma = r#"{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
            "model_type": "gemma3_text", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}}"#;
        let arch = |config: &str| Arch::from_json(config, Path::new("config.json")).unwrap();
        let regex = |text: &str| TargetModules::Regex(text.to_owned());
        let of = |config: &str, lora: &LoraConfig| -> std::result::Result<Vec<String>, String> {
            let placed = place(&arch(config), lora).map_err(|error| error.to_string())?;
            let block =
                |placement: Placement| placement.module["model.layers.".len()..].split('.').next().map(str::to_owned);
            Ok(placed.into_iter().filter_map(block).collect())
        };
        let on =
            |config: &str, text: &str| of(config, &LoraConfig { target_modules: regex(text), ..LoraConfig::default() });
        let blocks = |list: &[&str]| Ok(list.iter().map(|&block| block.to_owned()).collect::<Vec<_>>());
        for (config, text, expected) in [
            (gpt2, r".*\.attn\.c_attn", &["0", "1"][..]),
            (gpt2, r"^(?!transformer\.h\.0\.).*\.attn\.c_attn", &["1"]),
            (gpt2, r".*(?<!\.h\.0)\.attn\.c_attn", &["1"]),
            // The name of the plain language model, where nothing has it in Transformers.
            (gpt2, r"model\.layers\.1\.attn\.c_attn", &["1"]),
            (gemma, r".*q_proj", &["0", "1"]),
            (gemma, r"^(?!model\.language_model\.layers\.0\.).*language_model.*q_proj", &["1"]),
            (gemma, r"^(?!.*language_model\.layers\.0\.).*q_proj", &["1"]),
            (gemma, r"model\.layers\.1\.self_attn\.q_proj", &["1"]),
            (gemma, r"language_model\.model\.layers\.1\.self_attn\.q_proj", &["1"]),
        ] {
            assert_eq!(on(config, text), blocks(expected), "{text}");
        }
        // It excludes all, and is matched with no other name.
        for (config, text) in [(gemma, "^(?!.*language_model).*q_proj"), (gpt2, r"^(?!transformer\.).*c_attn")] {
            assert!(on(config, text).unwrap_err().contains("no module matches"), "{text}");
        }
        let error =
            place(&arch(gpt2), &LoraConfig { target_modules: regex("c_attn"), ..LoraConfig::default() }).unwrap_err();
        assert!(error.hint_text().unwrap().ends_with("write a list: [c_attn]"), "{error:?}");
        let modules = TargetModules::List(vec!["c_attn".to_owned()]);
        for (excluded, expected) in [
            (r"^(?!transformer\.h\.0\.).*c_attn", &["0"][..]),
            (r"transformer\.h\.0\..*", &["1"]),
            (r"model\.layers\.0\..*", &["1"]),
        ] {
            let exclude_modules = Some(regex(excluded));
            let lora = LoraConfig { target_modules: modules.clone(), exclude_modules, ..LoraConfig::default() };
            assert_eq!(of(gpt2, &lora), blocks(expected), "{excluded}");
        }
        for (key, ranks) in [
            (r"^(?!transformer\.h\.0\.).*c_attn", [8, 2]),
            (r"h\.0\.attn\.c_attn", [2, 8]),
            (r"^model\.layers\.0\.attn\.c_attn", [2, 8]),
        ] {
            let rank_pattern = tunesmith_config::Patterns(vec![(key.to_owned(), 2)]);
            let lora = LoraConfig { r: 8, rank_pattern, target_modules: modules.clone(), ..LoraConfig::default() };
            let placed = place(&arch(gpt2), &lora).unwrap();
            let found: Vec<_> = placed.iter().map(|placement| placement.adapter.rank().unwrap().r).collect();
            assert_eq!(found, ranks, "{key}");
        }
        let needs = |text: &str| {
            let lora = LoraConfig { target_modules: regex(text), ..LoraConfig::default() };
            lora.targets().needs_other_names(&arch(gpt2)).unwrap()
        };
        assert!(needs(r"model\.layers\.1\.attn\.c_attn") && !needs(r".*\.attn\.c_attn"));
    }
}

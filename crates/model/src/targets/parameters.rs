//! Adapters on parameters: routers, the stacked matrices of experts, and weights of linear modules, which PEFT finds by
//! `target_parameters`. For `LoRA`, PEFT also knows the names that routers and experts had as modules before
//! Transformers 5. Older adapters and settings use these former names in a list or an expression, and `all-linear`
//! includes them.
//!
//! PEFT 0.21 does so for Mixtral, Qwen3-MoE, and the models that Transformers reads as one of them. The joined matrix
//! of gate and up then has twice the rank and twice the alpha, so that each half may have an update of its own. In such
//! a model, these names no longer mean a dense MLP.
use super::rules::Rules;
use crate::adapters::{Method, Placement, Stacked, Targets};
use crate::names::{ends_with_module, peft_name};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::TargetModules;
use tunesmith_config::arch::{Arch, LinearSpec};

/// A parameter that gets an adapter.
pub(super) struct Parameter {
    /// PEFT's name of it, and its sizes.
    spec: LinearSpec,
    /// What stands before `.lora_A` in an adapter's file.
    wrapper: String,
    experts: Option<Stacked>,
    /// How many modules of Transformers 4 the parameter replaces that were targeted by their former names; 0 where it
    /// was not found by them.
    joined: usize,
}

impl Parameter {
    /// The module that owns it.
    pub(super) fn module(&self) -> &str {
        self.spec.name.rsplit_once('.').map_or("", |(module, _)| module)
    }

    pub(super) fn placement(&self, rules: &Rules<'_>, method: &dyn Method) -> Placement {
        let placed = rules.placement(&self.spec, method, self.experts, self.joined.max(1));
        Placement { module: self.wrapper.clone(), ..placed }
    }
}

/// The former names of a model's router, and of an expert's gate, up and down; none where PEFT does not know them.
fn former(arch: &Arch) -> Option<[&'static str; 4]> {
    match arch.family.model_type {
        "mixtral" | "minimax_m2" => Some(["gate", "w1", "w3", "w2"]),
        "qwen3_moe" | "qwen3_next" | "glm4_moe" | "glm4_moe_lite" | "deepseek_v2" | "deepseek_v3" | "afmoe" => {
            Some(["gate", "gate_proj", "up_proj", "down_proj"])
        }
        _ => None,
    }
}

impl Targets {
    fn former(&self, arch: &Arch) -> Option<[&'static str; 4]> {
        former(arch).filter(|_| self.renames)
    }

    /// The former names of all routers and experts as modules.
    pub(super) fn former_names(&self, arch: &Arch) -> Vec<String> {
        let Some(former) = self.former(arch) else { return Vec::new() };
        let sparse = (0..arch.num_hidden_layers).filter(|&layer| arch.experts_of(layer).is_some());
        let of = |layer| former.map(|name| self.forms(&format!("model.layers.{layer}"), name)).concat();
        sparse.flat_map(of).chain(arch.routers().map(|router| router.name)).collect()
    }

    /// The ways to write a former name in a block. Of an entry in a list, PEFT looks at the last part only.
    fn forms(&self, block: &str, name: &str) -> Vec<String> {
        let feeds = ["mlp", "block_sparse_moe"].map(|feed| format!("{block}.{feed}"));
        let form = |feed: &String| {
            let inside = format!("{feed}.experts.{name}");
            match &self.target_modules {
                _ if name == "gate" => vec![format!("{feed}.{name}")],
                TargetModules::List(_) => vec![inside, format!("{feed}.{name}")],
                _ => vec![inside],
            }
        };
        feeds.iter().flat_map(form).collect()
    }

    /// Whether PEFT would mistake the module for the experts by its name: a dense MLP in a model with experts. PEFT
    /// would load an adapter on it onto all experts, whichever way the module is named, so none is placed there.
    pub(super) fn is_former(&self, arch: &Arch, module: &str) -> bool {
        let last = module.rsplit('.').next().unwrap_or(module);
        self.former(arch).is_some_and(|former| former.contains(&last)) && (self.strict || !self.lists(module))
    }

    /// Whether a list has the module's full name, as adapters that were written before do.
    fn lists(&self, module: &str) -> bool {
        matches!(&self.target_modules, TargetModules::List(entries) if entries.iter().any(|entry| entry == module))
    }

    /// Refuses a dense MLP that is named by itself, where PEFT takes its name for the experts.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`].
    pub(super) fn refuse_former(&self, arch: &Arch, modules: &[&LinearSpec], rules: &Rules<'_>) -> Result<()> {
        let asked = |module: &str| match &self.target_modules {
            TargetModules::Regex(_) => rules.targets(module),
            // The last part of an entry that is longer than that is what PEFT reads.
            TargetModules::List(entries) => {
                let names = |entry: &String| entry.contains("shared_expert") && ends_with_module(module, entry);
                self.lists(module) || entries.iter().any(names)
            }
            _ => false,
        };
        let names = modules.iter().map(|linear| linear.name.as_str());
        let Some(dense) = names.filter(|name| self.strict && self.is_former(arch, name)).find(|name| asked(name))
        else {
            return Ok(());
        };
        Err(Error::config(format!(
            "{}.target_modules: {dense} is a dense MLP, and PEFT reads its name as that of the experts",
            self.section
        ))
        .hint(format!("set target_parameters: [{dense}.weight], without dropout")))
    }

    /// The parameters that get adapters, in model order.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: an entry of `target_parameters` matches nothing, or only half of a joined matrix is named.
    pub(super) fn parameters(&self, arch: &Arch, rules: &Rules<'_>) -> Result<Vec<Parameter>> {
        let mut used = vec![false; self.target_parameters.len()];
        let mut wanted = |full: &str| {
            let hits = self.target_parameters.iter().map(|target| ends_with_module(full, target));
            used.iter_mut().zip(hits).fold(false, |any, (used, hit)| {
                *used |= hit;
                any | hit
            })
        };
        let mut found = Vec::new();
        let linears = arch.linear_modules().into_iter().filter(|linear| !linear.is_head());
        for module in linears {
            let spec = LinearSpec { name: format!("{}.weight", module.name), ..module.clone() };
            if wanted(&spec.name) {
                found.push(Parameter { spec, wrapper: module.name, experts: None, joined: 0 });
            }
        }
        let mut routers = arch.routers().peekable();
        for layer in 0..arch.num_hidden_layers {
            let Some(experts) = arch.experts_of(layer) else { continue };
            let router = routers.next_if(|router| router.layer == Some(layer));
            let block = format!("model.layers.{layer}");
            let (module, hidden) = (format!("{block}.{}", experts.module()), arch.hidden_size);
            let [by_router, by_gate, by_up, by_down] = match self.former(arch) {
                Some(former) => former.map(|name| {
                    let itself = name == former[0] && router.as_ref().is_some_and(|router| rules.names(&router.name));
                    itself || self.forms(&block, name).iter().any(|form| rules.names(form))
                }),
                None => [false; 4],
            };
            if by_gate != by_up {
                let [_, gate, up, _] = former(arch).unwrap_or_default();
                let (there, missing) = if by_gate { (gate, up) } else { (up, gate) };
                return Err(Error::config(format!(
                    "{}.target_modules has {there} and not {missing}, and both are one matrix of each expert",
                    self.section
                ))
                .hint(format!(
                    "name both, or experts by target_parameters; {there} alone is not possible, as in PEFT"
                )));
            }
            let spec = |name: String, out_features, in_features| LinearSpec {
                name,
                out_features,
                in_features,
                bias: false,
                layer: Some(layer),
            };
            if let Some(router) = router {
                let weight = format!("{}.weight", router.name);
                if wanted(&weight) || by_router {
                    let spec = spec(weight, router.out_features, router.in_features);
                    found.push(Parameter { spec, wrapper: router.name, experts: None, joined: 0 });
                }
            }
            let ([before, after], features) = (experts.parameters(), experts.latent.unwrap_or(hidden));
            let rows = if experts.gated { 2 * experts.width } else { experts.width };
            let gate_up = spec(format!("{module}.{before}"), rows, features);
            let down = spec(format!("{module}.{after}"), features, experts.width);
            let (has_gate_up, has_down) = (wanted(&gate_up.name) || by_gate, wanted(&down.name) || by_down);
            // PEFT holds the adapters of a block's two stacked matrices in two wrappers, the outer for the last.
            let stacked = |interleaved| Some(Stacked { count: experts.count, interleaved });
            if has_gate_up {
                let wrapper = if has_down { format!("{module}.base_layer") } else { module.clone() };
                let experts = stacked(experts.is_interleaved());
                found.push(Parameter { spec: gate_up, wrapper, experts, joined: if by_gate { 2 } else { 0 } });
            }
            if has_down {
                let experts = stacked(false);
                found.push(Parameter { spec: down, wrapper: module, experts, joined: 0 });
            }
        }
        match self.target_parameters.iter().zip(used).find(|(_, used)| !used) {
            Some((target, _)) => Err(Error::config(format!(
                "tuning.lora.target_parameters: {target:?} is no parameter of the model that can have an adapter"
            ))
            .hint(match &arch.experts {
                Some(experts) => {
                    let (module, router, [before, after]) = (experts.module(), experts.router_module(), experts.parameters());
                    format!("beside the weights of linear modules there are {module}.{before}, {module}.{after} and {router}.weight")
                }
                None => "name the weights of linear modules, such as self_attn.q_proj.weight".to_owned(),
            })),
            None => Ok(found),
        }
    }

    /// Refuses settings that contradict adapters on parameters.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`].
    pub(super) fn check_parameters(&self, arch: &Arch, placed: &[Placement], parameters: &[Parameter]) -> Result<()> {
        if parameters.is_empty() {
            return Ok(());
        }
        let none = TargetModules::List(Vec::new());
        let narrows = self.exclude_modules.as_ref().is_some_and(|modules| *modules != none)
            || self.layers_to_transform.as_ref().is_some_and(|l| !l.is_empty());
        if self.strict && narrows {
            return Err(Error::config(format!(
                "tuning.lora.target_parameters with exclude_modules or layers_to_transform, which PEFT does not look at for {}",
                parameters[0].spec.name
            ))
            .hint("name the parameters of single blocks, such as layers.0.mlp.experts.down_proj"));
        }
        let saved = self.saved_tensors(arch)?;
        for parameter in parameters {
            let module = parameter.module();
            let twice = placed.iter().any(|placement| placement.module == module);
            if twice || saved.iter().any(|tensor| peft_name(tensor) == parameter.spec.name) {
                let also = if twice { "target_modules" } else { "modules_to_save" };
                return Err(Error::config(format!(
                    "tuning.lora.target_parameters: {} is also trained by {also}",
                    parameter.spec.name
                ))
                .hint("take it out of one of them"));
            }
        }
        Ok(())
    }
}

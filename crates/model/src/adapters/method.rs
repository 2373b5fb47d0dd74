//! The trait of a kind of adapter (LoRA, (IA)³, OFT) with its settings: which modules it is on, and how PEFT's
//! `adapter_config.json` stores it.
use std::fmt::Debug;
use std::sync::Arc;

use serde_json::Value;

use super::adapter::{Adapter, Site, Stacked};
use tunesmith_base::error::Result;
use tunesmith_config::arch::Arch;
use tunesmith_config::{Bias, Mode, Patterns, Section, TargetModules, TuningConfig};

/// What all adapters of one kind have in common, whatever their settings.
#[derive(Debug)]
pub struct About {
    /// The value of `tuning.mode` that chooses this kind.
    pub mode: Mode,
    /// The name of the kind in messages, such as `LoRA`.
    pub title: &'static str,
    /// What its tensors are, in words, for messages.
    pub parts: &'static str,
    /// Its section of the configuration; keys are named as in PEFT.
    pub section: &'static Section,
    /// Keys that affect training only, such as dropout. A run that continues an adapter may change them.
    pub training: &'static [&'static str],
    /// Keys that decide the initial values only, and have no effect after step 1.
    pub starting: &'static [&'static str],
    /// Keys that PEFT does not know, and that `adapter_config.json` therefore leaves out.
    pub ours: &'static [&'static str],
    /// The value of `peft_type` in `adapter_config.json`.
    pub peft_type: &'static str,
    /// What the names of its tensors begin with after the module's name, such as `lora_`.
    pub prefix: &'static str,
    /// The other fields of `adapter_config.json` for this kind, with the values that are supported, as a JSON object.
    /// Keys of `section` and the fields that every kind has are not among them. An adapter whose field has another
    /// value is refused, unless the field is in `indifferent`.
    pub fields: &'static str,
    /// Those of `fields` whose values do not change what the adapter computes.
    pub indifferent: &'static [&'static str],
    /// The values that PEFT assumes for keys that its file leaves out, as a JSON object.
    pub absent: &'static str,
}

/// A kind of adapter with its settings, from the configuration or from PEFT's file.
pub trait Method: Debug {
    /// What all adapters of its kind have in common.
    fn about(&self) -> &'static About;

    /// Which modules get an adapter.
    fn targets(&self) -> Targets;

    /// The adapter that these settings put on a module.
    fn adapter(&self, site: &Site<'_>) -> Arc<dyn Adapter>;

    /// Writes these settings to `tuning`, with every placement listed by its full name. A run that continues from them
    /// then trains the same modules, even if its own rule for words such as `auto` differs.
    fn list(&self, placements: &[Placement], tuning: &mut TuningConfig);

    /// Writes these settings to `tuning` in the form that PEFT's file has them.
    fn write(&self, placements: &[Placement], tuning: &mut TuningConfig);

    /// Refuses settings that contradict each other, or that the placements do not allow.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`].
    fn check(&self, _placements: &[Placement]) -> Result<()> {
        Ok(())
    }

    /// The dropout probability on the adapter's input in training.
    fn dropout(&self) -> f64 {
        0.0
    }

    /// Whether the initialization changes the base's weights, as `PiSSA` does. They are then held in f32, and the
    /// initial values of the adapter are kept ([`crate::Params::start`]).
    fn takes_from_base(&self) -> bool {
        false
    }

    /// What a checkpoint's stamp records of an initialization that changes the base; `None` if the base stays as it is.
    fn start(&self) -> Option<String> {
        None
    }

    /// Converts a field of PEFT's file to the value of the configuration's key of that name; `None` if the value asks
    /// for something that is not supported.
    fn read_field(&self, _key: &str, value: &Value) -> Option<Value> {
        Some(value.clone())
    }

    /// Converts the value of a configuration's key to the field of PEFT's file: the reverse of [`Method::read_field`].
    fn write_field(&self, _key: &str, value: Value) -> Value {
        value
    }
}

/// An adapter on one linear module, or on one parameter of a block's experts.
#[derive(Debug, Clone)]
pub struct Placement {
    /// What stands before `.lora_A` in an adapter's file, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// What patterns match: the module, or on experts the parameter, such as `model.layers.0.mlp.experts.down_proj`.
    pub key: String,
    /// Rows of the base weight.
    pub out_features: usize,
    /// Columns of the base weight.
    pub in_features: usize,
    /// How the parameter holds the matrices of a block's experts; `None` for a linear module.
    pub experts: Option<Stacked>,
    /// Shape and settings of the adapter.
    pub adapter: Arc<dyn Adapter>,
}

impl PartialEq for Placement {
    fn eq(&self, other: &Self) -> bool {
        let tell = |it: &Self| (it.out_features, it.in_features, it.experts, it.adapter.describe());
        (&self.module, &self.key, tell(self)) == (&other.module, &other.key, tell(other))
    }
}

impl Placement {
    /// Whether the adapter is on what PEFT knows as a parameter (`target_parameters`), not as a module.
    pub fn is_on_parameter(&self) -> bool {
        self.key != self.module
    }

    /// The name of the base's tensor that the adapter is on. Not for adapters on experts.
    pub fn weight(&self, arch: &Arch) -> String {
        let weight = format!("{}.weight", self.module);
        match &arch.experts {
            Some(experts) if self.module.ends_with(&format!(".{}", experts.router_module())) => {
                weight.replace(&format!("{}.weight", experts.router_module()), experts.router())
            }
            _ => weight,
        }
    }

    /// The adapter's tensors with their shapes, in PEFT's names without its `base_model.model.`.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let tensors = self.adapter.tensors().into_iter();
        tensors.map(|(end, shape)| (format!("{}.{end}", self.module), shape)).collect()
    }
}

/// The ranks and alphas of a kind of adapter that has them.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranks {
    /// Rank where no pattern says otherwise.
    pub r: usize,
    /// Alpha where no pattern says otherwise.
    pub alpha: f64,
    /// Whether the scale is `alpha / sqrt(r)`, and not `alpha / r` (`use_rslora`).
    pub rslora: bool,
    /// PEFT's `rank_pattern`: ranks of modules that differ from `r`.
    pub rank_pattern: Patterns<usize>,
    /// PEFT's `alpha_pattern`: alphas of modules that differ from `alpha`.
    pub alpha_pattern: Patterns<f64>,
}

/// Everything that decides where adapters go; from a configuration, or from an `adapter_config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct Targets {
    /// The section of the configuration that these settings come from, such as `tuning.lora`, for messages.
    pub section: &'static str,
    /// PEFT's `target_modules`: the modules that get an adapter.
    pub target_modules: TargetModules,
    /// PEFT's `target_parameters`: the experts' matrices, as Transformers 5 holds them.
    pub target_parameters: Vec<String>,
    /// PEFT's `exclude_modules`: modules that never get an adapter.
    pub exclude_modules: Option<TargetModules>,
    /// Whether former names of routers and experts in `target_modules` stand for these parameters: PEFT does so for LoRA.
    pub renames: bool,
    /// PEFT's `layers_to_transform`: only these blocks get adapters; `None` or empty for all blocks.
    pub layers_to_transform: Option<Vec<usize>>,
    /// PEFT's `layers_pattern`: what stands before a block's number in a module's name; empty for any name.
    pub layers_pattern: Vec<String>,
    /// PEFT's `modules_to_save`: modules that are trained in full, beside the adapters.
    pub modules_to_save: Vec<String>,
    /// PEFT's `ensure_weight_tying`: an embedding and a head that share a matrix share it in training too.
    pub ensure_weight_tying: bool,
    /// PEFT's `bias`: which biases of the base are trained.
    pub bias: Bias,
    /// Ranks and scales, where the kind has them.
    pub ranks: Option<Ranks>,
    /// PEFT's `feedforward_modules`, where the kind tells them apart.
    pub feedforward: Option<TargetModules>,
    /// Whether an entry that matches nothing is an error. In a configuration it is a typing error. An adapter that PEFT
    /// wrote may list the names of several architectures.
    pub strict: bool,
}

impl Default for Targets {
    fn default() -> Self {
        Self {
            section: "tuning",
            target_modules: TargetModules::Auto,
            target_parameters: Vec::new(),
            renames: false,
            exclude_modules: None,
            layers_to_transform: None,
            layers_pattern: Vec::new(),
            modules_to_save: Vec::new(),
            ensure_weight_tying: false,
            bias: Bias::None,
            ranks: None,
            feedforward: None,
            strict: true,
        }
    }
}

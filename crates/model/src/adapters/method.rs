//! A kind of adapter with its settings: which modules it is on, and how PEFT's file writes it.
use std::fmt::Debug;
use std::sync::Arc;

use serde_json::Value;

use super::adapter::{Adapter, Site, Stacked};
use tunesmith_base::error::Result;
use tunesmith_config::arch::Arch;
use tunesmith_config::{Bias, Mode, Patterns, Section, TargetModules, TuningConfig};

/// What is the same of all adapters of a kind.
#[derive(Debug)]
pub struct About {
    /// The value of `tuning.mode` that chooses this kind.
    pub mode: Mode,
    /// The name of the kind in messages, such as `LoRA`.
    pub title: &'static str,
    /// What its tensors are, in words.
    pub parts: &'static str,
    /// Its section of the configuration; keys are named as in PEFT.
    pub section: &'static Section,
    /// Keys that shape training alone.
    pub training: &'static [&'static str],
    /// Keys that matter before step 1 alone.
    pub starting: &'static [&'static str],
    /// Keys that PEFT's file does not have.
    pub ours: &'static [&'static str],
    /// The value of `peft_type` in `adapter_config.json`.
    pub peft_type: &'static str,
    /// What the names of its tensors begin with, behind the module's.
    pub prefix: &'static str,
    /// What PEFT's file holds beside the keys of the section and what is in each such file, as a JSON object. Where another
    /// value of a field stands, an adapter is refused, unless one is among `indifferent`.
    pub fields: &'static str,
    /// Of these the fields that change no number.
    pub indifferent: &'static [&'static str],
    /// Keys that PEFT takes to be so where its file leaves them out, as a JSON object.
    pub absent: &'static str,
}

/// The settings of a kind, as the configuration or PEFT's file has them.
pub trait Method: Debug {
    /// What is the same of all of its kind.
    fn about(&self) -> &'static About;

    /// Which modules get an adapter.
    fn targets(&self) -> Targets;

    /// The adapter of a module.
    fn adapter(&self, site: &Site<'_>) -> Arc<dyn Adapter>;

    /// These settings in `tuning`, such that they name these placements one by one: what goes on training may have another
    /// rule for names that are not written out.
    fn list(&self, placements: &[Placement], tuning: &mut TuningConfig);

    /// These settings in `tuning` as PEFT's file has them.
    fn write(&self, placements: &[Placement], tuning: &mut TuningConfig);

    /// Refuses what does not go with each other.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`].
    fn check(&self, _placements: &[Placement]) -> Result<()> {
        Ok(())
    }

    /// The share of its inputs that is zeroed in training.
    fn dropout(&self) -> f64 {
        0.0
    }

    /// Whether weights that it is placed on become others, in f32, and the values of the start are kept for that reason.
    fn takes_from_base(&self) -> bool {
        false
    }

    /// What the stamp of a checkpoint says of a start that the base depends on.
    fn start(&self) -> Option<String> {
        None
    }

    /// A field of PEFT's file as the key of that name has it; nothing where it means what is not computed here.
    fn read_field(&self, _key: &str, value: &Value) -> Option<Value> {
        Some(value.clone())
    }

    /// The key of that name as PEFT's file has it.
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
    /// On a block's experts: how the parameter holds them.
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
    /// Whether PEFT knows what it is on as a parameter (`target_parameters`), not as a module.
    pub fn is_on_parameter(&self) -> bool {
        self.key != self.module
    }

    /// The tensor of the base that it is on, where it is not on experts.
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

/// Ranks and scales of a kind that has them.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranks {
    /// Rank where no pattern says otherwise.
    pub r: usize,
    /// Alpha where no pattern says otherwise.
    pub alpha: f64,
    /// Scale by the root of the rank.
    pub rslora: bool,
    /// PEFT's `rank_pattern`: ranks of modules that differ from `r`.
    pub rank_pattern: Patterns<usize>,
    /// PEFT's `alpha_pattern`: alphas of modules that differ from `alpha`.
    pub alpha_pattern: Patterns<f64>,
}

/// Everything that decides where adapters go; from a configuration, or from an `adapter_config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct Targets {
    /// The section of the configuration that says so.
    pub section: &'static str,
    /// PEFT's `target_modules`: the modules that get an adapter.
    pub target_modules: TargetModules,
    /// PEFT's `target_parameters`: the experts' matrices, as Transformers 5 holds them.
    pub target_parameters: Vec<String>,
    /// PEFT's `exclude_modules`: modules that never get an adapter.
    pub exclude_modules: Option<TargetModules>,
    /// Whether former names of routers and experts in `target_modules` stand for these parameters: PEFT does so for LoRA.
    pub renames: bool,
    /// Only these blocks (none or empty: all).
    pub layers_to_transform: Option<Vec<usize>>,
    /// What stands before the block's number (empty: anything).
    pub layers_pattern: Vec<String>,
    /// Modules that are trained in full.
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

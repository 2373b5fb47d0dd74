//! Kinds of adapters: a file each, with its settings, its formula forward and backward, what it does to a weight that it is
//! merged into, its memory and its names in PEFT's files. A new one is a file and its line in [`tunesmith_base::registry`].
pub mod dora;
mod factors;
pub mod loftq;
pub mod low_rank;
pub mod start;

use std::fmt::Debug;
use std::sync::Arc;

use serde_json::Value;

use super::build::Attach;
use super::grads::Grads;
use super::linear::{Base, Input};
use super::targets::{Placement, Targets};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::LinearSpec;
use tunesmith_config::{Mode, Patterns, Section, TargetModules, TuningConfig};
use tunesmith_ops::panel::Act;
use tunesmith_plan::memory::Footprint;

macro_rules! kinds {
    ($( $module:ident: $settings:ident = $mode:ident, $word:literal $( | $alias:literal ($alias_doc:literal) )?, $doc:literal; )*) => {
        $( pub mod $module; )*

        /// Every kind.
        pub static KINDS: &[&About] = &[$( &$module::ABOUT ),*];

        /// The kind of adapter that is trained, with its settings; none where weights of the model itself are.
        pub fn of(tuning: &TuningConfig) -> Option<&dyn Method> {
            match tuning.mode {
                $( Mode::$mode => Some(&tuning.$module), )*
                Mode::Full | Mode::Freeze => None,
            }
        }
    };
}
tunesmith_base::registry::adapters!(kinds);

/// What is the same of all adapters of a kind.
#[derive(Debug)]
pub struct About {
    /// The value of `tuning.mode`.
    pub mode: Mode,
    /// Its name in messages.
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
    /// PEFT's `peft_type`.
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

/// The rank of an adapter and what its update is scaled by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rank {
    /// The rank.
    pub r: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// `alpha / r` or `alpha / sqrt(r)`.
    pub scale: f32,
}

/// Where an adapter is placed.
#[derive(Debug)]
pub struct Site<'a> {
    /// The linear module; with `experts` one stacked parameter of theirs.
    pub module: &'a LinearSpec,
    /// Its rank, where the kind has ranks.
    pub rank: Rank,
    /// Whether it is one of `feedforward_modules`.
    pub feedforward: bool,
    /// On a block's experts: how many there are.
    pub experts: Option<usize>,
}

/// The adapter of one module: its shape, and what can be done with it.
pub trait Adapter: Debug + Send + Sync {
    /// Its tensors in the order of their values: the end of their names behind the module's, and their shapes.
    fn tensors(&self) -> Vec<(&'static str, Vec<usize>)>;

    /// All that tells it from another on the same module, in a few words.
    fn describe(&self) -> String;

    /// Its rank, if it has one.
    fn rank(&self) -> Option<Rank> {
        None
    }

    /// A fresh one on a module of the model: asks `at` for the base's weight, gives it the values of [`Adapter::tensors`].
    ///
    /// # Errors
    /// The base's weight cannot be read.
    fn attach(&self, at: &mut Attach<'_, '_>) -> Result<Box<dyn Formula>>;

    /// Fresh ones on all experts of a block.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`] where the kind has none.
    fn attach_experts(&self, at: &mut Attach<'_, '_>) -> Result<Vec<Box<dyn Formula>>> {
        Err(Error::config(format!("{}: this kind of adapter has no form for experts", at.module())))
    }

    /// Merges it into a tensor of the base: `tensors` are its values in the order of [`Adapter::tensors`].
    fn merge(&self, tensors: &[&[f32]], part: &Part, values: &mut [f32]);

    /// Whether it changes the base's bias when it is merged.
    fn changes_bias(&self) -> bool {
        false
    }

    /// What it takes of memory.
    fn footprint(&self) -> Arc<dyn Footprint>;
}

/// Which part of a module a tensor of the base is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The bias, not the weight.
    pub bias: bool,
    /// Which expert it is of (0 where there are none).
    pub expert: usize,
    /// The first of its rows among those of the module.
    pub first: usize,
}

/// An adapter at work on a linear module.
pub trait Formula: Debug + Send + Sync {
    /// The output of the module `[tokens, out_features]` for `x [tokens, in_features]`, plus `residual` of that shape if given;
    /// and what [`Formula::backward`] needs again.
    fn forward(&self, base: Base<'_>, x: &Act, residual: Option<&Act>) -> (Act, Option<Saved>);

    /// Adds the gradients of what is trained to `grads`, and that of the input to `dx`, replacing what it holds unless told to
    /// add.
    fn backward(
        &self,
        base: Base<'_>,
        input: &Input<'_>,
        saved: Option<&Saved>,
        dy: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut Grads<'_>,
    );
}

/// What an adapter keeps from forward for backward.
#[derive(Debug)]
pub struct Saved<T = Act> {
    /// Activations, in an order of its own.
    pub acts: Vec<T>,
    /// Numbers of the module, likewise.
    pub numbers: Vec<Vec<f32>>,
}

impl From<Act> for Saved {
    fn from(act: Act) -> Self {
        Self { acts: vec![act], numbers: Vec::new() }
    }
}

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved { acts: self.acts.into_iter().map(f).collect(), numbers: self.numbers }
    }
}

/// What differs from the usual rank and alpha, by name: `rank_pattern` and `alpha_pattern`.
pub fn ranks(placements: &[Placement], r: usize, alpha: f64) -> (Patterns<usize>, Patterns<f64>) {
    let key = |placement: &Placement| format!("^{}", regex::escape(&placement.key));
    let each = || placements.iter().filter_map(|placement| Some((key(placement), placement.adapter.rank()?)));
    let ranks = each().map(|(key, rank)| (key, rank.r)).filter(|(_, rank)| *rank != r);
    let alphas = each().map(|(key, rank)| (key, rank.alpha)).filter(|(_, own)| *own != alpha);
    (Patterns(ranks.collect()), Patterns(alphas.collect()))
}

/// The full names of the modules that have an adapter, without those of parameters.
pub fn names(placements: &[Placement]) -> TargetModules {
    let modules = placements.iter().filter(|placement| !placement.is_on_parameter());
    let names: Vec<String> = modules.map(|placement| placement.module.clone()).collect();
    // A list in a configuration is never empty.
    if names.is_empty() { TargetModules::Regex(NO_MODULE.to_owned()) } else { TargetModules::List(names) }
}

/// A regular expression that matches no name.
pub const NO_MODULE: &str = "^$";

/// The full names of the parameters that have an adapter: experts, routers.
pub fn parameters(placements: &[Placement]) -> Vec<String> {
    let parameters = placements.iter().filter(|placement| placement.is_on_parameter());
    parameters.map(|placement| placement.key.clone()).collect()
}

//! The trait of an adapter on one linear module: the shapes of its tensors, its initial values, and how it is merged
//! into the base.
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::init::Stream;
use crate::linear::Formula;
use crate::quantized_form::How;
use crate::weight::Weight;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Config;
use tunesmith_config::arch::LinearSpec;
use tunesmith_device::{Device, Floats};
use tunesmith_plan::memory::Footprint;

/// The rank of an adapter and what its update is scaled by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rank {
    /// Rows of A and columns of B.
    pub r: usize,
    /// The adapter's `alpha`: the numerator of `scale`.
    pub alpha: f64,
    /// The factor on the update: `alpha / r`, or `alpha / sqrt(r)` with `use_rslora`.
    pub scale: f32,
}

/// Where an adapter is placed: what [`super::Method::adapter`] makes it from.
#[derive(Debug)]
pub struct Site<'a> {
    /// The linear module; where `experts` is set, one stacked parameter of a block's experts.
    pub module: &'a LinearSpec,
    /// Its rank and scale. For a kind of adapter without ranks, `r` is 0 and `scale` is 1.
    pub rank: Rank,
    /// Whether `feedforward_modules` names the module: then the factors of (IA)³ multiply its inputs, not its outputs.
    pub feedforward: bool,
    /// How the parameter holds the matrices of a block's experts; `None` for a linear module.
    pub experts: Option<Stacked>,
}

/// How one parameter holds the matrices of all experts of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stacked {
    /// How many experts there are.
    pub count: usize,
    /// Whether its outputs are gate and up in turn, as in gpt-oss: gate i is output 2i, up i is output 2i + 1.
    pub interleaved: bool,
}

/// The adapter of one module: the shapes of its tensors, and what can be done with them.
pub trait Adapter: Debug + Send + Sync {
    /// Its tensors, in the order in which their values lie. For each: the name after the module's, such as
    /// `lora_A.weight`, and the shape.
    fn tensors(&self) -> Vec<(&'static str, Vec<usize>)>;

    /// A short text of everything that distinguishes it from another adapter on the same module: equal texts mean equal
    /// adapters.
    fn describe(&self) -> String;

    /// Its rank, if it has one.
    fn rank(&self) -> Option<Rank> {
        None
    }

    /// Puts a fresh adapter on a module of the model that is being built. It reads the base's weight from `at`, and
    /// gives `at` the initial values of [`Adapter::tensors`]. Returns what computes the module's output.
    ///
    /// # Errors
    /// The base's weight cannot be read.
    fn attach(&self, at: &mut dyn Attach) -> Result<Box<dyn Formula>>;

    /// As [`Adapter::attach`], for all experts of a block, expert by expert. Where gate and up are interleaved, an
    /// expert gets two: one for its gate and one for its up.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`] where the kind has none.
    fn attach_experts(&self, at: &mut dyn Attach) -> Result<Vec<Box<dyn Formula>>> {
        Err(Error::config(format!("{}: this kind of adapter has no form for experts", at.module())))
    }

    /// Merges the adapter into a tensor of the base, in place. `values` is that tensor, row-major, and `part` says
    /// which part of the module it is. `tensors` are the adapter's values in the order of [`Adapter::tensors`].
    fn merge(&self, tensors: &[&[f32]], part: &Part, values: &mut [f32]);

    /// Whether it changes the base's bias when it is merged.
    fn changes_bias(&self) -> bool {
        false
    }

    /// What it needs of memory and computation beside the base and its own trained values.
    fn footprint(&self) -> Arc<dyn Footprint>;
}

/// Which part of a module a tensor of the base is: the whole weight, the bias, or one expert's rows of a stacked
/// parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The bias, not the weight.
    pub bias: bool,
    /// The expert that it belongs to (0 where there are no experts).
    pub expert: usize,
    /// The row of the module that is the first row of this tensor.
    pub first: usize,
    /// How many rows of the module further on the next row of this tensor is; 1 where they follow each other.
    pub step: usize,
}

/// A module of a model that is being built, as a fresh adapter sees it.
pub trait Attach {
    /// The name of the module, such as `model.layers.0.self_attn.q_proj`.
    fn module(&self) -> &str;

    /// A number that no other module with an adapter has. It tells the module's dropout masks from those of others.
    fn number(&self) -> u64;

    /// The configuration that the model is built from.
    fn config(&self) -> &Config;

    /// The name of the module's weight.
    fn weight_name(&self) -> String {
        format!("{}.weight", self.module())
    }

    /// The name of the adapter's tensor `index`, in the order of [`Adapter::tensors`].
    fn tensor_name(&self, index: usize) -> String;

    /// The random numbers that the tensor `name` starts with. They depend on that name and `train.seed` only.
    fn stream(&self, name: &str) -> Stream {
        Stream::new(self.config().train.seed, name)
    }

    /// How the module's weight is to be quantized, if it is.
    fn how(&self) -> Option<How>;

    /// The module's weight `[out_features, in_features]` in f32, before it is quantized.
    ///
    /// # Errors
    /// The weight cannot be read.
    fn values(&self) -> Result<Vec<f32>>;

    /// The module's weight as the model holds it (perhaps quantized), and the buffer of trained values, where the
    /// weight lies if it is trained itself.
    ///
    /// # Errors
    /// The weight cannot be read.
    fn base(&mut self) -> Result<(&Weight, Floats<'_>)>;

    /// Replaces the module's weight, for initializations that change the base (`PiSSA`, `LoftQ`).
    ///
    /// # Errors
    /// Its bias cannot be read.
    fn replace(&mut self, weight: Weight) -> Result<()>;

    /// The device that the model is built on. On a device that only counts, [`Attach::push`] does not look at the
    /// values.
    fn device(&self) -> Device;

    /// Sets the values that the adapter's next tensor starts with. Returns its place among the trained values.
    ///
    /// # Errors
    /// The base, whose values come first, cannot be read; [`tunesmith_base::Kind::Model`]: the tensor has another
    /// number of values.
    fn push(&mut self, values: &[f32]) -> Result<Range<usize>>;
}

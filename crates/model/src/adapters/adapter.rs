//! The adapter of one module: its shape, how it starts, and how it is merged.
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
    /// On a block's experts: how the parameter holds them.
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
    fn attach(&self, at: &mut dyn Attach) -> Result<Box<dyn Formula>>;

    /// Fresh ones on all experts of a block, expert by expert; where gate and up are interleaved, one on each of them.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`] where the kind has none.
    fn attach_experts(&self, at: &mut dyn Attach) -> Result<Vec<Box<dyn Formula>>> {
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
    /// The first of its rows among those of the module, and how many further on the next is.
    pub first: usize,
    /// See `first`; 1 where they follow each other.
    pub step: usize,
}

/// A module of a model that is being built, as a fresh adapter sees it.
pub trait Attach {
    /// The name of the module, such as `model.layers.0.self_attn.q_proj`.
    fn module(&self) -> &str;

    /// A number that no other module has.
    fn number(&self) -> u64;

    /// The configuration that the model is built from.
    fn config(&self) -> &Config;

    /// The name of the module's weight.
    fn weight_name(&self) -> String {
        format!("{}.weight", self.module())
    }

    /// The name of the adapter's tensor `index`, in the order of [`Adapter::tensors`].
    fn tensor_name(&self, index: usize) -> String;

    /// The random numbers of a tensor of this name.
    fn stream(&self, name: &str) -> Stream {
        Stream::new(self.config().train.seed, name)
    }

    /// How the module's weight is to be quantized, if it is.
    fn how(&self) -> Option<How>;

    /// The module's weight `[out_features, in_features]` in f32, before it is quantized.
    ///
    /// # Errors
    /// It cannot be read.
    fn values(&self) -> Result<Vec<f32>>;

    /// The module's weight as it is kept, and the trained values, in case it is among them.
    ///
    /// # Errors
    /// It cannot be read.
    fn base(&mut self) -> Result<(&Weight, Floats<'_>)>;

    /// Gives the module another weight.
    ///
    /// # Errors
    /// Its bias cannot be read.
    fn replace(&mut self, weight: Weight) -> Result<()>;

    /// Where the model is built; values given to [`Attach::push`] on the meta device are not looked at.
    fn device(&self) -> Device;

    /// Sets the values that the adapter's next tensor starts with. Returns its place among the trained values.
    ///
    /// # Errors
    /// The base cannot be read, whose values come first; [`tunesmith_base::Kind::Model`]: the tensor has another number of
    /// values.
    fn push(&mut self, values: &[f32]) -> Result<Range<usize>>;
}

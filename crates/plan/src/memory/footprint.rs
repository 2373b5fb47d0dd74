//! The activations that adapters need, one implementation of [`Footprint`] for each kind. An implementation takes
//! buffers from a pool and gives them back in the same order as the adapter's code in `model::adapters`.
use std::fmt::Debug;

use super::pool::{Activation, LANES, Pool};

/// The sizes of a linear module, and what of it takes part in training.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Output features: rows of its weight.
    pub out: u64,
    /// Input features: columns of its weight.
    pub inputs: u64,
    /// Whether its weight is trained in full.
    pub trained: bool,
    /// Whether adapters apply dropout to their inputs.
    pub dropout: bool,
}

/// A transposed copy of a module's input, which several gradients of weights use.
#[derive(Debug, Default)]
pub struct Input(Option<Activation>);

impl Input {
    /// As [`Input::take`], but only where the module's weight is trained.
    pub fn transpose(&mut self, pool: &mut Pool, shape: &Shape) {
        if shape.trained {
            self.take(pool, shape);
        }
    }

    /// Takes the copy, unless another module has taken it.
    pub fn take(&mut self, pool: &mut Pool, shape: &Shape) {
        if self.0.is_none() {
            self.0 = Some(pool.take(padded(shape.inputs)));
        }
    }

    /// Gives the copy back, if it was taken.
    pub fn give(self, pool: &mut Pool) {
        pool.give_all(self.0);
    }
}

/// Features rounded up to whole blocks of [`LANES`], as a transposed copy has them.
pub const fn padded(features: u64) -> u64 {
    features.next_multiple_of(LANES)
}

/// The memory of one kind of adapter on a linear module.
pub trait Footprint: Debug + Send + Sync {
    /// Walks the forward pass; returns the module's output, and the activations that are saved for the backward pass.
    fn forward(&self, pool: &mut Pool, shape: &Shape) -> (Activation, Vec<Activation>);

    /// Walks the backward pass: takes what the gradients need, and gives it back. `want_dx`: the input's gradient is
    /// needed.
    fn backward(&self, pool: &mut Pool, shape: &Shape, input: &mut Input, want_dx: bool);

    /// Numbers of the adapter that each token is multiplied with, which FLOPs are counted by.
    fn numbers(&self, shape: &Shape) -> u64;

    /// Bytes that the adapter holds all the time beside its trained values.
    fn constants(&self, _shape: &Shape) -> u64 {
        0
    }

    /// Rows of a matrix that the adapter multiplies as if they were tokens: a pass needs room for as many.
    fn rows(&self) -> u64 {
        0
    }
}

/// LoRA: A `[rank, inputs]` and B `[out, rank]`, with or without `DoRA`'s magnitudes `[out]`.
#[derive(Debug, Clone, Copy)]
pub struct LowRank {
    /// Rows of A, columns of B.
    pub rank: u64,
    /// Whether there are magnitudes (`DoRA`).
    pub magnitudes: bool,
}

impl Footprint for LowRank {
    fn forward(&self, pool: &mut Pool, shape: &Shape) -> (Activation, Vec<Activation>) {
        let y = pool.take(shape.out);
        let low = pool.take(self.rank);
        let dropped = shape.dropout.then(|| pool.take(shape.inputs));
        let direction = self.magnitudes.then(|| {
            let direction = pool.take(shape.out);
            pool.pass(shape.dropout.then_some(shape.inputs));
            pool.pass([shape.inputs, shape.out, self.rank]);
            direction
        });
        pool.give_all(dropped);
        (y, [low].into_iter().chain(direction).collect())
    }

    fn backward(&self, pool: &mut Pool, shape: &Shape, input: &mut Input, want_dx: bool) {
        let dropped = shape.dropout.then(|| pool.take(shape.inputs));
        let dv = self.magnitudes.then(|| pool.take(shape.out));
        let d_low = pool.take(self.rank);
        pool.pass([padded(self.rank)]);
        pool.pass([padded(self.rank)]);
        pool.give_all(dropped);
        input.transpose(pool, shape);
        if want_dx && shape.dropout {
            let through = pool.take(shape.inputs);
            pool.pass(dv.as_ref().map(|_| shape.out));
            pool.pass([shape.inputs]);
            pool.give(through);
        }
        pool.give(d_low);
        pool.give_all(dv);
    }

    fn numbers(&self, shape: &Shape) -> u64 {
        self.rank * (shape.out + shape.inputs)
    }

    /// 16 bytes an output: the squared norm of the base's row in f64, and a step's norm and gain in f32.
    fn constants(&self, shape: &Shape) -> u64 {
        if self.magnitudes { 16 * shape.out } else { 0 }
    }

    /// `DoRA` multiplies the rows of A to find norms.
    fn rows(&self) -> u64 {
        if self.magnitudes { self.rank } else { 0 }
    }
}

/// (IA)³: a factor for each input feature, or else for each output feature.
#[derive(Debug, Clone, Copy)]
pub struct Factors {
    /// Whether the factors belong to input features.
    pub inputs: bool,
}

impl Footprint for Factors {
    fn forward(&self, pool: &mut Pool, shape: &Shape) -> (Activation, Vec<Activation>) {
        if self.inputs {
            let scaled = pool.take(shape.inputs);
            let y = pool.take(shape.out);
            pool.give(scaled);
            return (y, Vec::new());
        }
        let kept = pool.take(shape.out);
        (pool.take(shape.out), vec![kept])
    }

    fn backward(&self, pool: &mut Pool, shape: &Shape, _input: &mut Input, _want_dx: bool) {
        let width = if self.inputs { shape.inputs } else { shape.out };
        let scaled = (self.inputs && shape.trained).then(|| pool.take(shape.inputs));
        let scaled_gradient = pool.take(width);
        pool.pass(shape.trained.then_some(padded(shape.inputs)));
        pool.give(scaled_gradient);
        pool.give_all(scaled);
    }

    fn numbers(&self, shape: &Shape) -> u64 {
        if self.inputs { shape.inputs } else { shape.out }
    }
}

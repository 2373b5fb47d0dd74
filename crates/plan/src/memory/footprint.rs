//! What adapters take of memory: each kind's of its own, in terms of what it takes from a pool and gives back on a linear
//! module, in the order in which its formula in `model::adapters` does.
use std::fmt::Debug;

use super::pool::{Act, LANES, Pool};

/// A linear module as memory sees it.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Rows of its weight.
    pub out: u64,
    /// Columns of its weight.
    pub inputs: u64,
    /// Its weight is trained in full.
    pub trained: bool,
    /// Adapters' inputs are dropped in part.
    pub dropout: bool,
}

/// A transposed copy of a module's input, which products with it share.
#[derive(Debug, Default)]
pub struct Input(Option<Act>);

impl Input {
    /// Takes the copy where the module's weight is trained, unless another module has.
    pub fn transpose(&mut self, pool: &mut Pool, shape: &Shape) {
        if shape.trained {
            self.take(pool, shape);
        }
    }

    /// Takes the copy, unless another module has.
    pub fn take(&mut self, pool: &mut Pool, shape: &Shape) {
        if self.0.is_none() {
            self.0 = Some(pool.take(padded(shape.inputs)));
        }
    }

    /// Gives it back.
    pub fn give(self, pool: &mut Pool) {
        pool.give_all(self.0);
    }
}

/// Features padded to whole blocks, as a transposed copy has them.
pub const fn padded(features: u64) -> u64 {
    features.next_multiple_of(LANES)
}

/// What an adapter on a linear module takes.
pub trait Footprint: Debug + Send + Sync {
    /// The output, and what waits for the backward pass.
    fn forward(&self, pool: &mut Pool, shape: &Shape) -> (Act, Vec<Act>);

    /// Takes what the gradients need, and gives it back.
    fn backward(&self, pool: &mut Pool, shape: &Shape, input: &mut Input, want_dx: bool);

    /// Numbers that each token is multiplied with, beside the base's weight.
    fn numbers(&self, shape: &Shape) -> u64;

    /// Bytes that it holds beside trained values all the time.
    fn constants(&self, _shape: &Shape) -> u64 {
        0
    }

    /// Rows of a matrix that take part as tokens.
    fn rows(&self) -> u64 {
        0
    }
}

/// LoRA's A and B, with or without `DoRA`'s magnitudes.
#[derive(Debug, Clone, Copy)]
pub struct LowRank {
    /// Rows of A.
    pub rank: u64,
    /// Magnitudes beside them.
    pub magnitudes: bool,
}

impl Footprint for LowRank {
    fn forward(&self, pool: &mut Pool, shape: &Shape) -> (Act, Vec<Act>) {
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

    /// Squares of the base's rows in f64; norms and gains that a step keeps beside.
    fn constants(&self, shape: &Shape) -> u64 {
        if self.magnitudes { 16 * shape.out } else { 0 }
    }

    /// A's, where norms are found.
    fn rows(&self) -> u64 {
        if self.magnitudes { self.rank } else { 0 }
    }
}

/// (IA)³: a factor for each input, or else for each output.
#[derive(Debug, Clone, Copy)]
pub struct Factors {
    /// For each input.
    pub inputs: bool,
}

impl Footprint for Factors {
    fn forward(&self, pool: &mut Pool, shape: &Shape) -> (Act, Vec<Act>) {
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

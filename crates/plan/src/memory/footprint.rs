//! The memory of adapters in addition to their trained values, and how much they compute: one implementation of
//! [`Footprint`] for each kind of adapter.
use std::fmt::Debug;

/// The size of a linear module.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Output features: rows of its weight.
    pub out: u64,
    /// Input features: columns of its weight.
    pub inputs: u64,
}

/// The memory of one kind of adapter on a linear module.
pub trait Footprint: Debug + Send + Sync {
    /// How many weights of the adapter each token is multiplied with, for FLOPs.
    fn numbers(&self, shape: &Shape) -> u64;

    /// Bytes that the adapter always holds in addition to its trained values.
    fn constants(&self, _shape: &Shape) -> u64 {
        0
    }

    /// Rows of a matrix that the adapter multiplies as if they were tokens. The buffers of a pass need room for as
    /// many.
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
    fn numbers(&self, shape: &Shape) -> u64 {
        self.rank * (shape.out + shape.inputs)
    }

    /// 16 bytes for each output feature: the squared norm of the base's row in f64, and a step's norm and gain in f32.
    fn constants(&self, shape: &Shape) -> u64 {
        if self.magnitudes { 16 * shape.out } else { 0 }
    }

    /// `DoRA` multiplies the rows of A to compute norms.
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
    fn numbers(&self, shape: &Shape) -> u64 {
        if self.inputs { shape.inputs } else { shape.out }
    }
}

//! Dropout: `x / (1 - rate)` where a value is kept, 0 where it is dropped. Srivastava et al., 2014.
//!
//! The mask depends only on seed, step, module, row and feature, not on the state of a random generator. So activation
//! checkpointing, resuming, or splitting a step into other micro-batches gives the same mask.
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// The dropout mask of one module in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout<'a> {
    /// The probability that a value is dropped, in 0..1.
    pub rate: f32,
    /// Seed, step and module, mixed by [`key`].
    pub key: u64,
    /// The number of the first token's row within the step.
    pub first_row: u64,
    /// Which tokens of the pass the rows are; `None` means all, in order.
    pub rows: Option<&'a [usize]>,
}

/// `SplitMix64`'s finalizer (Steele, Lea and Flood, 2014).
pub(crate) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The key of the mask of `module` in `step` of a run with `seed`.
pub const fn key(seed: u64, step: u64, module: u64) -> u64 {
    mix(mix(mix(seed).wrapping_add(step)).wrapping_add(module))
}

impl Dropout<'_> {
    /// Returns `x [tokens, features]` with the mask applied, in memory of the same pool. Applied to the gradient of its
    /// result, it is the backward pass.
    #[must_use]
    pub fn apply(&self, x: &Activation) -> Activation {
        let mut out = x.like();
        match x.device() {
            Device::Cpu => cpu::apply(self, x, &mut out),
            Device::Cuda(_) => cuda::apply(self, x, &mut out),
            Device::Meta => {}
        }
        out
    }
}

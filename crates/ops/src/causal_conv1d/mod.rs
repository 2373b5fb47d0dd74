//! The short causal depthwise convolution of Mamba 2 and the gated delta rule, over the tokens of each sequence, as
//! `causal_conv1d` computes it (<https://github.com/Dao-AILab/causal-conv1d>):
//! `z[t, c] = bias[c] + sum_j weight[c, kernel - 1 - j] x[t - j, c]`, over the taps `j < kernel` whose token `t - j` is
//! in the sequence of `t`. Then `y = z`, or `y = silu(z)`.
//!
//! Tokens before a sequence's first count as zeros, so that packed sequences do not see each other.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::{Floats, FloatsMut};
use std::ops::Range;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// The most taps that a kernel has.
pub const MAX_KERNEL: usize = 16;

/// The weights of a convolution.
#[derive(Debug, Clone, Copy)]
pub struct Conv<'a> {
    /// `[channels, kernel]`: the last weight of a channel is for the token itself.
    pub weight: Floats<'a>,
    /// `[channels]`, added to each channel; `None` for no bias.
    pub bias: Option<Floats<'a>>,
    /// Whether the result is `silu(z)` and not `z`.
    pub silu: bool,
}

impl Conv<'_> {
    /// The number of taps, for that many channels. Panics if the weights do not fit.
    fn kernel(&self, channels: usize) -> usize {
        let kernel = self.weight.len() / channels.max(1);
        assert_eq!(self.weight.len(), channels * kernel, "a kernel for each channel");
        assert!((1..=MAX_KERNEL).contains(&kernel), "a kernel of 1 to {MAX_KERNEL} taps");
        assert!(self.bias.is_none_or(|bias| bias.len() == channels), "a bias for each channel");
        kernel
    }
}

/// Each token's position in its sequence. The sequences have to lie end to end.
fn positions(sequences: &[Range<usize>], tokens: usize) -> Vec<u32> {
    let positions: Vec<u32> = sequences.iter().flat_map(|sequence| 0..sequence.len() as u32).collect();
    assert_eq!(positions.len(), tokens, "each token is in a sequence");
    positions
}

/// `y [tokens, channels]` of `x [tokens, channels]`. `sequences` are the token ranges of the sequences, which lie end
/// to end.
///
/// # Panics
/// If the shapes do not fit.
pub fn forward(conv: Conv<'_>, x: &Activation, sequences: &[Range<usize>]) -> Activation {
    let kernel = conv.kernel(x.features());
    let mut out = x.like();
    if !x.is_meta() {
        let positions = positions(sequences, x.tokens());
        match x.device() {
            Device::Cpu => cpu::forward(conv, kernel, x, &positions, &mut out),
            Device::Cuda(_) => cuda::forward(conv, kernel, x, &positions, &mut out),
            Device::Meta => {}
        }
    }
    out
}

/// The gradients of `x` and `z`, from `dy [tokens, channels]`, the gradient of [`forward`]'s result. Adds the gradient
/// of the weights to `d_weight [channels, kernel]` if given. The gradient of the bias is the sum of `dz` over tokens.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(
    conv: Conv<'_>,
    x: &Activation,
    dy: Activation,
    sequences: &[Range<usize>],
    d_weight: Option<FloatsMut<'_>>,
) -> (Activation, Activation) {
    assert_eq!((x.tokens(), x.features()), (dy.tokens(), dy.features()), "both have one shape");
    let kernel = conv.kernel(x.features());
    assert!(d_weight.as_ref().is_none_or(|d| d.len() == conv.weight.len()), "a gradient for each weight");
    let (mut dx, mut dz) = (x.like(), dy);
    if x.is_meta() {
        return (dx, dz);
    }
    let positions = positions(sequences, x.tokens());
    match x.device() {
        Device::Cpu => {
            if conv.silu {
                cpu::silu_backward(conv, kernel, x, &positions, &mut dz);
            }
            cpu::input_backward(conv.weight.cpu_slice(), kernel, &dz, &positions, &mut dx);
            if let Some(d_weight) = d_weight {
                cpu::weight_backward(kernel, x, &dz, &positions, d_weight.cpu_slice());
            }
        }
        Device::Cuda(_) => cuda::backward(conv, kernel, x, &mut dz, &positions, &mut dx, d_weight),
        Device::Meta => {}
    }
    (dx, dz)
}

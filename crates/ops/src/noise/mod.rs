//! `NEFTune`: uniform noise on the embeddings, `x[t, j] = x[t, j] + bound u` with `u` in -1..1 (Jain et al., 2023,
//! <https://arxiv.org/abs/2310.05914>). Like the masks of [`crate::dropout`], it depends only on key, row and feature.
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// Adds noise from `-bound..bound` to each value of a sequence of `length` tokens, where
/// `bound = alpha / sqrt(length * features)`. `x` is `[tokens, features]`; sequence i has the tokens
/// `cu_seqlens[i]..cu_seqlens[i + 1]`. `key` comes from [`crate::dropout::key`]. Row `first_row + t` of the step has
/// the same noise however the step is divided into passes. The gradient passes through unchanged.
pub fn add(x: &mut Activation, cu_seqlens: &[usize], alpha: f64, key: u64, first_row: u64) {
    let features = x.features();
    let bound = |length: usize| (alpha / ((length * features) as f64).sqrt()) as f32;
    let lengths = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
    let bounds: Vec<f32> = lengths.flat_map(|length| std::iter::repeat_n(bound(length), length)).collect();
    match x.device() {
        Device::Cpu => cpu::add(x, &bounds, key, first_row),
        Device::Cuda(_) => cuda::add(x, &bounds, key, first_row),
        Device::Meta => {}
    }
}

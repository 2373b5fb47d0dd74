//! `GroupNorm` of one picture, as `torch.nn.functional.group_norm` computes it:
//! `h = (x - mean) / sqrt(var + eps) * weight + bias`, with mean and variance over all places (tokens) and the features
//! of a group. Wu and He, "Group Normalization", 2018, <https://arxiv.org/abs/1803.08494>. Forward only: the encoders
//! that make latents are frozen.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::Floats;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// Normalizes `x [places, groups * n]`; `weight` and `bias` are `[groups * n]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn forward(x: &Activation, groups: usize, eps: f32, weight: Floats<'_>, bias: Floats<'_>) -> Activation {
    assert!(x.features().is_multiple_of(groups), "whole groups");
    assert_eq!([weight.len(), bias.len()], [x.features(); 2], "a weight and a bias for each feature");
    let mut out = x.like();
    match x.device() {
        Device::Cpu => cpu::forward(x, groups, eps, [weight.cpu_slice(), bias.cpu_slice()], &mut out),
        Device::Cuda(_) => cuda::forward(x, groups, eps, [weight, bias], &mut out),
        Device::Meta => {}
    }
    out
}

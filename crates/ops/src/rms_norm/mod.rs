//! `RMSNorm`: `h = x / sqrt(mean(x^2) + eps) * (weight + offset)`, over all features of a token, or over those of each
//! head (Qwen3's q and k). Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019,
//! <https://arxiv.org/abs/1910.07467>.
//!
//! Features are `groups * dim`, and each group has its own mean. All groups share one weight `[dim]`, or each has its
//! own, `[groups * dim]` (Mamba 2).
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::{Floats, FloatsMut};
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// What a normalized token is multiplied by.
#[derive(Debug, Clone, Copy)]
pub struct Gain<'a> {
    /// The weight: `[dim]` for all groups, or `[groups * dim]`.
    pub weight: Floats<'a>,
    /// Added to each weight: 1 for Gemma, whose weights are stored as differences from 1, else 0.
    pub offset: f32,
}

/// Asserts that there is a weight for each feature of a group, or for each feature of all groups.
fn check_weights(x: &Activation, rstd: &Activation, weights: usize) {
    let own = weights == x.features();
    assert!(own || x.features() == rstd.features() * weights, "a weight for each feature");
}

/// `rstd = 1 / sqrt(mean(x^2) + eps)` of each token and group: `[tokens, groups]`, for `x [tokens, groups * dim]`.
///
/// # Panics
/// If `groups` does not divide the features.
pub fn stats(x: &Activation, groups: usize, eps: f32) -> Activation {
    assert!(x.features().is_multiple_of(groups), "whole groups");
    let mut out = x.pool().act_f32(x.tokens(), groups);
    match x.device() {
        Device::Cpu => cpu::stats(x, eps, &mut out),
        Device::Cuda(_) => cuda::stats(x, eps, &mut out),
        Device::Meta => {}
    }
    out
}

/// `h = x * rstd * (weight + offset)`: `[tokens, groups * dim]`, with `rstd [tokens, groups]` from [`stats`].
///
/// # Panics
/// If the shapes do not fit.
pub fn apply(x: &Activation, rstd: &Activation, gain: Gain<'_>) -> Activation {
    check_weights(x, rstd, gain.weight.len());
    let mut out = x.pool().blank(x.tokens(), x.features());
    match x.device() {
        Device::Cpu => cpu::apply(x, rstd, gain, &mut out),
        Device::Cuda(_) => cuda::apply(x, rstd, gain, &mut out),
        Device::Meta => {}
    }
    out
}

/// [`apply`] after [`stats`] for one token, whose features are the vector `x [groups * dim, 1]`
/// ([`Activation::to_vector`]), with the same bits: `[groups * dim, 1]`.
///
/// # Panics
/// If the shapes do not fit, or the device is not the CPU.
pub fn of_vector(x: &Activation, groups: usize, eps: f32, gain: Gain<'_>) -> Activation {
    let features = x.tokens();
    assert_eq!((x.features(), x.device()), (1, Device::Cpu), "one token on the CPU");
    assert!(features.is_multiple_of(groups), "whole groups");
    assert!([features, features / groups].contains(&gain.weight.len()), "a weight for each feature");
    let mut out = x.pool().blank(features, 1);
    cpu::of_vector(x, groups, eps, gain, &mut out);
    out
}

/// The gradient of [`apply`] after [`stats`] with respect to `x`, written to `dx` or, if `add`, added to it. With
/// `g = (weight + offset) dh`: `dx = rstd (g - x rstd^2 mean(g x))`. `x`, `dh` and `dx` are `[tokens, groups * dim]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(x: &Activation, rstd: &Activation, gain: Gain<'_>, dh: &Activation, dx: &mut Activation, add: bool) {
    for other in [dh, &*dx] {
        assert_eq!((x.tokens(), x.features()), (other.tokens(), other.features()), "all have one shape");
    }
    assert_eq!(x.tokens(), rstd.tokens(), "both have one shape");
    check_weights(x, rstd, gain.weight.len());
    match x.device() {
        Device::Cpu => cpu::backward(x, rstd, gain, dh, dx, add),
        Device::Cuda(_) => cuda::backward(x, rstd, gain, dh, dx, add),
        Device::Meta => {}
    }
}

/// Adds the gradient of the weight, `sum over tokens and the groups that share it of dh x rstd`, to `dw`, which has the
/// shape of the weight.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward_weight(x: &Activation, rstd: &Activation, dh: &Activation, dw: FloatsMut<'_>) {
    check_weights(x, rstd, dw.len());
    match x.device() {
        Device::Cpu => cpu::backward_weight(x, rstd, dh, dw.cpu_slice()),
        Device::Cuda(_) => cuda::backward_weight(x, rstd, dh, dw),
        Device::Meta => {}
    }
}

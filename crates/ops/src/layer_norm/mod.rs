//! `LayerNorm`: `h = (x - mean) / sqrt(var + eps) * weight + bias`, over all features of a token, with the variance
//! `var = mean((x - mean)^2)`. Ba, Kiros and Hinton, "Layer Normalization", 2016, <https://arxiv.org/abs/1607.06450>.
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

/// `mean` and `rstd = 1 / sqrt(var + eps)` of each token: `[tokens, 2]`, for `x [tokens, features]`.
pub fn stats(x: &Activation, eps: f32) -> Activation {
    let mut out = x.pool().act_f32(x.tokens(), 2);
    match x.device() {
        Device::Cpu => cpu::stats(x, eps, &mut out),
        Device::Cuda(_) => cuda::stats(x, eps, &mut out),
        Device::Meta => {}
    }
    out
}

/// `h = (x - mean) * rstd * weight + bias`: `[tokens, features]`. `stats` is the result of [`stats`]; `weight` and
/// `bias` are `[features]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn apply(x: &Activation, stats: &Activation, weight: Floats<'_>, bias: Floats<'_>) -> Activation {
    check(x, stats);
    assert_eq!([weight.len(), bias.len()], [x.features(); 2], "a weight and a bias for each feature");
    let mut out = x.pool().blank(x.tokens(), x.features());
    match x.device() {
        Device::Cpu => cpu::apply(x, stats, weight.cpu_slice(), bias.cpu_slice(), &mut out),
        Device::Cuda(_) => cuda::apply(x, stats, weight, bias, &mut out),
        Device::Meta => {}
    }
    out
}

/// The gradient of [`apply`] after [`stats`] with respect to `x`, written to `dx` or, if `add`, added to it. With
/// `g = weight dh` and `y = (x - mean) rstd`: `dx = rstd (g - mean(g) - y mean(g y))`. `x`, `dh` and `dx` are
/// `[tokens, features]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(
    x: &Activation,
    stats: &Activation,
    weight: Floats<'_>,
    dh: &Activation,
    dx: &mut Activation,
    add: bool,
) {
    for other in [dh, &*dx] {
        assert_eq!((x.tokens(), x.features()), (other.tokens(), other.features()), "all have one shape");
    }
    check(x, stats);
    assert_eq!(weight.len(), x.features(), "a weight for each feature");
    match x.device() {
        Device::Cpu => cpu::backward(x, stats, weight.cpu_slice(), dh, dx, add),
        Device::Cuda(_) => cuda::backward(x, stats, weight, dh, dx, add),
        Device::Meta => {}
    }
}

/// Adds the gradient of the weight, `sum over tokens of dh (x - mean) rstd`, to `dw [features]`.
/// [`crate::elementwise::add_bias_backward`] does the same for the bias.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward_weight(x: &Activation, stats: &Activation, dh: &Activation, dw: FloatsMut<'_>) {
    check(x, stats);
    assert_eq!((x.tokens(), x.features()), (dh.tokens(), dh.features()), "both have one shape");
    assert_eq!(dw.len(), x.features(), "a sum for each feature");
    match x.device() {
        Device::Cpu => cpu::backward_weight(x, stats, dh, dw.cpu_slice()),
        Device::Cuda(_) => cuda::backward_weight(x, stats, dh, dw),
        Device::Meta => {}
    }
}

fn check(x: &Activation, stats: &Activation) {
    assert_eq!((stats.tokens(), stats.features()), (x.tokens(), 2), "a mean and a deviation for each token");
}

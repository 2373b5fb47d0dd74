//! Elementwise arithmetic on activations `[tokens, features]`: scaling, sums, and biases.
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::{Floats, FloatsMut};
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// Multiplies every value in place: `x = factor x`.
pub fn scale(x: &mut Activation, factor: f32) {
    map(x, |x| x * factor, One { factor, addend: 0.0 });
}

/// `x[t, j] *= factors[t]`, `factors [tokens]`.
///
/// # Panics
/// If there is not a factor for each token.
pub fn scale_tokens(x: &mut Activation, factors: &[f32]) {
    x.times(factors);
}

/// `factor x`, as a new activation; [`scale`] does the same in place.
#[must_use]
pub fn scaled(x: &Activation, factor: f32) -> Activation {
    let mut out = x.like();
    zip(&mut out, x, |_, x| factor * x, Both { a: factor, b: 0.0 });
    out
}

/// `y = y + x`.
///
/// # Panics
/// If the shapes differ, as all functions of this module do.
pub fn add(y: &mut Activation, x: &Activation) {
    zip(y, x, |y, x| y + x, Both { a: 1.0, b: 1.0 });
}

/// `left - right`, as a new activation.
#[must_use]
pub fn sub(left: &Activation, right: &Activation) -> Activation {
    let mut out = left.copy();
    zip(&mut out, right, |out, right| out - right, Both { a: -1.0, b: 1.0 });
    out
}

/// `y = factor y + x`.
pub fn scale_add(y: &mut Activation, factor: f32, x: &Activation) {
    zip(y, x, |y, x| y * factor + x, Both { a: 1.0, b: factor });
}

/// `y = a x + b y`.
pub fn axpby(a: f32, x: &Activation, b: f32, y: &mut Activation) {
    zip(y, x, |y, x| a * x + b * y, Both { a, b });
}

/// `y = x`: copies every value to an activation of the same shape.
pub fn assign(y: &mut Activation, x: &Activation) {
    zip(y, x, |_, x| x, Both { a: 1.0, b: 0.0 });
}

/// Sets every value to `value`.
pub fn fill(x: &mut Activation, value: f32) {
    map(x, |_| value, One { factor: 0.0, addend: value });
}

/// `y[t, j] = y[t, j] + bias[j]`, `bias [features]`.
pub fn add_bias(y: &mut Activation, bias: Floats<'_>) {
    assert_eq!(y.features(), bias.len(), "a bias for each feature");
    match y.device() {
        Device::Cpu => cpu::add_bias(y, bias.cpu_slice()),
        Device::Cuda(_) => cuda::add_bias(y, bias),
        Device::Meta => {}
    }
}

/// Adds the gradient of [`add_bias`]'s bias: `d_bias[j] = d_bias[j] + sum_t dy[t, j]`. Lanes of `dy` without a token
/// have to be zero.
pub fn add_bias_backward(dy: &Activation, d_bias: FloatsMut<'_>) {
    assert_eq!(dy.features(), d_bias.len(), "a sum for each feature");
    match dy.device() {
        Device::Cpu => cpu::sum_tokens(dy, d_bias.cpu_slice()),
        Device::Cuda(_) => cuda::sum_tokens(dy, d_bias),
        Device::Meta => {}
    }
}

/// The function `factor x + addend`, for the GPU kernel. With a factor of 0, `x` is not read.
#[derive(Clone, Copy)]
struct One {
    factor: f32,
    addend: f32,
}

/// The function `a x + b y`, for the GPU kernel. With a `b` of 0, `y` is not read.
#[derive(Clone, Copy)]
struct Both {
    a: f32,
    b: f32,
}

/// `x = f(x)`. `same` is the same function, for a GPU.
fn map(x: &mut Activation, f: impl Fn(f32) -> f32 + Sync, same: One) {
    match x.device() {
        Device::Cpu => cpu::map(x, f),
        Device::Cuda(_) => cuda::map(x, same),
        Device::Meta => {}
    }
}

/// `y = f(y, x)`. `same` is the same function, for a GPU.
fn zip(y: &mut Activation, x: &Activation, f: impl Fn(f32, f32) -> f32 + Sync, same: Both) {
    assert_eq!((y.tokens(), y.features()), (x.tokens(), x.features()), "both have one shape");
    match y.device() {
        Device::Cpu => cpu::zip(y, x, f),
        Device::Cuda(_) => cuda::zip(y, x, same),
        Device::Meta => {}
    }
}

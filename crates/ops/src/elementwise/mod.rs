//! Arithmetic on activations `[tokens, features]`, value by value.
mod cpu;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::{Floats, FloatsMut};
use tunesmith_device::Device;

/// `x = factor x`.
pub fn scale(x: &mut Activation, factor: f32) {
    map(x, |x| x * factor);
}

/// `factor x`.
#[must_use]
pub fn scaled(x: &Activation, factor: f32) -> Activation {
    let mut out = x.like();
    zip(&mut out, x, |_, x| factor * x);
    out
}

/// `y = y + x`.
///
/// # Panics
/// If the shapes differ, as all functions of this module do.
pub fn add(y: &mut Activation, x: &Activation) {
    zip(y, x, |y, x| y + x);
}

/// `left - right`.
#[must_use]
pub fn sub(left: &Activation, right: &Activation) -> Activation {
    let mut out = left.copy();
    zip(&mut out, right, |out, right| out - right);
    out
}

/// `y = factor y + x`.
pub fn scale_add(y: &mut Activation, factor: f32, x: &Activation) {
    zip(y, x, |y, x| y * factor + x);
}

/// `y = a x + b y`.
pub fn axpby(a: f32, x: &Activation, b: f32, y: &mut Activation) {
    zip(y, x, |y, x| a * x + b * y);
}

/// `y = x`.
pub fn assign(y: &mut Activation, x: &Activation) {
    zip(y, x, |_, x| x);
}

/// Sets every value to `value`.
pub fn fill(x: &mut Activation, value: f32) {
    map(x, |_| value);
}

/// `y[t, j] = y[t, j] + bias[j]`, `bias [features]`.
pub fn add_bias(y: &mut Activation, bias: Floats<'_>) {
    assert_eq!(y.features(), bias.len(), "a bias for each feature");
    match y.device() {
        Device::Cpu => cpu::add_bias(y, bias.cpu_slice()),
        Device::Meta => {}
    }
}

/// `d_bias[j] = d_bias[j] + sum_t dy[t, j]`: the gradient of [`add_bias`]. Lanes of `dy` without a token are zero.
pub fn add_bias_backward(dy: &Activation, d_bias: FloatsMut<'_>) {
    assert_eq!(dy.features(), d_bias.len(), "a sum for each feature");
    match dy.device() {
        Device::Cpu => cpu::sum_tokens(dy, d_bias.cpu_slice()),
        Device::Meta => {}
    }
}

/// `x = f(x)`.
fn map(x: &mut Activation, f: impl Fn(f32) -> f32 + Sync) {
    match x.device() {
        Device::Cpu => cpu::map(x, f),
        Device::Meta => {}
    }
}

/// `y = f(y, x)`.
fn zip(y: &mut Activation, x: &Activation, f: impl Fn(f32, f32) -> f32 + Sync) {
    assert_eq!((y.tokens(), y.features()), (x.tokens(), x.features()), "both have one shape");
    match y.device() {
        Device::Cpu => cpu::zip(y, x, f),
        Device::Meta => {}
    }
}

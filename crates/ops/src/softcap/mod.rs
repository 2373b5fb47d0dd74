//! A soft cap on logits, `cap * tanh(x / cap)`, value by value. Gemma Team, "Gemma 2", 2024,
//! <https://arxiv.org/abs/2408.00118>.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// `x = cap * tanh(x / cap)` in place, for `x [tokens, features]`.
pub fn forward(x: &mut Activation, cap: f32) {
    match x.device() {
        Device::Cpu => cpu::forward(x, cap),
        Device::Cuda(_) => cuda::forward(x, cap),
        Device::Meta => {}
    }
}

/// Turns the gradient of [`forward`]'s result into that of its input, in place: multiplies it by the slope
/// `1 - (capped / cap)^2`, where `capped` is the result. Both are `[tokens, features]`.
///
/// # Panics
/// If the shapes differ.
pub fn backward(capped: &Activation, cap: f32, gradient: &mut Activation) {
    assert_eq!((capped.tokens(), capped.features()), (gradient.tokens(), gradient.features()), "both have one shape");
    match capped.device() {
        Device::Cpu => cpu::backward(capped, cap, gradient),
        Device::Cuda(_) => cuda::backward(capped, cap, gradient),
        Device::Meta => {}
    }
}

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

/// `x = cap * tanh(x / cap)`, `x [tokens, features]`.
pub fn forward(x: &mut Activation, cap: f32) {
    match x.device() {
        Device::Cpu => cpu::forward(x, cap),
        Device::Cuda(_) => cuda::forward(x, cap),
        Device::Meta => {}
    }
}

/// Multiplies the gradient of [`forward`]'s result, which is `capped`, by the slope `1 - (capped / cap)^2`: it becomes
/// the gradient of the input. Both are `[tokens, features]`.
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

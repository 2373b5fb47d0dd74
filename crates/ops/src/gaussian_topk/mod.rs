//! Gemma 3n's sparse activation: keeps only the features of a token that lie above a quantile of the normal
//! distribution with their mean and deviation, `y = max(x - (mean + m std), 0)`. With `m` the quantile of 0.95, about
//! one of 20 features stays. `Gemma3nTextMLP._gaussian_topk` in Transformers; Lee et al., "CATS", 2024, has the
//! statistics of activations. The deviation is that of all features, not of a sample.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// `max(x - (mean + multiplier std), 0)`, `[tokens, features]`.
pub fn forward(x: &Activation, multiplier: f32) -> Activation {
    let mut out = x.pool().blank(x.tokens(), x.features());
    match x.device() {
        Device::Cpu => cpu::forward(x, multiplier, &mut out),
        Device::Cuda(_) => cuda::forward(x, multiplier, &mut out),
        Device::Meta => {}
    }
    out
}

/// Turns `dy`, the gradient of [`forward`]'s result, into that of `x`, in place; both are `[tokens, features]`. A
/// feature that was cut still affects the others through mean and deviation. A deviation of 0 has no gradient, as in
/// `PyTorch`.
///
/// # Panics
/// If the shapes differ.
pub fn backward(x: &Activation, multiplier: f32, dy: &mut Activation) {
    assert_eq!((x.tokens(), x.features()), (dy.tokens(), dy.features()), "both have one shape");
    match x.device() {
        Device::Cpu => cpu::backward(x, multiplier, dy),
        Device::Cuda(_) => cuda::backward(x, multiplier, dy),
        Device::Meta => {}
    }
}

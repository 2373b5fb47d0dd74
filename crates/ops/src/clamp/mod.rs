//! Clamps each value to an interval, `min(max(x, low), high)`, as `torch.clamp` does.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// `y = min(max(x, low), high)`, as a new activation `[tokens, features]`. Bounds may be infinite.
#[must_use]
pub fn forward(x: &Activation, bounds: [f32; 2]) -> Activation {
    let mut y = x.pool().blank(x.tokens(), x.features());
    match x.device() {
        Device::Cpu => cpu::forward(x, bounds, &mut y),
        Device::Cuda(_) => cuda::forward(x, bounds, &mut y),
        Device::Meta => {}
    }
    y
}

/// Turns the gradient of [`forward`]'s result into that of `x`, in place: it becomes zero where `x` lies beyond a
/// bound. Both are `[tokens, features]`.
///
/// # Panics
/// If the shapes differ.
pub fn backward(x: &Activation, bounds: [f32; 2], gradient: &mut Activation) {
    assert_eq!((x.tokens(), x.features()), (gradient.tokens(), gradient.features()), "both have one shape");
    match x.device() {
        Device::Cpu => cpu::backward(x, bounds, gradient),
        Device::Cuda(_) => cuda::backward(x, bounds, gradient),
        Device::Meta => {}
    }
}

//! Repeats each feature several times in a row (`torch.repeat_interleave` over features), such as a gate of each head
//! for all features of the head. The backward pass adds the copies' gradients.
//!
//! ```text
//! y[t, f * times + i] = x[t, f]        dx[t, f] = sum over i of dy[t, f * times + i]
//! ```
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// Repeats each feature of `x [tokens, features]` `times` times: `[tokens, features * times]`.
pub fn forward(x: &Activation, times: usize) -> Activation {
    let mut y = x.pool().blank(x.tokens(), x.features() * times);
    match x.device() {
        Device::Cpu => cpu::forward(x, &mut y, times),
        Device::Cuda(_) => cuda::forward(x, &mut y, times),
        Device::Meta => {}
    }
    y
}

/// The gradient of `x`, from the gradient of [`forward`]'s result, `[tokens, features * times]`.
///
/// # Panics
/// If the width of `dy` is not a multiple of `times`.
pub fn backward(dy: &Activation, times: usize) -> Activation {
    assert!(times > 0 && dy.features().is_multiple_of(times), "each feature as often");
    let mut dx = dy.pool().blank(dy.tokens(), dy.features() / times);
    match dy.device() {
        Device::Cpu => cpu::backward(dy, &mut dx, times),
        Device::Cuda(_) => cuda::backward(dy, &mut dx, times),
        Device::Meta => {}
    }
    dx
}

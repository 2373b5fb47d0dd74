//! Each feature several times, one after the other: a number of each head for all of its features, and the gradient's sum.
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

/// `[tokens, features * times]` of `x [tokens, features]`.
pub fn forward(x: &Activation, times: usize) -> Activation {
    let mut y = x.pool().blank(x.tokens(), x.features() * times);
    match x.device() {
        Device::Cpu => cpu::forward(x, &mut y, times),
        Device::Cuda(_) => cuda::forward(x, &mut y, times),
        Device::Meta => {}
    }
    y
}

/// From the gradient of [`forward`]'s result, `[tokens, features * times]`, to that of its input.
///
/// # Panics
/// If the width is no multiple of `times`.
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

//! Rescales each token of `x` to the root mean square of another activation, `y = x rms(r) / max(rms(x), sqrt(1e-5))`,
//! where the mean is over a token's features. Gemma 3n gives all of its streams the size of the first one in this way
//! (`Gemma3nTextModel` in Transformers).
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// The least mean square that `x` is divided by.
const FLOOR: f32 = 1e-5;

/// Returns `x` with the root mean square of `r`; both are `[tokens, features]`.
///
/// # Panics
/// If the shapes differ.
pub fn forward(x: &Activation, r: &Activation) -> Activation {
    check(x, r);
    let mut out = x.pool().blank(x.tokens(), x.features());
    match x.device() {
        Device::Cpu => cpu::forward(x, r, &mut out),
        Device::Cuda(_) => cuda::forward(x, r, &mut out),
        Device::Meta => {}
    }
    out
}

/// The gradient of `x`, from the gradient of [`forward`]'s result. Adds the gradient of `r` to `dr`; a token of zeros
/// in `r` gets none.
///
/// # Panics
/// If the shapes differ.
pub fn backward(x: &Activation, r: &Activation, dy: &Activation, dr: &mut Activation) -> Activation {
    check(x, r);
    check(x, dy);
    check(x, dr);
    let mut dx = x.pool().blank(x.tokens(), x.features());
    match x.device() {
        Device::Cpu => cpu::backward(x, r, dy, &mut dx, dr),
        Device::Cuda(_) => cuda::backward(x, r, dy, &mut dx, dr),
        Device::Meta => {}
    }
    dx
}

fn check(x: &Activation, other: &Activation) {
    assert_eq!((x.tokens(), x.features()), (other.tokens(), other.features()), "all have one shape");
}

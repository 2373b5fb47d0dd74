//! Rows brought to the root mean square of others: `y = x rms(r) / max(rms(x), sqrt(1e-5))`, with a mean over the features of a token.
//! Gemma 3n gives all of its streams the size of the first one, as Transformers' `Gemma3nTextModel` does.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// The least mean square of a row.
const FLOOR: f32 = 1e-5;

/// `x` with the root mean square of `r`, both `[tokens, features]`.
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

/// From the gradient of [`forward`]'s result to that of `x`; adds that of `r` to `dr`. A row of zeros in `r` gets none.
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

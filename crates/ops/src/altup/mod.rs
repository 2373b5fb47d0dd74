//! Alternating updates (`AltUp`), as Gemma 3n has them: several residual streams lie side by side,
//! `[tokens, streams * dim]`, and a block computes only one of them, the active one. All streams are predicted before
//! the block and corrected after it, with weights of each token. Baykal et al., "Alternating Updates for Efficient
//! Transformers", 2023, <https://arxiv.org/abs/2301.13310>.
//!
//! ```text
//! predict    p_i = x_i + sum over j of c[i, j] x_j              c [tokens, streams * streams]
//! correct    y_i = p_i + (1 + c[i]) (u - p_active)              c [tokens, streams], u [tokens, dim]
//! ```
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use std::ops::Range;
use tunesmith_device::Device;

/// Predicts the streams before a block: `[tokens, streams * dim]`, from `x` of that shape and
/// `coefs [tokens, streams * streams]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn predict(x: &Activation, coefs: &Activation, streams: usize) -> Activation {
    check(x, coefs, streams, streams * streams);
    let mut out = x.pool().blank(x.tokens(), x.features());
    match x.device() {
        Device::Cpu => cpu::predict(x, coefs, streams, &mut out),
        Device::Cuda(_) => cuda::predict(x, coefs, streams, &mut out),
        Device::Meta => {}
    }
    out
}

/// The gradients with respect to `x` and `coefs`, from the gradient of [`predict`]'s result.
///
/// # Panics
/// If the shapes do not fit.
pub fn predict_backward(
    x: &Activation,
    coefs: &Activation,
    streams: usize,
    d_out: &Activation,
) -> (Activation, Activation) {
    check(x, coefs, streams, streams * streams);
    check(d_out, coefs, streams, streams * streams);
    let mut dx = x.pool().blank(x.tokens(), x.features());
    let mut d_coefs = coefs.pool().blank(coefs.tokens(), coefs.features());
    match x.device() {
        Device::Cpu => cpu::predict_backward(x, coefs, streams, d_out, &mut dx, &mut d_coefs),
        Device::Cuda(_) => cuda::predict_backward(x, coefs, streams, d_out, &mut dx, &mut d_coefs),
        Device::Meta => {}
    }
    (dx, d_coefs)
}

/// Turns the predicted streams `p [tokens, streams * dim]` into the corrected ones, in place. `u [tokens, dim]` is the
/// block's output for the `active` stream; `coefs` is `[tokens, streams]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn correct(p: &mut Activation, u: &Activation, coefs: &Activation, active: usize) {
    let streams = coefs.features();
    check(p, coefs, streams, streams);
    check(u, coefs, 1, streams);
    assert!(active < streams && p.features() == streams * u.features(), "the active stream is one of all");
    match p.device() {
        Device::Cpu => cpu::correct(p, u, coefs, active),
        Device::Cuda(_) => cuda::correct(p, u, coefs, active),
        Device::Meta => {}
    }
}

/// Turns the gradient of [`correct`]'s result into that of the predicted streams, in place. Returns the gradients of
/// `u` and `coefs`. `p [tokens, dim]` is the active stream as it was predicted.
///
/// # Panics
/// If the shapes do not fit.
pub fn correct_backward(
    p: &Activation,
    u: &Activation,
    coefs: &Activation,
    active: usize,
    d: &mut Activation,
) -> (Activation, Activation) {
    let streams = coefs.features();
    check(d, coefs, streams, streams);
    assert_eq!((p.tokens(), p.features()), (u.tokens(), u.features()), "both are one stream");
    assert!(active < streams && d.features() == streams * u.features(), "the active stream is one of all");
    let (mut du, mut d_coefs) = (u.pool().blank(u.tokens(), u.features()), coefs.pool().blank(u.tokens(), streams));
    match d.device() {
        Device::Cpu => cpu::correct_backward([p, u, coefs], active, d, &mut du, &mut d_coefs),
        Device::Cuda(_) => cuda::correct_backward([p, u, coefs], active, d, &mut du, &mut d_coefs),
        Device::Meta => {}
    }
    (du, d_coefs)
}

/// Adds `x [tokens, dim]` to each of the streams `to` of `y [tokens, streams * dim]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn add(y: &mut Activation, x: &Activation, to: Range<usize>) {
    assert!(y.tokens() == x.tokens() && to.end * x.features() <= y.features(), "streams of one width");
    match y.device() {
        Device::Cpu => cpu::add(y, x, to),
        Device::Cuda(_) => cuda::add(y, x, to),
        Device::Meta => {}
    }
}

/// The sum of the streams `of` of `y [tokens, streams * dim]`: `[tokens, dim]`. It is the gradient of what [`add`]
/// adds.
///
/// # Panics
/// If the range is empty or reaches beyond the streams of `y`.
pub fn sum(y: &Activation, dim: usize, of: Range<usize>) -> Activation {
    assert!(!of.is_empty() && of.end * dim <= y.features(), "some streams of one width");
    let mut out = y.pool().blank(y.tokens(), dim);
    match y.device() {
        Device::Cpu => cpu::sum(y, of, &mut out),
        Device::Cuda(_) => cuda::sum(y, of, &mut out),
        Device::Meta => {}
    }
    out
}

fn check(x: &Activation, coefs: &Activation, streams: usize, each: usize) {
    assert_eq!((x.tokens(), coefs.features()), (coefs.tokens(), each), "the weights of each token");
    assert!(streams > 0 && x.features().is_multiple_of(streams), "whole streams");
}

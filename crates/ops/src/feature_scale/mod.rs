//! Multiplies each feature by a factor of its own, `y[t, j] = gain[j] v[t, j]`: the magnitudes of `DoRA` (Liu et al.,
//! 2024, <https://arxiv.org/abs/2402.09353>) and the factors of (IA)³ (Liu et al., 2022,
//! <https://arxiv.org/abs/2205.05638>).
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::{Floats, FloatsMut};
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Device, FloatBuffer};

/// `gain ⊙ v`: `v [tokens, features]`, `gain [features]`.
///
/// # Panics
/// If `gain` does not have a factor for each feature.
pub fn times(v: &Activation, gain: Floats<'_>) -> Activation {
    assert_eq!(v.features(), gain.len(), "a factor for each feature");
    let mut out = v.like();
    match v.device() {
        Device::Cpu => cpu::times(v, gain.cpu_slice(), &mut out),
        Device::Cuda(_) => cuda::times(v, gain, &mut out),
        Device::Meta => {}
    }
    out
}

/// `y = y + gain ⊙ v`: `y` and `v` `[tokens, features]`, `gain [features]`.
///
/// # Panics
/// If the shapes differ.
pub fn add(y: &mut Activation, v: &Activation, gain: Floats<'_>) {
    assert_eq!((y.tokens(), y.features()), (v.tokens(), v.features()), "both have one shape");
    assert_eq!(v.features(), gain.len(), "a factor for each feature");
    match y.device() {
        Device::Cpu => cpu::add(y, v, gain.cpu_slice()),
        Device::Cuda(_) => cuda::add(y, v, gain),
        Device::Meta => {}
    }
}

/// `magnitudes / norms`, number by number: the gain of `DoRA`.
///
/// # Panics
/// If the lengths differ.
pub fn ratio(magnitudes: Floats<'_>, norms: Floats<'_>) -> FloatBuffer {
    assert_eq!(magnitudes.len(), norms.len(), "a norm for each magnitude");
    match magnitudes.device() {
        Device::Cpu => {
            let pairs = magnitudes.cpu_slice().iter().zip(norms.cpu_slice());
            pairs.map(|(magnitude, norm)| magnitude / norm).collect::<Vec<f32>>().into()
        }
        Device::Cuda(_) => cuda::ratio(magnitudes, norms),
        Device::Meta => FloatBuffer::zeros(Device::Meta, norms.len()),
    }
}

/// Adds the gradient of `DoRA`'s magnitudes, where `gain = magnitude / norm` and the norm counts as a constant:
/// `d_magnitude[j] += sum_t dy[t, j] v[t, j] / norm[j]`.
///
/// `dy` and `v` are `[tokens, features]`, `norm` and `d_magnitude` `[features]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(dy: &Activation, v: &Activation, norm: Floats<'_>, d_magnitude: FloatsMut<'_>) {
    assert_eq!((dy.tokens(), dy.features()), (v.tokens(), v.features()), "both have one shape");
    assert_eq!(v.features(), norm.len(), "a norm for each feature");
    assert_eq!(norm.len(), d_magnitude.len(), "a norm for each magnitude");
    match dy.device() {
        Device::Cpu => cpu::backward(dy, v, norm.cpu_slice(), d_magnitude.cpu_slice()),
        Device::Cuda(_) => cuda::backward(dy, v, norm, d_magnitude),
        Device::Meta => {}
    }
}

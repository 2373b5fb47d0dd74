//! Gradient accumulation over several passes: `s[i] += g[i]`. The sums `s` are float32 or bfloat16. Each addition is
//! done in float32; a bfloat16 sum is then rounded to nearest, ties to even.
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::floats::{Floats, FloatsMut};
use half::bf16;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Device, Element, Slice, SliceMut};

/// The number type that accumulated gradients are kept in: `f32` or [`bf16`].
pub trait Sum: Element {
    /// Whether it is [`bf16`].
    const NARROW: bool;
    /// The same number in float32.
    fn to_f32(self) -> f32;
    /// The nearest number of this type.
    fn from_f32(value: f32) -> Self;
}

impl Sum for f32 {
    const NARROW: bool = false;

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Sum for bf16 {
    const NARROW: bool = true;

    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// Adds `grads [n]` to `sums [n]`.
pub fn add<T: Sum>(sums: SliceMut<'_, T>, grads: Floats<'_>) {
    assert_eq!(sums.len(), grads.len(), "a gradient for each sum");
    match sums.device() {
        Device::Cpu => cpu::add(sums.cpu_slice(), grads.cpu_slice()),
        Device::Cuda(_) => cuda::add(sums, grads),
        Device::Meta => {}
    }
}

/// Adds `sums [n]` to `grads [n]`, and sets the sums to zero for the next step.
pub fn take<T: Sum>(sums: SliceMut<'_, T>, grads: FloatsMut<'_>) {
    assert_eq!(sums.len(), grads.len(), "a gradient for each sum");
    match sums.device() {
        Device::Cpu => cpu::take(sums.cpu_slice(), grads.cpu_slice()),
        Device::Cuda(_) => cuda::take(sums, grads),
        Device::Meta => {}
    }
}

/// Converts the bfloat16 `sums [n]` to float32, in `floats [n]`.
pub fn to_f32(sums: Slice<'_, bf16>, floats: FloatsMut<'_>) {
    assert_eq!(sums.len(), floats.len(), "a float for each sum");
    match sums.device() {
        Device::Cpu => cpu::to_f32(sums.cpu_slice(), floats.cpu_slice()),
        Device::Cuda(_) => cuda::to_f32(sums, floats),
        Device::Meta => {}
    }
}

/// The sum of the squares of gradient sums in bfloat16, as [`crate::squares::sum`] computes it for float32.
pub fn squares(sums: Slice<'_, bf16>) -> f64 {
    match sums.device() {
        Device::Cpu => cpu::squares(sums.cpu_slice()),
        Device::Cuda(_) => cuda::squares(sums),
        Device::Meta => 0.0,
    }
}

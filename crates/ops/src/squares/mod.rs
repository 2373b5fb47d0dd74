//! The sum of squares, `sum_i x[i]^2`: the square of a gradient's Euclidean norm. On a GPU also the [`verdict`] on a
//! step: the factor that clips its gradients, or that it is to be skipped.
mod cpu;
pub(crate) mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::factor::Factor;
use crate::floats::Floats;
use half::bf16;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Array, Device, Slice, Storing};

/// The sum of the squares of `x [n]`, in f64. It does not depend on the number of threads. It is NaN or infinite if a
/// number is.
pub fn sum(x: Floats<'_>) -> f64 {
    match x.device() {
        Device::Cpu => cpu::sum(x.cpu_slice()),
        Device::Cuda(_) => cuda::sum(x),
        Device::Meta => 0.0,
    }
}

/// The gradients of a step in a GPU's memory.
#[derive(Debug, Clone, Copy)]
pub enum Gradients<'a> {
    /// Gradients in float32.
    F32(Floats<'a>),
    /// Gradients in bfloat16.
    Bf16(Slice<'a, bf16>),
}

/// What a step's update depends on, besides its gradients.
#[derive(Debug, Clone, Copy)]
pub struct Limits<'a> {
    /// The sum of the losses, and a second number, as [`crate::loss::Totals`] has them on the GPU.
    pub totals: Slice<'a, f64>,
    /// A further loss, which is not part of that sum.
    pub other: f64,
    /// The norm that gradients are clipped to; 0 for no clipping.
    pub most: f64,
    /// The loss scale, by which the gradients were multiplied.
    pub scale: f64,
}

/// What a GPU found out about a step's gradients: the factor for the update, and numbers that the host reads later.
#[derive(Debug)]
pub struct Verdict {
    factor: Array<f32>,
    /// In pinned memory of the host: the norm, and the two totals.
    numbers: Array<f64>,
    /// The copy that brings these numbers to the host.
    storing: Storing<f64>,
}

/// Computes the gradients' norm, and the factor `min(1, most / (norm + 1e-6)) / scale` for the update. The factor is
/// NaN, which skips the update, if the norm or the losses are not finite. The host does not wait.
pub fn verdict(gradients: Gradients<'_>, limits: Limits<'_>) -> Verdict {
    let (factor, found) = match gradients {
        Gradients::F32(x) => cuda::verdict(&cuda::parts(x, "squares_sum"), limits),
        Gradients::Bf16(x) => cuda::verdict(&cuda::parts(x, "squares_sum_bf16"), limits),
    };
    let mut numbers = Array::pinned(factor.device(), found.len());
    let storing = numbers.store(0, found);
    Verdict { factor, numbers, storing }
}

impl Verdict {
    /// The factor on the gradients in the update.
    pub fn factor(&self) -> Factor<'_> {
        Factor::Found(self.factor.view())
    }

    /// The norm and the two totals. Waits for these numbers, but not for later work of the GPU.
    pub fn read(self) -> [f64; 3] {
        let numbers = self.numbers.to_host();
        drop(self.storing);
        [numbers[0], numbers[1], numbers[2]]
    }
}

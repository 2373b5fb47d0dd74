//! The sum of squares, `sum_i x[i]^2`: the square of a gradient's Euclidean norm.
mod cpu;
pub(crate) mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::floats::Floats;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// The sum of the squares of `x [n]`, in f64. It does not depend on the number of threads. NaN or infinite where a number is.
pub fn sum(x: Floats<'_>) -> f64 {
    match x.device() {
        Device::Cpu => cpu::sum(x.cpu_slice()),
        Device::Cuda(_) => cuda::sum(x),
        Device::Meta => 0.0,
    }
}

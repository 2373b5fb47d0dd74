//! An exponential moving average of the trained values, `a[i] = a[i] + weight (x[i] - a[i])`, rounded as `torch.lerp`
//! rounds it.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::floats::{Floats, FloatsMut};
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// Moves `averages [n]` towards `values [n]`. `weight`, from 0 to 1, is the share of the new values; 1 copies them.
pub fn update(averages: FloatsMut<'_>, values: Floats<'_>, weight: f32) {
    assert_eq!(averages.len(), values.len(), "an average for each value");
    match values.device() {
        Device::Cpu => cpu::update(averages.cpu_slice(), values.cpu_slice(), weight),
        Device::Cuda(_) => cuda::update(averages, values, weight),
        Device::Meta => {}
    }
}

//! Lion's update of flat arrays, where `g = factor * grad`: Chen et al., 2023, <https://arxiv.org/abs/2302.06675>.
//!
//! ```text
//! w = (1 - rate decay) w - rate sign(beta1 m + (1 - beta1) g)
//! m = beta2 m + (1 - beta2) g
//! ```
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::factor::Factor;
use crate::floats::{Floats, FloatsMut};
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// The hyperparameters of one update.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// What gradients are multiplied by first: clipping and the inverse loss scale in one.
    pub factor: Factor<'a>,
    /// The learning rate.
    pub rate: f64,
    /// The share of the momentum in the direction, in 0..1.
    pub beta1: f64,
    /// Decay of the momentum, in 0..1.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// Updates `values [n]` and their momentum `exp_avg [n]` by `grads [n]`. The sign of 0 is 0.
pub fn update(values: FloatsMut<'_>, grads: Floats<'_>, exp_avg: FloatsMut<'_>, step: &Step<'_>) {
    assert_eq!([values.len(), exp_avg.len()], [grads.len(); 2], "a gradient and a momentum for each value");
    match values.device() {
        Device::Cpu => cpu::update(values.cpu_slice(), grads.cpu_slice(), exp_avg.cpu_slice(), step),
        Device::Cuda(_) => cuda::update(values, grads, exp_avg, step),
        Device::Meta => {}
    }
}

//! `AdamW`'s update of flat arrays, where `g = factor * grad`: Loshchilov and Hutter, 2019,
//! <https://arxiv.org/abs/1711.05101>.
//!
//! ```text
//! m = beta1 m + (1 - beta1) g
//! v = beta2 v + (1 - beta2) g^2
//! w = (1 - rate decay) w - rate / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
//! ```
mod cpu;
mod cuda;
#[cfg(test)]
pub(crate) mod reference;
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
    /// Decay of the first moment, in 0..1.
    pub beta1: f64,
    /// Decay of the second moment, in 0..1.
    pub beta2: f64,
    /// Added to the root of the second moment, in the denominator.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// `t` of the formulas: the number of the step, from 1.
    pub number: u64,
}

impl Step<'_> {
    /// Three constants in float32: `1 - rate * weight_decay`, which the weight is multiplied by;
    /// `rate / (1 - beta1^t)`; and `sqrt(1 - beta2^t)`.
    pub(crate) fn rounded(&self) -> [f32; 3] {
        let exponent = self.number as f64;
        [
            (1.0 - self.rate * self.weight_decay) as f32,
            (self.rate / (1.0 - self.beta1.powf(exponent))) as f32,
            (1.0 - self.beta2.powf(exponent)).sqrt() as f32,
        ]
    }
}

/// Updates `values [n]` and their moments `exp_avg [n]` (m) and `exp_avg_sq [n]` (v) by `grads [n]`.
pub fn update(
    values: FloatsMut<'_>,
    grads: Floats<'_>,
    exp_avg: FloatsMut<'_>,
    exp_avg_sq: FloatsMut<'_>,
    step: &Step<'_>,
) {
    let lengths = [values.len(), exp_avg.len(), exp_avg_sq.len()];
    assert_eq!(lengths, [grads.len(); 3], "a gradient and two moments for each value");
    match values.device() {
        Device::Cpu => {
            cpu::update(values.cpu_slice(), grads.cpu_slice(), exp_avg.cpu_slice(), exp_avg_sq.cpu_slice(), step);
        }
        Device::Cuda(_) => cuda::update(values, grads, exp_avg, exp_avg_sq, step),
        Device::Meta => {}
    }
}

//! The update of stochastic gradient descent with momentum, where `g = factor * grad`. Weight decay is added to the
//! gradient, as in `torch.optim.SGD`.
//!
//! ```text
//! d = g + decay w
//! m = momentum m + (1 - dampening) d           the first step: m = d
//! w = w - rate (nesterov: d + momentum m, else m; without momentum: d)
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
    /// The share of the momentum that is kept from step to step, in 0..1.
    pub momentum: f64,
    /// The share of the gradient that does not enter the momentum; the caller passes 0 in the first step.
    pub dampening: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Weight decay: this share of a weight is added to its gradient.
    pub weight_decay: f64,
}

/// Updates `values [n]` by `grads [n]`, and `momentum [n]` if there is one.
pub fn update(values: FloatsMut<'_>, grads: Floats<'_>, momentum: Option<FloatsMut<'_>>, step: &Step<'_>) {
    assert_eq!(values.len(), grads.len(), "a gradient for each value");
    assert!(momentum.as_ref().is_none_or(|it| it.len() == grads.len()), "a momentum for each value");
    match values.device() {
        Device::Cpu => cpu::update(values.cpu_slice(), grads.cpu_slice(), momentum.map(FloatsMut::cpu_slice), step),
        Device::Cuda(_) => cuda::update(values, grads, momentum, step),
        Device::Meta => {}
    }
}

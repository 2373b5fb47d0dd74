//! The update of stochastic gradient descent with momentum, `g = factor grad`. Weight decay is part of the gradient.
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

/// The constants of one step.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// What gradients are multiplied by.
    pub factor: Factor<'a>,
    /// The learning rate.
    pub rate: f64,
    /// Share of the last step's direction that is kept, in 0..1.
    pub momentum: f64,
    /// Share of the gradient that does not enter the momentum: 0 in the first step.
    pub dampening: f64,
    /// Take the direction that the momentum has after the next equal gradient.
    pub nesterov: bool,
    /// What weights are multiplied by before they are added to the gradient.
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

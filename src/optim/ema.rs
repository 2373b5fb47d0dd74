//! An exponential moving average of the trained weights, beside them; equal to `torch.optim.swa_utils.AveragedModel` with
//! `get_ema_multi_avg_fn(decay)`: after the first step a copy, then `average += (1 - decay) (weights - average)`.
use super::optimizer::TASK;
use rayon::prelude::*;

/// The average of a run's weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Ema {
    decay: f64,
    /// The averages, in the order of the weights.
    pub values: Vec<f32>,
}

impl Ema {
    /// Before the first step: a copy.
    pub fn new(decay: f64, values: &[f32]) -> Self {
        Self { decay, values: values.to_vec() }
    }

    /// Takes the weights after optimizer step `step` (from 1) into account.
    pub fn update(&mut self, values: &[f32], step: u64) {
        let share = if step == 1 { 1.0 } else { (1.0 - self.decay) as f32 };
        let parts = self.values.par_chunks_mut(TASK).zip(values.par_chunks(TASK));
        parts.for_each(|(averages, values)| {
            for (average, value) in averages.iter_mut().zip(values) {
                *average = if share < 0.5 {
                    *average + share * (value - *average)
                } else {
                    value - (value - *average) * (1.0 - share)
                };
            }
        });
    }
}

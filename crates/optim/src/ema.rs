//! An exponential moving average (EMA) of the trained weights, kept beside them. Equal to
//! `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`: the first step copies the weights, later
//! steps do `average += (1 - decay) (weights - average)`.
use super::optimizer::TASK;
use rayon::prelude::*;
use std::ops::Range;

/// The average of a run's weights, or of the share of them that one rank owns.
#[derive(Debug, Clone, PartialEq)]
pub struct Ema {
    decay: f64,
    /// The averages of the owned ranges end to end.
    pub values: Vec<f32>,
    /// Flat ranges in a buffer of all values, rising.
    owned: Vec<Range<usize>>,
}

impl Ema {
    /// The average before the first step: a copy of all values.
    pub fn new(decay: f64, values: &[f32]) -> Self {
        let everything = 0..values.len();
        Self::shared(decay, values, vec![everything])
    }

    /// The average of the flat ranges `owned` before the first step. `values` are all values, or the owned ones end to
    /// end.
    pub fn shared(decay: f64, values: &[f32], owned: Vec<Range<usize>>) -> Self {
        let count = owned.iter().map(ExactSizeIterator::len).sum();
        if values.len() == count {
            return Self { decay, values: values.to_vec(), owned };
        }
        let mut copy = Vec::with_capacity(count);
        for range in &owned {
            copy.extend_from_slice(&values[range.clone()]);
        }
        Self { decay, values: copy, owned }
    }

    /// The flat ranges that are averaged here, in a buffer of all values.
    pub fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    /// Adds the weights after optimizer step `step`, counted from 1, to the average. `values` are all weights, or the
    /// owned ones end to end.
    pub fn update(&mut self, values: &[f32], step: u64) {
        if values.len() == self.values.len() {
            return Self::walk(&mut self.values, values, self.decay, step);
        }
        let mut rest = &mut self.values[..];
        for range in &self.owned {
            let (now, later) = rest.split_at_mut(range.len());
            Self::walk(now, &values[range.clone()], self.decay, step);
            rest = later;
        }
    }

    fn walk(averages: &mut [f32], values: &[f32], decay: f64, step: u64) {
        let share = if step == 1 { 1.0 } else { (1.0 - decay) as f32 };
        let parts = averages.par_chunks_mut(TASK).zip(values.par_chunks(TASK));
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

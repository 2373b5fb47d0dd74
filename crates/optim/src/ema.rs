//! An exponential moving average (EMA) of the trained weights. Equal to `torch.optim.swa_utils.AveragedModel` with
//! `get_ema_multi_avg_fn(decay)`: the first step copies the weights, later steps do
//! `average += (1 - decay) (weights - average)`.
use std::ops::Range;
use tunesmith_device::{FloatBuffer, Floats};
use tunesmith_ops::ema;

/// The average of a run's weights, or of one rank's share of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Ema {
    decay: f64,
    /// The averages of the owned ranges end to end.
    pub values: FloatBuffer,
    /// The ranges that are averaged here, as places in a buffer of all values, rising.
    owned: Vec<Range<usize>>,
}

impl Ema {
    /// The average before the first step: a copy of all values.
    pub fn new<'a>(decay: f64, values: impl Into<Floats<'a>>) -> Self {
        let values = values.into();
        let everything = 0..values.len();
        Self::shared(decay, values, vec![everything])
    }

    /// The average of the flat ranges `owned` before the first step. `values` are all values, or the owned ones end to
    /// end.
    pub fn shared(decay: f64, values: Floats<'_>, owned: Vec<Range<usize>>) -> Self {
        let count = owned.iter().map(ExactSizeIterator::len).sum();
        let mut copy = FloatBuffer::zeros(values.device(), 0);
        copy.reserve(count);
        if values.len() == count {
            copy.append(values);
        } else {
            for range in &owned {
                copy.append(values.slice(range.clone()));
            }
        }
        Self { decay, values: copy, owned }
    }

    /// The flat ranges that are averaged here, in a buffer of all values.
    pub fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    /// Adds the weights after optimizer step `step`, counted from 1, to the average. `values` are all weights, or the
    /// owned ones end to end.
    pub fn update<'a>(&mut self, values: impl Into<Floats<'a>>, step: u64) {
        let values = values.into();
        let weight = if step == 1 { 1.0 } else { (1.0 - self.decay) as f32 };
        if values.len() == self.values.len() {
            return ema::update(self.values.view_mut(), values, weight);
        }
        let mut rest = self.values.view_mut();
        for range in &self.owned {
            let (now, later) = rest.split_at(range.len());
            ema::update(now, values.slice(range.clone()), weight);
            rest = later;
        }
    }
}

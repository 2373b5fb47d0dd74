//! `AdamW` with decoupled weight decay (Loshchilov and Hutter, 2019), equal to `torch.optim.AdamW`.
use crate::ops::par::{self, Shared};
use std::ops::Range;

/// The optimizer's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Betas {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The optimizer's state: moments beside the flat buffer of values.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    /// Its constants.
    pub betas: Betas,
    /// Updates made so far.
    pub step: u64,
    /// First moments.
    pub m: Vec<f32>,
    /// Second moments.
    pub v: Vec<f32>,
}

/// Values in a task.
const TASK: usize = 1 << 16;

impl AdamW {
    /// For `count` values, all moments zero.
    pub fn new(betas: Betas, count: usize) -> Self {
        Self { betas, step: 0, m: vec![0.0; count], v: vec![0.0; count] }
    }

    /// One update with gradients `grads * factor`. Weight decay applies to the ranges `decayed` (rising, disjoint).
    pub fn update(&mut self, values: &mut [f32], grads: &[f32], factor: f32, rate: f64, decayed: &[Range<usize>]) {
        self.step += 1;
        let parts = parts(values.len(), decayed);
        let (values, m, v) = (Shared(values.as_mut_ptr()), Shared(self.m.as_mut_ptr()), Shared(self.v.as_mut_ptr()));
        let (betas, step) = (self.betas, self.step);
        par::run(parts.len(), |task| {
            let (range, decays) = &parts[task];
            // SAFETY: the parts are disjoint and inside all four buffers, which are equally long.
            let (values, m, v) = unsafe {
                let slice =
                    |from: Shared<f32>| std::slice::from_raw_parts_mut(from.get().add(range.start), range.len());
                (slice(values), slice(m), slice(v))
            };
            let betas = Betas { weight_decay: if *decays { betas.weight_decay } else { 0.0 }, ..betas };
            adamw(values, &grads[range.clone()], (m, v), factor, rate, betas, step);
        });
    }
}

/// Cuts `0..count` into tasks that lie wholly inside or outside the decayed ranges.
fn parts(count: usize, decayed: &[Range<usize>]) -> Vec<(Range<usize>, bool)> {
    let mut whole = Vec::new();
    let mut at = 0;
    for range in decayed {
        whole.push((at..range.start, false));
        whole.push((range.clone(), true));
        at = range.end;
    }
    whole.push((at..count, false));
    let cut = |(range, decays): (Range<usize>, bool)| {
        let end = range.end;
        range.step_by(TASK).map(move |start| (start..end.min(start + TASK), decays))
    };
    whole.into_iter().flat_map(cut).collect()
}

/// The formula, one line a name, on equally long slices.
fn adamw(
    values: &mut [f32],
    grads: &[f32],
    (m, v): (&mut [f32], &mut [f32]),
    factor: f32,
    rate: f64,
    betas: Betas,
    step: u64,
) {
    let exponent = step as f64;
    let keep = (1.0 - rate * betas.weight_decay) as f32;
    let (beta1, beta2) = (betas.beta1 as f32, betas.beta2 as f32);
    let (rest1, rest2) = ((1.0 - betas.beta1) as f32, (1.0 - betas.beta2) as f32);
    let pace = (rate / (1.0 - betas.beta1.powf(exponent))) as f32;
    let root = (1.0 - betas.beta2.powf(exponent)).sqrt() as f32;
    let epsilon = betas.epsilon as f32;
    for (((value, grad), m), v) in values.iter_mut().zip(grads).zip(m).zip(v) {
        let grad = grad * factor;
        *m = beta1 * *m + rest1 * grad;
        *v = beta2 * *v + rest2 * grad * grad;
        let denominator = v.sqrt() / root + epsilon;
        *value = *value * keep - pace * (*m / denominator);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decays_only_where_asked_and_moves_by_the_rate() {
        let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1 };
        let mut adam = AdamW::new(betas, 4);
        let mut values = [1.0f32, 1.0, 1.0, 1.0];
        let decayed = [Range { start: 1, end: 3 }];
        adam.update(&mut values, &[0.0, 0.0, 0.5, -0.5], 1.0, 0.01, &decayed);
        // Adam's first step is the rate in the gradient's direction, whatever its size.
        let expected = [1.0, 0.999, 0.999 - 0.01, 1.01];
        assert!(values.iter().zip(expected).all(|(got, want)| (got - want).abs() < 1e-6), "{values:?}");
    }
}

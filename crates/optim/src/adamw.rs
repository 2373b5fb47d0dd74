//! `AdamW`: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, <https://arxiv.org/abs/1711.05101>.
//! Equal to `torch.optim.AdamW`.
//!
//! ```text
//! m = beta1 m + (1 - beta1) g
//! v = beta2 v + (1 - beta2) g^2
//! w = (1 - rate decay) w - rate / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
//! ```
use super::optimizer::{Slot, State, StateSpec, TASK, TensorUpdate, UpdateRule};
use rayon::prelude::*;
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;

/// `adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay`, for every optimizer that keeps moments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Betas {
    /// Decay of the first moment, in 0..1.
    pub beta1: f64,
    /// Decay of the second moment, in 0..1.
    pub beta2: f64,
    /// Added to the root of the second moment, so that nothing is divided by 0.
    pub epsilon: f64,
    /// Decoupled weight decay: a step multiplies a weight by `1 - rate * weight_decay`.
    pub weight_decay: f64,
}

impl Betas {
    /// The constants for one tensor: without weight decay where [`Slot::decay`] is false.
    #[must_use]
    pub const fn of(self, slot: &Slot) -> Self {
        Self { weight_decay: if slot.decay { self.weight_decay } else { 0.0 }, ..self }
    }
}

impl From<&TrainConfig> for Betas {
    fn from(train: &TrainConfig) -> Self {
        Self {
            beta1: train.adam_beta1,
            beta2: train.adam_beta2,
            epsilon: train.adam_epsilon,
            weight_decay: train.weight_decay,
        }
    }
}

/// The rule. It keeps both moments in f32: `exp_avg` and `exp_avg_sq`, as PyTorch names them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW(pub Betas);

impl UpdateRule for AdamW {
    fn of(train: &TrainConfig, _: &mut Reader<'_>) -> Result<Self> {
        Ok(Self(train.into()))
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        vec![StateSpec::like("exp_avg", slot), StateSpec::like("exp_avg_sq", slot)]
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let TensorUpdate { slot, values, grads, factor, rate, step, state } = update;
        let [State::F32(m), State::F32(v)] = state else { return };
        let betas = self.0.of(slot);
        let moments = m.par_chunks_mut(TASK).zip(v.par_chunks_mut(TASK));
        let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(moments);
        parts.for_each(|((values, grads), moments)| adamw(values, grads, moments, factor, rate, betas, step));
    }
}

/// The formula of the module's head on equally long slices; `step` is its `t`, `grads * factor` its `g`.
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

//! Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, <https://arxiv.org/abs/2302.06675>. Equal
//! to `lion-pytorch` and to the 32-bit Lion of bitsandbytes.
//!
//! ```text
//! w = (1 - rate decay) w - rate sign(beta1 m + (1 - beta1) g)
//! m = beta2 m + (1 - beta2) g
//! ```
use super::adamw::Betas;
use super::optimizer::{Slot, StateSpec, TASK, TensorUpdate, UpdateRule};
use rayon::prelude::*;
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;

/// The rule. It keeps one momentum, `exp_avg`, in f32; `epsilon` is not used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion(pub Betas);

impl UpdateRule for Lion {
    fn of(train: &TrainConfig, _: &mut Reader<'_>) -> Result<Self> {
        Ok(Self(train.into()))
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        vec![StateSpec::like("exp_avg", slot)]
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let TensorUpdate { slot, values, grads, factor, rate, state, .. } = update;
        let [momentum] = state else { return };
        let betas = self.0.of(slot);
        let keep = (1.0 - rate * betas.weight_decay) as f32;
        let (beta1, beta2) = (betas.beta1 as f32, betas.beta2 as f32);
        let (rest1, rest2) = ((1.0 - betas.beta1) as f32, (1.0 - betas.beta2) as f32);
        let rate = rate as f32;
        let momentum = momentum.floats().par_chunks_mut(TASK);
        let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(momentum);
        parts.for_each(|((values, grads), momentum)| {
            for ((value, grad), m) in values.iter_mut().zip(grads).zip(momentum) {
                let grad = grad * factor;
                let direction = beta1 * *m + rest1 * grad;
                // Unlike `signum`, the sign of 0 is 0.
                let sign = f32::from(i8::from(direction > 0.0) - i8::from(direction < 0.0));
                *value = *value * keep - rate * sign;
                *m = beta2 * *m + rest2 * grad;
            }
        });
    }
}

//! Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, <https://arxiv.org/abs/2302.06675>. Equal
//! to `lion-pytorch` and to the 32-bit Lion of bitsandbytes.
//!
//! ```text
//! w = (1 - rate decay) w - rate sign(beta1 m + (1 - beta1) g)
//! m = beta2 m + (1 - beta2) g
//! ```
use super::adamw::Betas;
use super::optimizer::{Slot, StateSpec, TensorUpdate, UpdateRule};
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_ops::lion;

/// The update rule of Lion. Its state is one momentum, `exp_avg`, in float32. `epsilon` is not used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion(pub Betas);

impl UpdateRule for Lion {
    fn of(train: &TrainConfig, _: &mut Reader<'_>) -> Result<Self> {
        Ok(Self(train.into()))
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        vec![StateSpec::like("exp_avg", slot)]
    }

    fn takes_found_factor(&self) -> bool {
        true
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let TensorUpdate { slot, values, grads, factor, rate, state, .. } = update;
        let [momentum] = state else { return };
        let Betas { beta1, beta2, weight_decay, .. } = self.0.of(slot);
        lion::update(values, grads, momentum.floats(), &lion::Step { factor, rate, beta1, beta2, weight_decay });
    }
}

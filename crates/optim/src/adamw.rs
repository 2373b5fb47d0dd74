//! `AdamW`: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, <https://arxiv.org/abs/1711.05101>.
//! Equal to `torch.optim.AdamW`.
//!
//! ```text
//! m = beta1 m + (1 - beta1) g
//! v = beta2 v + (1 - beta2) g^2
//! w = (1 - rate decay) w - rate / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
//! ```
use super::optimizer::{Slot, State, StateSpec, TensorUpdate, UpdateRule};
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_ops::adamw::{self, Step};

/// The settings `adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay`, for every optimizer with moments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Betas {
    /// Decay of the first moment, in 0..1.
    pub beta1: f64,
    /// Decay of the second moment, in 0..1.
    pub beta2: f64,
    /// Added to the root of the second moment, to avoid division by 0.
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

    /// The constants of an update of `AdamW`.
    pub(crate) const fn step<'a>(self, update: &TensorUpdate<'a>) -> Step<'a> {
        let Self { beta1, beta2, epsilon, weight_decay } = self.of(update.slot);
        let TensorUpdate { factor, rate, step: number, .. } = *update;
        Step { factor, rate, beta1, beta2, epsilon, weight_decay, number }
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

/// The update rule of `AdamW`. Its state is both moments in float32, `exp_avg` and `exp_avg_sq`, as PyTorch names them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW(pub Betas);

impl UpdateRule for AdamW {
    fn of(train: &TrainConfig, _: &mut Reader<'_>) -> Result<Self> {
        Ok(Self(train.into()))
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        vec![StateSpec::like("exp_avg", slot), StateSpec::like("exp_avg_sq", slot)]
    }

    fn takes_found_factor(&self) -> bool {
        true
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let step = self.0.step(&update);
        let TensorUpdate { values, grads, state, .. } = update;
        let [State::F32(m), State::F32(v)] = state else { return };
        adamw::update(values, grads, m.view_mut(), v.view_mut(), &step);
    }
}

//! Schedule-free `AdamW`: Defazio et al., "The Road Less Scheduled", 2024, <https://arxiv.org/abs/2405.15682>. Equal to
//! `schedulefree.AdamWScheduleFree`.
//!
//! The trained weights are the points `y` at which gradients are taken. `z` is the sequence that makes steps. The
//! weights to evaluate, to save and to publish are the averages `x = y + (1 - 1/beta1) (z - y)`.
//!
//! ```text
//! v = beta2 v + (1 - beta2) g^2
//! d = g / (sqrt(v / (1 - beta2^t)) + epsilon) + decay y
//! s = weight_t / sum(weight_1..weight_t),  weight_t = t^r max(rate_1..rate_t)^weight_lr_power
//! y = lerp(y, z, s) + rate (beta1 (1 - s) - 1) d
//! z = z - rate d
//! ```
use super::adamw::Betas;
use super::optimizer::{Slot, State, StateSpec, TensorUpdate, UpdateRule};
use rayon::prelude::*;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_device::{Floats, FloatsMut};
use tunesmith_ops::denormal::flush_denormal;
use tunesmith_ops::par::TASK;

/// The update rule of schedule-free `AdamW`. Its state is `z` and `exp_avg_sq` (`v`) for each value; and for the run,
/// the highest rate and the sum of weights so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleFreeAdamW {
    /// `AdamW`'s constants; `beta1`, above 0, says how far `y` lies from `z` towards the average.
    pub betas: Betas,
    /// `r`: the power of the step number in the weights of the average.
    pub power: f64,
    /// `weight_lr_power`: the power of the highest rate so far in the weights of the average.
    pub rate_power: f64,
    highest: f64,
    weight_sum: f64,
    /// `s` of this step: the share of `z` in the average.
    share: f64,
    /// `1 - beta2^t`. As in `schedulefree`, `t` counts all steps of the run, also those in which a tensor has no gradient.
    correction: f64,
}

impl ScheduleFreeAdamW {
    /// The rule before the first step, with `r` and `weight_lr_power`.
    pub const fn new(betas: Betas, power: f64, rate_power: f64) -> Self {
        Self { betas, power, rate_power, highest: 0.0, weight_sum: 0.0, share: 0.0, correction: 1.0 }
    }
}

/// `torch.lerp`, rounded as PyTorch rounds it.
fn lerp(start: f32, end: f32, weight: f32) -> f32 {
    if weight.abs() < 0.5 { start + weight * (end - start) } else { end - (end - start) * (1.0 - weight) }
}

impl UpdateRule for ScheduleFreeAdamW {
    fn of(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Self> {
        if train.adam_beta1 == 0.0 {
            return Err(Error::config("train.adam_beta1 = 0 contradicts train.optim = schedule_free_adamw")
                .hint("it says how the average and the steps are mixed; the usual value is 0.9"));
        }
        let at_least_0 = |number: f64| number >= 0.0;
        let power = args.number("r", "a number of at least 0", at_least_0)?.unwrap_or(0.0);
        let rate_power = args.number("weight_lr_power", "a number of at least 0", at_least_0)?.unwrap_or(2.0);
        Ok(Self::new(train.into(), power, rate_power))
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        vec![StateSpec::like("z", slot), StateSpec::like("exp_avg_sq", slot)]
    }

    fn start(&self, values: Floats<'_>, state: &mut [State]) {
        state[0].floats().copy_from(values);
    }

    fn begin(&mut self, rate: f64, step: u64) {
        self.highest = self.highest.max(rate);
        let weight = (step as f64).powf(self.power) * self.highest.powf(self.rate_power);
        self.weight_sum += weight;
        self.correction = 1.0 - self.betas.beta2.powf(step as f64);
        self.share = if self.weight_sum == 0.0 { 0.0 } else { weight / self.weight_sum };
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let TensorUpdate { slot, values, grads, factor, rate, state, .. } = update;
        let factor = factor.known();
        let [State::F32(z), State::F32(v)] = state else { return };
        let betas = self.betas.of(slot);
        let (beta2, rest2) = (betas.beta2 as f32, (1.0 - betas.beta2) as f32);
        let correction = self.correction as f32;
        let (epsilon, decay) = (betas.epsilon as f32, betas.weight_decay as f32);
        let share = self.share as f32;
        let pace = (rate * (betas.beta1 * (1.0 - self.share) - 1.0)) as f32;
        let rate = rate as f32;
        let [mut z, mut v] = [z, v].map(|state| state.view_mut().on_host());
        let (mut values, grads) = (values.on_host(), grads.to_host());
        let state = z.par_chunks_mut(TASK).zip(v.par_chunks_mut(TASK));
        let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(state);
        parts.for_each(|((values, grads), (z, v))| {
            for (((y, grad), z), v) in values.iter_mut().zip(grads).zip(z).zip(v) {
                let grad = grad * factor;
                *v = flush_denormal(beta2 * *v + rest2 * grad * grad);
                let direction = grad / ((*v / correction).sqrt() + epsilon) + decay * *y;
                *y = lerp(*y, *z, share) + pace * direction;
                *z -= rate * direction;
            }
        });
    }

    fn scalars(&self) -> Vec<f64> {
        vec![self.highest, self.weight_sum]
    }

    fn set_scalars(&mut self, scalars: &[f64]) {
        (self.highest, self.weight_sum) = (scalars[0], scalars[1]);
    }

    fn averages(&self) -> bool {
        true
    }

    fn publish(&self, values: FloatsMut<'_>, state: &[State]) {
        let [State::F32(z), ..] = state else { return };
        let weight = (1.0 - 1.0 / self.betas.beta1) as f32;
        for (value, z) in values.on_host().iter_mut().zip(&*z.to_host()) {
            *value = lerp(*value, *z, weight);
        }
    }
}

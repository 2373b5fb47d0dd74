//! Schedule-free `AdamW` (Defazio et al., 2024), equal to `schedulefree.AdamWScheduleFree`. The trained weights are the
//! points `y` at which gradients are taken; `z` is the sequence that makes steps; the weights to evaluate, to save and
//! to publish are the averages `x = y + (1 - 1/beta1) (z - y)`.
use super::adamw::Betas;
use super::optimizer::{Rule, Slot, State, StateSpec, TASK, Update};
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_base::error::{Error, Result};
use rayon::prelude::*;

/// The rule; its state are `z` and the second moment, and for the run the weights of the average so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleFreeAdamW {
    /// `beta1` interpolates between `z` and the average.
    pub betas: Betas,
    /// The power of the step in the average's weights.
    pub power: f64,
    /// The power of the highest rate so far in them.
    pub rate_power: f64,
    highest: f64,
    weight_sum: f64,
    /// The share of `z` in the average, in this step.
    share: f64,
}

impl ScheduleFreeAdamW {
    /// Before the first step.
    pub const fn new(betas: Betas, power: f64, rate_power: f64) -> Self {
        Self { betas, power, rate_power, highest: 0.0, weight_sum: 0.0, share: 0.0 }
    }
}

/// `torch.lerp`, in its order.
fn lerp(start: f32, end: f32, weight: f32) -> f32 {
    if weight.abs() < 0.5 { start + weight * (end - start) } else { end - (end - start) * (1.0 - weight) }
}

impl Rule for ScheduleFreeAdamW {
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

    fn start(&self, values: &[f32], state: &mut [State]) {
        state[0].floats().copy_from_slice(values);
    }

    fn begin(&mut self, rate: f64, step: u64) {
        self.highest = self.highest.max(rate);
        let weight = (step as f64).powf(self.power) * self.highest.powf(self.rate_power);
        self.weight_sum += weight;
        self.share = if self.weight_sum == 0.0 { 0.0 } else { weight / self.weight_sum };
    }

    fn update(&self, update: Update<'_>) {
        let Update { slot, values, grads, factor, rate, step, state } = update;
        let [State::F32(z), State::F32(v)] = state else { return };
        let betas = self.betas.of(slot);
        let (beta2, rest2) = (betas.beta2 as f32, (1.0 - betas.beta2) as f32);
        let correction = (1.0 - betas.beta2.powf(step as f64)) as f32;
        let (epsilon, decay) = (betas.epsilon as f32, betas.weight_decay as f32);
        let share = self.share as f32;
        let pace = (rate * (betas.beta1 * (1.0 - self.share) - 1.0)) as f32;
        let rate = rate as f32;
        let state = z.par_chunks_mut(TASK).zip(v.par_chunks_mut(TASK));
        let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(state);
        parts.for_each(|((values, grads), (z, v))| {
            for (((y, grad), z), v) in values.iter_mut().zip(grads).zip(z).zip(v) {
                let grad = grad * factor;
                *v = beta2 * *v + rest2 * grad * grad;
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

    fn publish(&self, values: &mut [f32], state: &[State]) {
        let [State::F32(z), ..] = state else { return };
        let weight = (1.0 - 1.0 / self.betas.beta1) as f32;
        for (value, z) in values.iter_mut().zip(z) {
            *value = lerp(*value, *z, weight);
        }
    }
}

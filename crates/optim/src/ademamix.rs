//! `AdEMAMix`: Pagliardini et al., 2024, <https://arxiv.org/abs/2409.03137>. `AdamW` with a second, slow first moment
//! that is added `alpha` times. Equal to the 32-bit `AdEMAMix` of bitsandbytes, with its warm-up of `alpha` and
//! `beta3`.
//!
//! ```text
//! fast = beta1 fast + (1 - beta1) g
//! slow = beta3 slow + (1 - beta3) g
//! v    = beta2 v + (1 - beta2) g^2
//! w    = (1 - rate decay) w - rate (fast / (1 - beta1^t) + alpha slow) / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
//! ```
use super::adamw::Betas;
use super::optimizer::{Slot, State, StateSpec, TensorUpdate, UpdateRule};
use super::share;
use rayon::prelude::*;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_ops::denormal::flush_denormal;
use tunesmith_ops::par::TASK;

/// The update rule of `AdEMAMix`. Its state is `exp_avg` (`fast`), `exp_avg_slow` and `exp_avg_sq` (`v`) in float32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdEmaMix {
    /// `beta1`, `beta2`, `epsilon` and the weight decay.
    pub betas: Betas,
    /// Decay of the slow moment, in 0..1.
    pub beta3: f64,
    /// The weight of the slow moment.
    pub alpha: f64,
    /// Steps over which `alpha` rises from 0; `None` for the full `alpha` from the first step on.
    pub alpha_steps: Option<u64>,
    /// Steps over which the slow moment's decay rises from `beta1` to `beta3`, with a linearly growing half-life;
    /// `None` for `beta3` from the first step on.
    pub beta3_steps: Option<u64>,
}

impl AdEmaMix {
    /// `alpha` and `beta3` in a step; steps count from 1.
    fn at(&self, step: u64) -> (f64, f64) {
        let share = |steps: u64| step as f64 / steps as f64;
        let alpha = self.alpha_steps.map_or(self.alpha, |steps| self.alpha.min(self.alpha * share(steps)));
        let beta3 = self.beta3_steps.map_or(self.beta3, |steps| {
            let (fast, slow) = (self.betas.beta1.ln(), self.beta3.ln());
            let between = (1.0 - share(steps)) * slow + share(steps) * fast;
            self.beta3.min((fast * slow / between).exp())
        });
        (alpha, beta3)
    }
}

impl UpdateRule for AdEmaMix {
    fn of(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Self> {
        let rule = Self {
            betas: train.into(),
            beta3: share(args, "beta3")?.unwrap_or(0.9999),
            alpha: args.number("alpha", "a number of at least 0", |number| number >= 0.0)?.unwrap_or(5.0),
            alpha_steps: args.count("t_alpha", 1)?,
            beta3_steps: args.count("t_beta3", 1)?,
        };
        if rule.beta3_steps.is_some() && (rule.betas.beta1 == 0.0 || rule.beta3 == 0.0) {
            return Err(Error::config("train.optim_args: t_beta3 needs train.adam_beta1 and beta3 above 0")
                .hint("the decay of the slow moment rises from adam_beta1 to beta3; remove t_beta3, or set them"));
        }
        Ok(rule)
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        ["exp_avg", "exp_avg_slow", "exp_avg_sq"].map(|name| StateSpec::like(name, slot)).to_vec()
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let TensorUpdate { slot, values, grads, factor, rate, step, state } = update;
        let factor = factor.known();
        let [State::F32(fast), State::F32(slow), State::F32(v)] = state else { return };
        let (Betas { beta1, beta2, epsilon, weight_decay }, exponent) = (self.betas.of(slot), step as f64);
        let (alpha, beta3) = self.at(step);
        let keep = (1.0 - rate * weight_decay) as f32;
        let rests = [1.0 - beta1, 1.0 - beta2, 1.0 - beta3].map(|rest| rest as f32);
        let betas = [beta1, beta2, beta3].map(|beta| beta as f32);
        let correction = (1.0 - beta1.powf(exponent)) as f32;
        let root = (1.0 - beta2.powf(exponent)).sqrt() as f32;
        let (alpha, rate, epsilon) = (alpha as f32, rate as f32, epsilon as f32);
        let [mut fast, mut slow, mut v] = [fast, slow, v].map(|moment| moment.view_mut().on_host());
        let (mut values, grads) = (values.on_host(), grads.to_host());
        let state = fast.par_chunks_mut(TASK).zip(slow.par_chunks_mut(TASK)).zip(v.par_chunks_mut(TASK));
        let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(state);
        parts.for_each(|((values, grads), ((fast, slow), v))| {
            for ((((value, grad), fast), slow), v) in values.iter_mut().zip(grads).zip(fast).zip(slow).zip(v) {
                let grad = grad * factor;
                *fast = flush_denormal(betas[0] * *fast + rests[0] * grad);
                *slow = flush_denormal(betas[2] * *slow + rests[2] * grad);
                *v = flush_denormal(betas[1] * *v + rests[1] * grad * grad);
                let direction = (*fast / correction + alpha * *slow) / (v.sqrt() / root + epsilon);
                *value = *value * keep - rate * direction;
            }
        });
    }
}

//! Stochastic gradient descent with momentum, equal to `torch.optim.SGD`. Weight decay is part of the gradient, not
//! decoupled from it.
//!
//! ```text
//! d = g + decay w
//! m = momentum m + (1 - dampening) d           the first step: m = d
//! w = w - rate (nesterov: d + momentum m, else m)
//! ```
use super::optimizer::{Slot, State, StateSpec, TensorUpdate, UpdateRule};
use super::share;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_ops::sgd;

/// The update rule of SGD. Its state is `momentum_buffer`, or nothing if `momentum` is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Decay of the momentum, in 0..1.
    pub momentum: f64,
    /// Dampening of the momentum after the first step, in 0..=1.
    pub dampening: f64,
    /// Whether to use Nesterov momentum. Needs a momentum and no dampening.
    pub nesterov: bool,
    /// Weight decay: this share of a weight is added to its gradient.
    pub weight_decay: f64,
}

impl UpdateRule for Sgd {
    fn of(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Self> {
        let rule = Self {
            momentum: share(args, "momentum")?.unwrap_or(0.0),
            dampening: args.number("dampening", "a number from 0 to 1", |it| (0.0..=1.0).contains(&it))?.unwrap_or(0.0),
            nesterov: args.flag("nesterov")?.unwrap_or(false),
            weight_decay: train.weight_decay,
        };
        if rule.nesterov && (rule.momentum == 0.0 || rule.dampening != 0.0) {
            return Err(Error::config("train.optim_args: nesterov needs a momentum and no dampening")
                .hint("set momentum=0.9,nesterov=true"));
        }
        Ok(rule)
    }

    fn state(&self, slot: &Slot) -> Vec<StateSpec> {
        if self.momentum == 0.0 { Vec::new() } else { vec![StateSpec::like("momentum_buffer", slot)] }
    }

    fn takes_found_factor(&self) -> bool {
        true
    }

    fn update(&self, update: TensorUpdate<'_>) {
        let TensorUpdate { slot, values, grads, factor, rate, step, state } = update;
        let constants = sgd::Step {
            factor,
            rate,
            momentum: self.momentum,
            dampening: if step == 1 { 0.0 } else { self.dampening },
            nesterov: self.nesterov,
            weight_decay: if slot.decay { self.weight_decay } else { 0.0 },
        };
        sgd::update(values, grads, state.first_mut().map(State::floats), &constants);
    }
}

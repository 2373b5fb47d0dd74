//! The optimizer of a run: which tensors it sees at which rates, and the averages that are evaluated and published.
use super::session::Session;
use crate::config::{Config, TrainConfig};
use crate::error::Result;
use crate::model::params::{ParamSpec, Params};
use crate::optim::{Ema, LossScaler, Optimizer, Slot, loss_scale, rates, registry};

/// The trained tensors as an optimizer sees them.
pub fn slots(specs: &[ParamSpec]) -> Vec<Slot> {
    let slot = |spec: &ParamSpec| Slot {
        name: spec.name.clone(),
        shape: spec.shape.clone(),
        decay: spec.decay,
        lr_scale: spec.lr_scale,
    };
    specs.iter().map(slot).collect()
}

/// The optimizer that a configuration asks for, before its first step; gives the tensors their learning rates.
///
/// # Errors
/// [`crate::Kind::Config`]: arguments or patterns that fit nothing.
pub fn fresh(config: &Config, params: &mut Params) -> Result<Optimizer> {
    let tensors: Vec<_> = params.specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
    let scales = rates::scales(&config.train, config.tuning.lora.loraplus_lr_ratio, &tensors)?;
    for (spec, scale) in params.specs.iter_mut().zip(scales) {
        spec.lr_scale = scale;
    }
    let mut optimizer = Optimizer::new(registry::rule(&config.train)?, slots(&params.specs), params.values());
    optimizer.scaler = config.train.fp16.then(|| LossScaler::new(loss_scale(&config.train)));
    Ok(optimizer)
}

/// The loss scale that a configuration asks for.
fn loss_scale(train: &TrainConfig) -> loss_scale::Settings {
    let dynamic = train.loss_scale == 0.0;
    loss_scale::Settings {
        initial: if dynamic { 2f64.powi(train.initial_scale_power as i32) } else { train.loss_scale },
        window: train.loss_scale_window,
        hysteresis: train.hysteresis,
        least: train.min_loss_scale,
        dynamic,
    }
}

/// The moving average that a configuration asks for, before the first step.
pub fn average(config: &Config, params: &Params) -> Option<Ema> {
    config.train.ema_decay.map(|decay| Ema::new(decay, params.values()))
}

impl Session<'_> {
    /// The weights to evaluate and to publish, where they are not those that are trained.
    fn take_averages(&mut self) -> Option<Vec<f32>> {
        if let Some(ema) = &mut self.ema {
            return Some(std::mem::take(&mut ema.values));
        }
        self.optimizer.averages().then(|| {
            let mut values = self.model.params.values().to_vec();
            self.optimizer.publish(&mut values);
            values
        })
    }

    /// Does something while the model holds the weights to publish; the trained ones are then at hand beside them, if
    /// they are others, and stand in the model again afterwards, bit by bit.
    ///
    /// # Errors
    /// Those of `act`.
    pub fn published<T>(&mut self, act: impl FnOnce(&mut Self, Option<&[f32]>) -> Result<T>) -> Result<T> {
        let Some(mut other) = self.take_averages() else { return act(self, None) };
        self.model.params.values_mut().swap_with_slice(&mut other);
        let done = act(self, Some(&other));
        self.model.params.values_mut().swap_with_slice(&mut other);
        if let Some(ema) = &mut self.ema {
            ema.values = other;
        }
        done
    }

    /// Ends the training: the model holds the weights to publish from here on.
    pub fn publish(&mut self) {
        if let Some(averages) = self.take_averages() {
            self.model.params.values_mut().copy_from_slice(&averages);
            self.ema = None;
        }
    }
}

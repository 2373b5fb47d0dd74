//! The optimizer of a run: which tensors it sees at which rates, and the averages that are evaluated and published.
use super::session::Session;
use super::sharing::{self, Sharing};
use tunesmith_base::error::Result;
use tunesmith_comm::World;
use tunesmith_config::{Config, TrainConfig};
use tunesmith_model::params::{ParamSpec, Params};
use tunesmith_optim::optimizer::legal_cuts;
use tunesmith_optim::{Ema, LossScaler, Optimizer, Slot, loss_scale, rates, rule};

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
/// [`tunesmith_base::Kind::Config`]: arguments or patterns that fit nothing.
pub fn fresh(config: &Config, params: &mut Params) -> Result<Optimizer> {
    shared(config, params, World::ALONE).map(|(optimizer, _)| optimizer)
}

/// As [`fresh`], with the share of the state that this rank keeps, and who keeps what.
///
/// # Errors
/// As [`fresh`].
pub fn shared(config: &Config, params: &mut Params, world: World) -> Result<(Optimizer, Sharing)> {
    let tensors: Vec<_> = params.specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
    let scales = rates::scales(&config.train, config.tuning.lora.loraplus_lr_ratio, &tensors)?;
    for (spec, scale) in params.specs.iter_mut().zip(scales) {
        spec.lr_scale = scale;
    }
    let (rule, slots) = (rule(&config.train)?, slots(&params.specs));
    let partition = sharing::partition(params, world.size, legal_cuts(&*rule, &slots));
    let sharing = Sharing::new(&config.train, partition, world.rank);
    let mut optimizer = Optimizer::shared(rule, slots, params.values(), &sharing.kept());
    optimizer.scaler = config.train.fp16.then(|| LossScaler::new(loss_scale(&config.train)));
    Ok((optimizer, sharing))
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

/// The moving average that a configuration asks for, before the first step: of what this rank keeps the state of.
pub fn average(config: &Config, params: &Params, sharing: &Sharing) -> Option<Ema> {
    config.train.ema_decay.map(|decay| Ema::shared(decay, params.values(), sharing.kept()))
}

impl Session<'_> {
    /// The weights to evaluate and to publish, where they are not those that are trained: of what this rank keeps the
    /// state of.
    fn take_averages(&mut self) -> Option<Vec<f32>> {
        if let Some(ema) = &mut self.ema {
            return Some(std::mem::take(&mut ema.values));
        }
        self.optimizer.averages().then(|| {
            let values = self.model.params.values();
            let whole = self.sharing.shares_state() && !self.sharing.shares_values();
            let mut kept = if whole { self.sharing.pack(values) } else { values.to_vec() };
            self.optimizer.publish(&mut kept);
            kept
        })
    }

    /// Does something while the model holds the weights to publish; the trained ones are then at hand beside them, if
    /// they are others (those of the ranges that this rank keeps the state of, end to end), and stand in the model again
    /// afterwards, bit by bit. All ranks do so together where they share the state.
    ///
    /// # Errors
    /// Those of `act`; [`tunesmith_base::Kind::Peer`].
    pub fn published<T>(&mut self, act: impl FnOnce(&mut Self, Option<&[f32]>) -> Result<T>) -> Result<T> {
        let Some(mut other) = self.take_averages() else { return act(self, None) };
        self.exchange_values(&mut other)?;
        // After an error nothing is published any more, and other ranks may be gone.
        let done = act(self, Some(&other))?;
        self.exchange_values(&mut other)?;
        if let Some(ema) = &mut self.ema {
            ema.values = other;
        }
        Ok(done)
    }

    /// Changes what the model holds with what is kept of it here.
    fn exchange_values(&mut self, kept: &mut [f32]) -> Result<()> {
        let values = self.model.params.values_mut();
        if !self.sharing.shares_state() || self.sharing.shares_values() {
            values.swap_with_slice(kept);
            return Ok(());
        }
        self.sharing.swap(values, kept);
        self.sharing.gather(&*self.comm, values)
    }

    /// Ends the training: the model holds the weights to publish from here on.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`], where ranks share the state.
    pub fn publish(&mut self) -> Result<()> {
        if let Some(mut averages) = self.take_averages() {
            self.exchange_values(&mut averages)?;
            self.ema = None;
        }
        Ok(())
    }
}

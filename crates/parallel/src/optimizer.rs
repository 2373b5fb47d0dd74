//! The optimizer of a run: which tensors it sees, at which learning rates, and which share of its state this rank keeps.
use super::ddp_zero::{self, Sharing};
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
    let partition = ddp_zero::partition(params, world.size, legal_cuts(&*rule, &slots));
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

//! The settings of a run's optimizer, decided once from the configuration.
use std::collections::BTreeMap;
use std::sync::Arc;

use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;

use super::{UpdateRule, loss_scale, rates, rule};

/// A run's optimizer: plain decisions, without optional settings.
#[derive(Debug, Clone)]
pub struct OptimizerPlan {
    /// The update rule before its first step; [`UpdateRule::boxed`](super::optimizer::CloneRule::boxed) gives a run its own.
    pub rule: Arc<dyn UpdateRule>,
    /// By the name of each trained tensor: its learning rate divided by that of the run.
    pub lr_scales: BTreeMap<String, f64>,
    /// How the loss scale starts and moves, with float16 activations.
    pub loss_scale: Option<loss_scale::LossScaleSettings>,
    /// The decay of the moving average of the trained values, if one is kept.
    pub ema_decay: Option<f64>,
    /// Whether optimizer state is offloaded from a GPU to the host's memory.
    pub offload: bool,
    /// The global gradient norm above which gradients are clipped; 0 turns clipping off.
    pub max_grad_norm: f64,
}

impl OptimizerPlan {
    /// The plan for trained tensors of these names and shapes. `loraplus_lr_ratio` is what LoRA+ multiplies the rate of B
    /// matrices by.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: an argument that the optimizer does not have, or a pattern of
    /// `train.learning_rates` that matches no tensor.
    pub fn new(train: &TrainConfig, loraplus_lr_ratio: Option<f64>, tensors: &[(String, Vec<usize>)]) -> Result<Self> {
        let scales = rates::scales(train, loraplus_lr_ratio, tensors)?;
        Ok(Self {
            rule: rule(train)?.into(),
            lr_scales: tensors.iter().map(|(name, _)| name.clone()).zip(scales).collect(),
            loss_scale: train.fp16.then(|| loss_scale(train)),
            ema_decay: train.ema_decay,
            offload: train.offload_optimizer,
            max_grad_norm: train.max_grad_norm,
        })
    }
}

fn loss_scale(train: &TrainConfig) -> loss_scale::LossScaleSettings {
    let dynamic = train.loss_scale == 0.0;
    loss_scale::LossScaleSettings {
        initial: if dynamic { 2f64.powi(train.initial_scale_power as i32) } else { train.loss_scale },
        window: train.loss_scale_window,
        hysteresis: train.hysteresis,
        least: train.min_loss_scale,
        dynamic,
    }
}

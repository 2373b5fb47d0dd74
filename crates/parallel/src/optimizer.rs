//! The optimizer of a rank: the tensors it updates, their learning rates, and its part of the state.
use super::ddp_zero::{self, Sharing};
use super::plan::ParallelPlan;
use tunesmith_base::error::{Error, Result};
use tunesmith_comm::World;
use tunesmith_model::params::{ParamSpec, Params};
use tunesmith_optim::optimizer::legal_cuts;
use tunesmith_optim::{Ema, LossScaler, Optimizer, OptimizerPlan, Slot};

/// The trained tensors as an optimizer sees them, in the order of the flat buffer.
pub fn slots(specs: &[ParamSpec]) -> Vec<Slot> {
    let slot = |spec: &ParamSpec| Slot {
        name: spec.name.clone(),
        shape: spec.shape.clone(),
        decay: spec.decay,
        lr_scale: spec.lr_scale,
        vision: spec.vision,
    };
    specs.iter().map(slot).collect()
}

/// The names and shapes of the trained tensors, for [`OptimizerPlan::new`].
pub fn tensors(specs: &[ParamSpec]) -> Vec<(String, Vec<usize>)> {
    specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect()
}

/// The optimizer of this rank before its first step, with a learning rate for each tensor, and how this rank shares values,
/// gradients, and state with the others.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: a trained tensor is missing from the plan.
///
/// # Panics
/// If `parallel` is the plan of another number of ranks.
pub fn shared(
    optimizer: &OptimizerPlan,
    parallel: &ParallelPlan,
    params: &mut Params,
    world: World,
) -> Result<(Optimizer, Sharing)> {
    assert_eq!(parallel.ranks, world.size, "a plan for every rank of the world");
    for spec in &mut params.specs {
        let scale = optimizer.lr_scales.get(&spec.name);
        spec.lr_scale = *scale.ok_or_else(|| Error::model(format!("no learning rate is planned for {}", spec.name)))?;
    }
    let (rule, slots) = (optimizer.rule.boxed(), slots(&params.specs));
    let partition = ddp_zero::partition(params, world.size, legal_cuts(&*rule, &slots));
    let sharing = Sharing::new(parallel, partition, world.rank);
    let mut made = Optimizer::shared(rule, slots, params.values(), &sharing.kept(), optimizer.offload);
    made.scaler = optimizer.loss_scale.map(LossScaler::new);
    Ok((made, sharing))
}

/// The moving average before the first step: of the values whose optimizer state this rank keeps.
pub fn average(plan: &OptimizerPlan, params: &Params, sharing: &Sharing) -> Option<Ema> {
    plan.ema_decay.map(|decay| Ema::shared(decay, params.values(), sharing.kept()))
}

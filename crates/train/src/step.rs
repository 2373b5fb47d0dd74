//! One optimizer step: forward, backward, all-reduce, clipping, and update.
use super::coefficient_limits;
use std::time::Duration;
use tunesmith_base::error::{Error, Result};
use tunesmith_comm::Collectives;
use tunesmith_data::batch::Batch;
use tunesmith_device::Late;
use tunesmith_model::Model;
use tunesmith_optim::{LossScaler, Optimizer, clip};

use tunesmith_parallel::ddp_zero::{Sharing, Walked};

/// The results of an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepStats {
    /// Mean cross-entropy over the label tokens of the effective batch, weighted by the weights of the rows.
    pub loss: f64,
    /// The same over this rank's part of the batch.
    pub rank_loss: f64,
    /// Correctly predicted rows of a classification in the effective batch, before the update.
    pub right: u64,
    /// L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Label tokens of the effective batch.
    pub label_tokens: u64,
    /// Tokens of the effective batch.
    pub tokens: u64,
    /// Whether the loss or the gradient was not finite, so that nothing was updated.
    pub skipped: bool,
    /// Whether the step was skipped and a lower loss scale may help.
    pub overflow: bool,
}

/// A step of a run whose results are not recorded yet, with what was known when it ended.
#[derive(Debug)]
pub struct UnsettledStep {
    /// The results of the step, which a GPU may deliver later.
    pub stats: Late<StepStats>,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// The wall time of the step.
    pub took: Duration,
    /// The most memory that the process had held by then, in bytes.
    pub peak_bytes: u64,
    /// The loss scale that the next step will use; `None` unless in float16 training.
    pub loss_scale: Option<f64>,
}

/// The result of an attempt at a step.
#[derive(Debug)]
pub enum Attempt {
    /// The step is done, and the weights are updated. Its results may come later.
    Done(Late<StepStats>),
    /// A micro-batch did not fit into the memory budget of some rank. No rank has updated anything, so the same step can be
    /// repeated with another split.
    TooLarge {
        /// The first micro-batch of this rank that did not fit; `None` if only another rank ran out of memory.
        micro_batch: Option<usize>,
        /// The memory error.
        error: Error,
    },
}

impl Attempt {
    /// Waits for the results of the step, for callers that do not repeat it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Memory`]: the step does not fit into the memory budget.
    pub fn done(self) -> Result<StepStats> {
        match self {
            Self::Done(stats) => Ok(stats.wait()),
            Self::TooLarge { error, .. } => Err(error),
        }
    }
}

/// Runs [`attempt`] once, with nothing sharded between ranks.
///
/// # Errors
/// As [`attempt`]; [`tunesmith_base::Kind::Memory`]: the step does not fit into the memory budget.
pub fn step(
    model: &mut Model,
    optimizer: &mut Optimizer,
    comm: &dyn Collectives,
    micro_batches: &[Batch],
    rate: f64,
    max_grad_norm: f64,
) -> Result<StepStats> {
    let mut sharing = Sharing::copies(&model.params, optimizer, comm.world());
    attempt(model, optimizer, comm, &mut sharing, micro_batches, rate, max_grad_norm)?.done()
}

/// Trains `model` on one effective batch. `micro_batches` are this rank's part of it.
///
/// The loss is the sum over the label tokens of the effective batch, divided by their number. With row weights, it is divided
/// by the sum of the tokens' weights. So neither the number of micro-batches nor of ranks changes it.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`] for a token outside the vocabulary, [`tunesmith_base::Kind::Peer`] for a rank that is gone,
/// [`tunesmith_base::Kind::Numeric`] if the values of ranks are compared and differ, or a trained weight passes a limit of its family.
pub fn attempt(
    model: &mut Model,
    optimizer: &mut Optimizer,
    comm: &dyn Collectives,
    sharing: &mut Sharing,
    micro_batches: &[Batch],
    rate: f64,
    max_grad_norm: f64,
) -> Result<Attempt> {
    // Count, because the divisor must be known before any backward pass.
    let counts = comm.collect(&[
        micro_batches.iter().map(|batch| batch.label_tokens() as u64).sum(),
        micro_batches.iter().map(|batch| batch.tokens.len() as u64).sum(),
        micro_batches.len() as u64,
        micro_batches.iter().map(|batch| batch.images.len() as u64).sum(),
    ])?;
    let of_ranks = |which: usize| counts.iter().skip(which).step_by(4).copied();
    let (label_tokens, tokens, passes): (u64, u64, u64) = (of_ranks(0).sum(), of_ranks(1).sum(), of_ranks(2).sum());
    let most_passes = of_ranks(2).max().unwrap_or(0) as usize;
    optimizer.images = of_ranks(3).any(|images| images > 0);
    let own_weight: f64 = micro_batches.iter().map(Batch::label_weight).sum();
    let mut weight = [own_weight];
    comm.all_reduce(&mut weight)?;
    let [weight] = weight;
    let scale = if weight > 0.0 { 1.0 / weight as f32 } else { 0.0 };

    // Forward and backward. Gradients are summed over ranks during the last passes.
    let loss_scale = optimizer.scaler.as_ref().map_or(1.0, LossScaler::scale);
    model.loss_scale = loss_scale as f32;
    model.totals.begin(model.device());
    let share = 1.0 / passes.max(1) as f32;
    let step = optimizer.step;
    let Walked { failed } = sharing.passes(model, comm, micro_batches, most_passes, &mut |model, batch, grads| {
        model.forward_backward_into(batch, scale, share, step, grads)
    })?;
    // A rank without memory stops all ranks here, before anything is updated.
    let mut short = [u64::from(failed.is_some())];
    comm.all_reduce(&mut short)?;
    if short != [0] {
        let (micro_batch, error) = failed.unzip();
        let error = error.unwrap_or_else(|| Error::memory("another rank has no memory for its micro-batch"));
        return Ok(Attempt::TooLarge { micro_batch, error });
    }

    // Update.
    sharing.compare(comm, model)?;
    let mean = |total: f64, weight: f64| if weight > 0.0 { total / weight } else { 0.0 };
    let (total, right, loss, grad_norm);
    if let Some(verdict) = sharing.verdict(model, optimizer, max_grad_norm, loss_scale) {
        // A GPU by itself: the update is asked for before the host waits for the norm, which is then computed beside it.
        sharing.update(model, optimizer, comm, verdict.factor(), rate)?;
        let [norm, totals @ ..] = verdict.read();
        grad_norm = norm;
        (total, right) = model.totals.with(&totals);
        loss = mean(total, weight);
        if !(loss.is_finite() && grad_norm.is_finite()) {
            optimizer.uncount();
        }
    } else {
        let own = model.totals.read();
        let mut sum = [own.0, own.1 as f64];
        comm.all_reduce(&mut sum)?;
        (total, right, loss) = (own.0, sum[1] as u64, mean(sum[0], weight));
        grad_norm = sharing.norm(comm, model)? / loss_scale;
        if loss.is_finite() && grad_norm.is_finite() {
            let factor = clip::factor(grad_norm, max_grad_norm) / loss_scale as f32;
            sharing.update(model, optimizer, comm, factor.into(), rate)?;
        }
    }
    coefficient_limits::check(model, comm)?;
    let skipped = !(loss.is_finite() && grad_norm.is_finite());
    let rank_loss = mean(total, own_weight);
    let overflow = skipped && optimizer.scaler.as_ref().is_some_and(LossScaler::can_fall);
    if let Some(scaler) = &mut optimizer.scaler {
        scaler.update(skipped);
    }
    let right = if model.arch.score.as_ref().is_some_and(|head| !head.is_number()) { right } else { 0 };
    let stats = StepStats { loss, rank_loss, right, grad_norm, label_tokens, tokens, skipped, overflow };
    Ok(Attempt::Done(Late::ready(stats)))
}

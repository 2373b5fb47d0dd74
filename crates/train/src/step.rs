//! ONE optimizer step, on one screen.
use tunesmith_base::error::{Error, Result};
use tunesmith_comm::Collectives;
use tunesmith_data::batch::Batch;
use tunesmith_model::Model;
use tunesmith_optim::{LossScaler, Optimizer, clip};

use tunesmith_parallel::ddp_zero::{Sharing, Walked};

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepStats {
    /// Mean cross-entropy over the label tokens of the whole effective batch, each counted with its row's weight.
    pub loss: f64,
    /// The same over this rank's part of it.
    pub rank_loss: f64,
    /// Rows of a classification whose label was found, of the whole effective batch and before the update.
    pub right: u64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Label tokens of the whole effective batch.
    pub label_tokens: u64,
    /// Tokens of the whole effective batch.
    pub tokens: u64,
    /// Loss or gradient was not finite: nothing was updated.
    pub skipped: bool,
    /// The same, where a lower loss scale may help.
    pub overflow: bool,
}

/// How an attempt at a step ended.
#[derive(Debug)]
pub enum Attempt {
    /// The weights are those after the step.
    Done(StepStats),
    /// A micro-batch did not fit into the memory budget of some rank. Nothing was updated, on any rank: the same step can
    /// be tried again, cut otherwise.
    TooLarge {
        /// This rank's first micro-batch that did not fit; none where it was another rank's.
        micro_batch: Option<usize>,
        /// What did not fit.
        error: Error,
    },
}

impl Attempt {
    /// What the step did, where there is no other way to cut the batch.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Memory`]: it does not fit into the memory budget.
    pub fn done(self) -> Result<StepStats> {
        match self {
            Self::Done(stats) => Ok(stats),
            Self::TooLarge { error, .. } => Err(error),
        }
    }
}

/// As [`attempt`] with every rank keeping everything, where there is no other way to cut the batch.
///
/// # Errors
/// As [`attempt`]; [`tunesmith_base::Kind::Memory`]: it does not fit into the memory budget.
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

/// Trains `model` on one effective batch, whose micro-batches are this rank's share of it.
///
/// The loss is the sum over label tokens divided by their number (where rows have weights, by the sum of the tokens'
/// weights) in the whole effective batch, so that neither the number of micro-batches nor of ranks changes it.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`] for a token outside the vocabulary, [`tunesmith_base::Kind::Peer`] for a rank that is gone,
/// [`tunesmith_base::Kind::Numeric`] for ranks whose values differ, where they are compared.
pub fn attempt(
    model: &mut Model,
    optimizer: &mut Optimizer,
    comm: &dyn Collectives,
    sharing: &mut Sharing,
    micro_batches: &[Batch],
    rate: f64,
    max_grad_norm: f64,
) -> Result<Attempt> {
    // Count: the divisor is known before any backward starts.
    let counts = comm.collect(&[
        micro_batches.iter().map(|batch| batch.label_tokens() as u64).sum(),
        micro_batches.iter().map(|batch| batch.tokens.len() as u64).sum(),
        micro_batches.len() as u64,
    ])?;
    let of_ranks = |which: usize| counts.iter().skip(which).step_by(3).copied();
    let (label_tokens, tokens, passes): (u64, u64, u64) = (of_ranks(0).sum(), of_ranks(1).sum(), of_ranks(2).sum());
    let most_passes = of_ranks(2).max().unwrap_or(0) as usize;
    let own_weight: f64 = micro_batches.iter().map(Batch::label_weight).sum();
    let mut weight = [own_weight];
    comm.all_reduce(&mut weight)?;
    let [weight] = weight;
    let scale = if weight > 0.0 { 1.0 / weight as f32 } else { 0.0 };

    // Forward and backward; gradients are summed over ranks while the last passes go on.
    let loss_scale = optimizer.scaler.as_ref().map_or(1.0, LossScaler::scale);
    model.loss_scale = loss_scale as f32;
    model.right = 0;
    let share = 1.0 / passes.max(1) as f32;
    let step = optimizer.step;
    let Walked { total, failed } =
        sharing.passes(model, comm, micro_batches, most_passes, &mut |model, batch, grads| {
            model.forward_backward_into(batch, scale, share, step, grads)
        })?;
    // A rank that has no room stops all of them here, before anything is updated.
    let mut short = [u64::from(failed.is_some())];
    comm.all_reduce(&mut short)?;
    if short != [0] {
        let (micro_batch, error) = failed.unzip();
        let error = error.unwrap_or_else(|| Error::memory("another rank has no room for its micro-batch"));
        return Ok(Attempt::TooLarge { micro_batch, error });
    }

    // Update.
    sharing.compare(comm, model)?;
    let mut sum = [total, model.right as f64];
    comm.all_reduce(&mut sum)?;
    let [total_loss, right] = sum;
    let loss = if weight > 0.0 { total_loss / weight } else { 0.0 };
    let grad_norm = sharing.norm(comm, model)? / loss_scale;
    let skipped = !(loss.is_finite() && grad_norm.is_finite());
    if !skipped {
        let factor = clip::factor(grad_norm, max_grad_norm) / loss_scale as f32;
        sharing.update(model, optimizer, comm, factor, rate)?;
    }
    let rank_loss = if own_weight > 0.0 { total / own_weight } else { 0.0 };
    let overflow = skipped && optimizer.scaler.as_ref().is_some_and(LossScaler::can_fall);
    if let Some(scaler) = &mut optimizer.scaler {
        scaler.update(skipped);
    }
    let right = right as u64;
    Ok(Attempt::Done(StepStats { loss, rank_loss, right, grad_norm, label_tokens, tokens, skipped, overflow }))
}

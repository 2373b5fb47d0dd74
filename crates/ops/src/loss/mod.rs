//! Cross-entropy over a chunk of logits, `nll[t] = logsumexp(l[t]) - l[t, target[t]]`. It gives the losses, and
//! replaces the logits by the exponentials that the gradient needs.
//!
//! The gradient of `scale * sum_t nll[t]` with respect to the logits is `scale (softmax - onehot)`. Where possible,
//! [`linear`] does not form it: it multiplies the unnormalised exponentials by the weight, and corrects each token by a
//! factor and one row of the weight.
mod cpu;
mod cuda;
pub mod linear;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
mod totals;

pub use totals::Totals;

use crate::activation::Activation;
use tunesmith_device::{Array, Device};

/// The loss of one token.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenLoss {
    /// The negative log-likelihood of the target. For [`squared`] it is the squared error, and the other fields are
    /// zero.
    pub nll: f32,
    /// The sum of `exp(logit - max)`.
    pub sum: f32,
    /// The log-sum-exp of the logits.
    pub lse: f32,
    /// Whether no logit is larger than the target's: the prediction is right.
    pub right: bool,
}

/// The losses of some tokens, on the device that computed them. Reading them waits for a GPU.
#[derive(Debug)]
pub struct Losses(Results);

#[derive(Debug)]
enum Results {
    Host(Vec<TokenLoss>),
    /// Four numbers for each token: the fields of [`TokenLoss`], in their order.
    Gpu(Array<f32>),
}

impl Losses {
    /// Copies the loss of each token to the host; waits for a GPU.
    pub fn read(self) -> Vec<TokenLoss> {
        match self.0 {
            Results::Host(losses) => losses,
            Results::Gpu(losses) => {
                let of = |four: &[f32]| TokenLoss { nll: four[0], sum: four[1], lse: four[2], right: four[3] != 0.0 };
                losses.read().chunks_exact(4).map(of).collect()
            }
        }
    }
}

/// Replaces `logits [tokens, vocabulary]` by `exp(logit - max)`, and returns each token's loss. `targets` is
/// `[tokens]`. Losses are zero on the meta device.
///
/// # Panics
/// If a target is not below `vocabulary`, or the shapes do not fit.
pub fn cross_entropy(logits: &mut Activation, targets: &[u32]) -> Losses {
    assert_eq!(targets.len(), logits.tokens(), "a target for each token");
    match logits.device() {
        Device::Cpu => {
            let mut out = vec![TokenLoss::default(); targets.len()];
            cpu::cross_entropy(logits, targets, &mut out);
            Losses(Results::Host(out))
        }
        Device::Cuda(_) => Losses(Results::Gpu(cuda::cross_entropy(logits, targets))),
        Device::Meta => Losses(Results::Host(vec![TokenLoss::default(); targets.len()])),
    }
}

/// The terms of an objective besides plain cross-entropy; zero for none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Terms {
    /// Label smoothing: how much of a label's weight is spread over the whole vocabulary.
    pub smoothing: f32,
    /// The factor of the z-loss, `logsumexp(logits)^2`.
    pub z: f32,
}

impl Terms {
    /// Whether the objective is plain cross-entropy.
    pub fn is_plain(self) -> bool {
        self == Self::default()
    }
}

/// Replaces `logits [tokens, vocabulary]` by the gradient of `sum_t scales[t] objective[t]`, and returns each token's
/// loss without the further terms. `targets` and `scales` are `[tokens]`.
///
/// With `lse = logsumexp(l)`: `objective = lse - (1 - smoothing) l[target] - smoothing mean(l) + z lse^2`. Its gradient
/// is `(1 + 2 z lse) softmax(l) - (1 - smoothing) onehot - smoothing / vocabulary`.
///
/// # Panics
/// As [`cross_entropy`].
pub fn gradient(logits: &mut Activation, targets: &[u32], scales: &[f32], terms: Terms) -> Losses {
    assert_eq!(targets.len(), scales.len(), "a scale for each target");
    let losses = cross_entropy(logits, targets);
    match &losses.0 {
        Results::Host(_) if logits.is_meta() => {}
        Results::Host(losses) => cpu::gradient(logits, targets, scales, terms, losses),
        Results::Gpu(losses) => cuda::gradient(logits, targets, scales, terms, losses),
    }
    losses
}

/// Replaces `values [tokens, 1]` by the gradient of `sum_t scales[t] (value - target)^2`, and returns each token's
/// squared error (zero on the meta device); no token is right. Targets are the bits of float32 numbers.
///
/// # Panics
/// If the shapes do not fit.
pub fn squared(values: &mut Activation, targets: &[u32], scales: &[f32]) -> Losses {
    assert_eq!((values.features(), targets.len()), (1, scales.len()), "a number, and a scale, for each target");
    match values.device() {
        Device::Cpu => Losses(Results::Host(cpu::squared(values, targets, scales))),
        Device::Cuda(_) => Losses(Results::Gpu(cuda::squared(values, targets, scales))),
        Device::Meta => Losses(Results::Host(vec![TokenLoss::default(); targets.len()])),
    }
}

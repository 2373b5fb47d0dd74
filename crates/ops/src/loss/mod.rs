//! Cross-entropy over a chunk of logits: the losses, and in the same place the gradient's exponentials.
//!
//! The gradient of `scale * sum_t nll[t]` with respect to the logits is `scale (softmax - onehot)`. It is never
//! formed where [`linear`] need not: it multiplies the unnormalised exponentials by the weight, and corrects each token
//! by a factor and one row of the weight.
pub mod linear;
#[cfg(test)]
mod tests;

use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

/// # Safety
/// The features of `S`; `logits` holds `vocabulary` vectors, `most` and `total` have room for one each.
#[inline(always)]
unsafe fn panel_kernel<S: Simd>(logits: *mut f32, vocabulary: usize, most: *mut f32, total: *mut f32) {
    // SAFETY: `at` stays below `vocabulary`, so that each access lies within what the caller promises.
    unsafe {
        let mut tops = [S::splat(f32::NEG_INFINITY); 4];
        let mut at = 0;
        while at + 4 <= vocabulary {
            for (lane, top) in tops.iter_mut().enumerate() {
                *top = S::max(*top, S::load(logits.add((at + lane) * LANES)));
            }
            at += 4;
        }
        while at < vocabulary {
            tops[0] = S::max(tops[0], S::load(logits.add(at * LANES)));
            at += 1;
        }
        let top = S::max(S::max(tops[0], tops[1]), S::max(tops[2], tops[3]));
        let mut sums = [S::splat(0.0); 2];
        for at in 0..vocabulary {
            let to = logits.add(at * LANES);
            let value = S::exp(S::sub(S::load(to), top));
            sums[at % 2] = S::add(sums[at % 2], value);
            S::store(to, value);
        }
        S::store(most, top);
        S::store(total, S::add(sums[0], sums[1]));
    }
}

dispatch! { fn panel_at = panel_kernel(logits: *mut f32, vocabulary: usize, most: *mut f32, total: *mut f32); }

/// The loss of one token.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenLoss {
    /// The negative log-likelihood of the target.
    pub nll: f32,
    /// The sum of `exp(logit - max)`.
    pub sum: f32,
    /// The logarithm of the sum of the logits' exponentials.
    pub lse: f32,
    /// Whether no logit is larger than the target's.
    pub right: bool,
}

/// Replaces `logits [tokens, vocabulary]` by `exp(logit - max)`; returns each token's loss.
pub fn cross_entropy(logits: &mut Act, targets: &[u32]) -> Vec<TokenLoss> {
    assert_eq!(targets.len(), logits.tokens(), "a target for each token");
    let (stride, vocabulary, to) = (logits.stride(), logits.features(), logits.shared());
    let mut out = vec![TokenLoss::default(); targets.len()];
    if logits.is_meta() {
        return out;
    }
    let results = par::Shared(out.as_mut_ptr());
    par::run(targets.len().div_ceil(LANES), |panel| {
        let targets = &targets[panel * LANES..targets.len().min((panel + 1) * LANES)];
        let (mut most, mut total) = ([0.0f32; LANES], [0.0f32; LANES]);
        let start = to.get().wrapping_add(panel * stride);
        let mut picked = [0.0f32; LANES];
        for (lane, &target) in targets.iter().enumerate() {
            assert!((target as usize) < vocabulary, "a target inside the vocabulary");
            // SAFETY: the target is below `vocabulary`, as was just asserted, and `lane` below LANES: within the panel,
            // which lies within `logits`. They are borrowed for writing, and no other task has this panel.
            picked[lane] = unsafe { *start.add(target as usize * LANES + lane) };
        }
        // SAFETY: the panel has `vocabulary` vectors and is this task's alone; the two arrays hold a vector each.
        unsafe { panel_at(start, vocabulary, most.as_mut_ptr(), total.as_mut_ptr()) };
        for lane in 0..targets.len() {
            let (sum, lse) = (total[lane], total[lane].ln() + most[lane]);
            let loss = TokenLoss { nll: lse - picked[lane], sum, lse, right: picked[lane] == most[lane] };
            // SAFETY: `out` has a result for each target, and lives until all tasks are done; this token is this task's
            // alone.
            unsafe { *results.get().add(panel * LANES + lane) = loss };
        }
    });
    out
}

/// What an objective has beside plain cross-entropy.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Terms {
    /// How much of a label's weight is spread over the whole vocabulary.
    pub smoothing: f32,
    /// The factor of `logsumexp(logits)^2`.
    pub z: f32,
}

impl Terms {
    /// Whether there is nothing beside it.
    pub fn is_plain(self) -> bool {
        self == Self::default()
    }
}

/// Replaces `logits [tokens, vocabulary]` by the gradient of `sum_t scales[t] objective[t]`; returns each token's plain
/// loss.
///
/// With `lse = logsumexp(l)`: `objective = lse - (1 - smoothing) l[target] - smoothing mean(l) + z lse^2`. Its gradient
/// is `(1 + 2 z lse) softmax(l) - (1 - smoothing) onehot - smoothing / vocabulary`.
pub fn gradient(logits: &mut Act, targets: &[u32], scales: &[f32], terms: Terms) -> Vec<TokenLoss> {
    assert_eq!(targets.len(), scales.len(), "a scale for each target");
    let losses = cross_entropy(logits, targets);
    if logits.is_meta() {
        return losses;
    }
    let (stride, vocabulary, to) = (logits.stride(), logits.features(), logits.shared());
    par::run(targets.len().div_ceil(LANES), |panel| {
        let (mut slope, mut shift) = ([0.0f32; LANES], [0.0f32; LANES]);
        let tokens = panel * LANES..targets.len().min((panel + 1) * LANES);
        for (lane, token) in tokens.clone().enumerate() {
            let TokenLoss { sum, lse, .. } = losses[token];
            slope[lane] = scales[token] * (1.0 + 2.0 * terms.z * lse) / sum;
            shift[lane] = scales[token] * terms.smoothing / vocabulary as f32;
        }
        // SAFETY: the panel has `vocabulary` vectors and lies within `logits`, which are borrowed for writing; all are
        // initialised, for `cross_entropy` has written them. No other task has this panel.
        let values = unsafe { std::slice::from_raw_parts_mut(to.get().add(panel * stride), vocabulary * LANES) };
        for lanes in values.chunks_exact_mut(LANES) {
            for ((value, slope), shift) in lanes.iter_mut().zip(slope).zip(shift) {
                *value = *value * slope - shift;
            }
        }
        for (lane, token) in tokens.enumerate() {
            values[targets[token] as usize * LANES + lane] -= scales[token] * (1.0 - terms.smoothing);
        }
    });
    losses
}

/// Replaces `values [tokens, 1]` by the gradient of `sum_t scales[t] (value - target)^2`; returns each token's squared error.
/// Targets are the bits of numbers.
pub fn squared(values: &mut Act, targets: &[u32], scales: &[f32]) -> Vec<f32> {
    assert_eq!((values.features(), targets.len()), (1, scales.len()), "a number, and a scale, for each target");
    if values.is_meta() {
        return vec![0.0; targets.len()];
    }
    let pairs = targets.iter().zip(scales).enumerate();
    pairs
        .map(|(token, (&target, scale))| {
            let value = &mut values.panel_mut(token / LANES)[token % LANES];
            let error = *value - f32::from_bits(target);
            *value = 2.0 * scale * error;
            error * error
        })
        .collect()
}

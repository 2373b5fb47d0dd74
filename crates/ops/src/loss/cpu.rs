//! Cross-entropy on the CPU: one task takes one panel. The logits are read twice and written once: first for the
//! maximum, then for the exponentials and their sum.
use super::{Terms, TokenLoss};
use crate::activation::{Activation, LANES};
use crate::par;
use crate::simd::{Simd, dispatch};

/// # Safety
/// The CPU has the features of `S`; `logits` holds `vocabulary` vectors, `most` and `total` have room for one each.
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

/// `out` has a place for each of `targets`.
pub(super) fn cross_entropy(logits: &mut Activation, targets: &[u32], out: &mut [TokenLoss]) {
    let (stride, vocabulary, to) = (logits.stride(), logits.features(), logits.shared());
    let results = par::Shared(out.as_mut_ptr());
    par::run(targets.len().div_ceil(LANES), |panel| {
        let targets = &targets[panel * LANES..targets.len().min((panel + 1) * LANES)];
        let (mut most, mut total) = ([0.0f32; LANES], [0.0f32; LANES]);
        let start = to.get().wrapping_add(panel * stride);
        let mut picked = [0.0f32; LANES];
        for (lane, &target) in targets.iter().enumerate() {
            assert!((target as usize) < vocabulary, "a target inside the vocabulary");
            // SAFETY: the target is below `vocabulary`, as was just asserted, and `lane` below LANES: within the panel,
            // which lies within `logits`, for `super::cross_entropy` asserts that there is a target for each of its
            // tokens. They are borrowed for writing, and no other task has this panel.
            picked[lane] = unsafe { *start.add(target as usize * LANES + lane) };
        }
        // SAFETY: the panel has `vocabulary` vectors and is this task's alone; the two arrays hold a vector each.
        unsafe { panel_at(start, vocabulary, most.as_mut_ptr(), total.as_mut_ptr()) };
        for lane in 0..targets.len() {
            let (sum, lse) = (total[lane], total[lane].ln() + most[lane]);
            let loss = TokenLoss { nll: lse - picked[lane], sum, lse, right: picked[lane] == most[lane] };
            // SAFETY: `super::cross_entropy` makes `out` with a result for each target; it is borrowed for writing
            // until all tasks are done. This token is this task's alone.
            unsafe { *results.get().add(panel * LANES + lane) = loss };
        }
    });
}

/// Turns the exponentials that [`cross_entropy`] left into the gradient of the objective, in place.
pub(super) fn gradient(
    exponentials: &mut Activation,
    targets: &[u32],
    scales: &[f32],
    terms: Terms,
    losses: &[TokenLoss],
) {
    let (stride, vocabulary, to) = (exponentials.stride(), exponentials.features(), exponentials.shared());
    par::run(targets.len().div_ceil(LANES), |panel| {
        let (mut slope, mut shift) = ([0.0f32; LANES], [0.0f32; LANES]);
        let tokens = panel * LANES..targets.len().min((panel + 1) * LANES);
        for (lane, token) in tokens.clone().enumerate() {
            let TokenLoss { sum, lse, .. } = losses[token];
            slope[lane] = scales[token] * (1.0 + 2.0 * terms.z * lse) / sum;
            shift[lane] = scales[token] * terms.smoothing / vocabulary as f32;
        }
        // SAFETY: the panel has `vocabulary` vectors. It lies within `exponentials`, which have a token for each target
        // and are borrowed for writing; all are initialised, for `cross_entropy` has written them. No other task has
        // this panel.
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
}

pub(super) fn squared(values: &mut Activation, targets: &[u32], scales: &[f32]) -> Vec<TokenLoss> {
    let pairs = targets.iter().zip(scales).enumerate();
    pairs
        .map(|(token, (&target, scale))| {
            let value = &mut values.panel_mut(token / LANES)[token % LANES];
            let error = *value - f32::from_bits(target);
            *value = 2.0 * scale * error;
            TokenLoss { nll: error * error, ..TokenLoss::default() }
        })
        .collect()
}

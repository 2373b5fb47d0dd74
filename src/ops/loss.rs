//! Cross-entropy over a chunk of logits: the losses, and in the same place the gradient's exponentials.
//!
//! The gradient of `scale * sum_t nll[t]` with respect to the logits is `scale (softmax - onehot)`. It is never
//! formed: the head multiplies the unnormalised exponentials by the weight and corrects each token by a factor
//! and one row of the weight (see [`crate::model::head`]).
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

#[inline(always)]
unsafe fn panel_kernel<S: Simd>(logits: *mut f32, vocabulary: usize, most: *mut f32, total: *mut f32) {
    // SAFETY: one panel of `vocabulary` vectors; `most` and `total` one vector each.
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

/// Replaces `logits [tokens, vocabulary]` by `exp(logit - max)`; returns each token's negative log-likelihood of its
/// target, and the sum of its exponentials.
pub fn forward(logits: &mut Act, targets: &[u32]) -> Vec<(f32, f32)> {
    assert_eq!(targets.len(), logits.tokens(), "a target for each token");
    let (stride, vocabulary, to) = (logits.stride(), logits.features(), logits.shared());
    let mut out = vec![(0.0f32, 0.0f32); targets.len()];
    let results = par::Shared(out.as_mut_ptr());
    par::run(targets.len().div_ceil(LANES), |panel| {
        let targets = &targets[panel * LANES..targets.len().min((panel + 1) * LANES)];
        let (mut most, mut total) = ([0.0f32; LANES], [0.0f32; LANES]);
        let start = to.get().wrapping_add(panel * stride);
        let mut picked = [0.0f32; LANES];
        for (lane, &target) in targets.iter().enumerate() {
            assert!((target as usize) < vocabulary, "a target inside the vocabulary");
            // SAFETY: a task owns its panel.
            picked[lane] = unsafe { *start.add(target as usize * LANES + lane) };
        }
        // SAFETY: as above.
        unsafe { panel_at(start, vocabulary, most.as_mut_ptr(), total.as_mut_ptr()) };
        for lane in 0..targets.len() {
            let nll = total[lane].ln() + most[lane] - picked[lane];
            // SAFETY: a task owns its tokens' results.
            unsafe { *results.get().add(panel * LANES + lane) = (nll, total[lane]) };
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::panel::Pool;
    use crate::ops::testing::{check_gradient, each_level, numbers};

    fn reference(logits: &[f64], targets: &[u32], vocabulary: usize) -> Vec<f64> {
        let one = |(row, &target): (&[f64], &u32)| {
            let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top - row[target as usize]
        };
        logits.chunks(vocabulary).zip(targets).map(one).collect()
    }

    #[test]
    fn equals_the_definition_and_its_finite_differences() {
        each_level(|_| {
            for (tokens, vocabulary) in [(1, 1), (5, 7), (17, 33), (32, 258)] {
                let logits: Vec<f32> = numbers(1, tokens * vocabulary).iter().map(|x| x * 20.0).collect();
                let targets: Vec<u32> = (0..tokens).map(|t| (t * 13 % vocabulary) as u32).collect();
                let pool = Pool::new();
                let mut act = Act::from_rows(&pool, &logits, vocabulary);
                let losses = forward(&mut act, &targets);
                let double: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
                for (got, want) in losses.iter().zip(reference(&double, &targets, vocabulary)) {
                    assert!((f64::from(got.0) - want).abs() < 1e-5, "{} != {want}", got.0);
                }
                let mut gradient = act.to_rows();
                for (token, row) in gradient.chunks_mut(vocabulary).enumerate() {
                    for value in row.iter_mut() {
                        *value /= losses[token].1;
                    }
                    row[targets[token] as usize] -= 1.0;
                }
                check_gradient("logits", &logits, &gradient, |x| reference(x, &targets, vocabulary).iter().sum());
            }
        });
    }
}

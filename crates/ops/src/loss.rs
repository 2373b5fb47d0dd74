//! Cross-entropy over a chunk of logits: the losses, and in the same place the gradient's exponentials.
//!
//! The gradient of `scale * sum_t nll[t]` with respect to the logits is `scale (softmax - onehot)`. It is never
//! formed: the head multiplies the unnormalised exponentials by the weight and corrects each token by a factor
//! and one row of the weight (see `model::head`).
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

/// Replaces `logits [tokens, vocabulary]` by `exp(logit - max)`; returns each token's negative log-likelihood of its
/// target, and the sum of its exponentials.
pub fn forward(logits: &mut Act, targets: &[u32]) -> Vec<(f32, f32)> {
    forward_with_lse(logits, targets).into_iter().map(|(nll, sum, _)| (nll, sum)).collect()
}

/// As [`forward`], with the logarithm of the sum of the logits' exponentials.
fn forward_with_lse(logits: &mut Act, targets: &[u32]) -> Vec<(f32, f32, f32)> {
    assert_eq!(targets.len(), logits.tokens(), "a target for each token");
    let (stride, vocabulary, to) = (logits.stride(), logits.features(), logits.shared());
    let mut out = vec![(0.0f32, 0.0f32, 0.0f32); targets.len()];
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
            let lse = total[lane].ln() + most[lane];
            // SAFETY: `out` has a result for each target, and lives until all tasks are done; this token is this task's
            // alone.
            unsafe { *results.get().add(panel * LANES + lane) = (lse - picked[lane], total[lane], lse) };
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
/// negative log-likelihood of its target.
///
/// With `lse = logsumexp(l)`: `objective = lse - (1 - smoothing) l[target] - smoothing mean(l) + z lse^2`. Its gradient
/// is `(1 + 2 z lse) softmax(l) - (1 - smoothing) onehot - smoothing / vocabulary`.
pub fn gradient(logits: &mut Act, targets: &[u32], scales: &[f32], terms: Terms) -> Vec<f32> {
    assert_eq!(targets.len(), scales.len(), "a scale for each target");
    let losses = forward_with_lse(logits, targets);
    let (stride, vocabulary, to) = (logits.stride(), logits.features(), logits.shared());
    par::run(targets.len().div_ceil(LANES), |panel| {
        let (mut slope, mut shift) = ([0.0f32; LANES], [0.0f32; LANES]);
        let tokens = panel * LANES..targets.len().min((panel + 1) * LANES);
        for (lane, token) in tokens.clone().enumerate() {
            let (_, sum, lse) = losses[token];
            slope[lane] = scales[token] * (1.0 + 2.0 * terms.z * lse) / sum;
            shift[lane] = scales[token] * terms.smoothing / vocabulary as f32;
        }
        // SAFETY: the panel has `vocabulary` vectors and lies within `logits`, which are borrowed for writing; all are
        // initialised, for `forward_with_lse` has written them. No other task has this panel.
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
    losses.into_iter().map(|(nll, ..)| nll).collect()
}

/// Replaces `values [tokens, 1]` by the gradient of `sum_t scales[t] (value - target)^2`; returns each token's squared error.
/// Targets are the bits of numbers.
pub fn squared(values: &mut Act, targets: &[u32], scales: &[f32]) -> Vec<f32> {
    assert_eq!((values.features(), targets.len()), (1, scales.len()), "a number, and a scale, for each target");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::Pool;
    use crate::testing::{check_gradient, each_level, numbers};

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

    #[test]
    fn squared_errors_equal_their_definition_and_its_finite_differences() {
        for tokens in [1, 5, 17] {
            let (values, wanted) = (numbers(1, tokens), numbers(2, tokens));
            let scales: Vec<f32> = numbers(3, tokens).iter().map(|x| 0.6 + 0.5 * x).collect();
            let targets: Vec<u32> = wanted.iter().map(|number| number.to_bits()).collect();
            let mut act = Act::from_rows(&Pool::new(), &values, 1);
            let errors = squared(&mut act, &targets, &scales);
            let error = |value: f64, token: usize| (value - f64::from(wanted[token])).powi(2);
            for (token, found) in errors.iter().enumerate() {
                assert!((f64::from(*found) - error(f64::from(values[token]), token)).abs() < 1e-6);
            }
            let objective = |values: &[f64]| -> f64 {
                values.iter().enumerate().map(|(token, &value)| f64::from(scales[token]) * error(value, token)).sum()
            };
            check_gradient("values", &values, &act.to_rows(), objective);
        }
    }

    #[test]
    fn smoothing_and_z_loss_equal_their_definition_and_its_finite_differences() {
        each_level(|_| {
            for (tokens, vocabulary) in [(1, 3), (5, 7), (17, 33), (32, 130)] {
                let logits: Vec<f32> = numbers(5, tokens * vocabulary).iter().map(|x| x * 6.0).collect();
                let targets: Vec<u32> = (0..tokens).map(|t| (t * 13 % vocabulary) as u32).collect();
                let scales: Vec<f32> = numbers(6, tokens).iter().map(|x| 0.6 + 0.5 * x).collect();
                for terms in [
                    Terms::default(),
                    Terms { smoothing: 0.1, z: 0.0 },
                    Terms { smoothing: 0.0, z: 1e-2 },
                    Terms { smoothing: 0.3, z: 1e-2 },
                ] {
                    let objective = |logits: &[f64]| -> f64 {
                        let one = |((row, &target), &scale): ((&[f64], &u32), &f32)| {
                            let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                            let lse = row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top;
                            // As the LabelSmoother of Transformers: a share of the mean over the vocabulary of -log p.
                            let spread = row.iter().map(|x| lse - x).sum::<f64>() / vocabulary as f64;
                            let (smoothing, z) = (f64::from(terms.smoothing), f64::from(terms.z));
                            let nll = lse - row[target as usize];
                            f64::from(scale) * ((1.0 - smoothing) * nll + smoothing * spread + z * lse * lse)
                        };
                        logits.chunks(vocabulary).zip(&targets).zip(&scales).map(one).sum()
                    };
                    let pool = Pool::new();
                    let mut act = Act::from_rows(&pool, &logits, vocabulary);
                    let losses = gradient(&mut act, &targets, &scales, terms);
                    let double: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
                    for (got, want) in losses.iter().zip(reference(&double, &targets, vocabulary)) {
                        assert!((f64::from(*got) - want).abs() < 1e-5, "{got} != {want}: plain cross-entropy");
                    }
                    check_gradient("logits", &logits, &act.to_rows(), objective);
                }
            }
        });
    }
}

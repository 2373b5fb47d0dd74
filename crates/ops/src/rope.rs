//! Rotary position embedding, Hugging Face's half-split form: features i and i + n/2 of the first n of a head turn by
//! the angle `position * inv_freq[i]`; the rest stay. Su et al., 2021. The backward pass turns the other way.
use super::panel::{Act, LANES, Pool};
use super::par;
use super::simd::{Simd, dispatch};
use std::ops::Range;
use std::sync::Arc;

/// Cosines and sines of each token: `[panel][n / 2][16]` each, times the rule's factor.
#[derive(Debug)]
pub struct Rope {
    cos: Act,
    sin: Act,
}

impl Rope {
    /// The table for sequences of the lengths `sequences`, end to end, whose positions count from 0. `frequencies`
    /// gives each length its rule. Angles are f32 products, as in `transformers`.
    pub fn new<'a>(
        pool: &Arc<Pool>,
        sequences: impl IntoIterator<Item = usize>,
        mut frequencies: impl FnMut(usize) -> (&'a [f32], f32),
    ) -> Self {
        Self::at(pool, sequences.into_iter().map(|length| (0..length, frequencies(length))))
    }

    /// The table for parts of sequences, end to end: the positions of each, and its rule.
    ///
    /// # Panics
    /// If the rules turn different numbers of features.
    pub fn at<'a>(pool: &Arc<Pool>, parts: impl IntoIterator<Item = (Range<usize>, (&'a [f32], f32))>) -> Self {
        let parts = parts.into_iter();
        let tokens: Vec<(usize, (&[f32], f32))> =
            parts.flat_map(|(positions, rule)| positions.map(move |position| (position, rule))).collect();
        let half = tokens.first().map_or(1, |(_, (inv_freq, _))| inv_freq.len());
        assert!(tokens.iter().all(|(_, (inv_freq, _))| inv_freq.len() == half), "rules of one width");
        let (mut cos, mut sin) = (pool.act(tokens.len(), half), pool.act(tokens.len(), half));
        if cos.is_meta() {
            return Self { cos, sin };
        }
        let (stride, cos_to, sin_to) = (cos.stride(), cos.shared(), sin.shared());
        par::run(cos.panels(), |panel| {
            for (lane, &(position, (inv_freq, factor))) in tokens[panel * LANES..].iter().take(LANES).enumerate() {
                for (feature, &frequency) in inv_freq.iter().enumerate() {
                    let (s, c) = f64::from(position as f32 * frequency).sin_cos();
                    let at = panel * stride + feature * LANES + lane;
                    // SAFETY: both tables have `half` features, and `feature` is below that, as the assertion above
                    // says; no other task has this panel.
                    unsafe {
                        *cos_to.get().add(at) = c as f32 * factor;
                        *sin_to.get().add(at) = s as f32 * factor;
                    }
                }
            }
        });
        Self { cos, sin }
    }

    /// The table of the tokens `rows` only.
    #[must_use]
    pub fn gather(&self, rows: &[usize]) -> Self {
        Self { cos: self.cos.gather(rows), sin: self.sin.gather(rows) }
    }

    /// Turns every head of `x [tokens, heads * dim]` in place.
    pub fn forward(&self, x: &mut Act, dim: usize) {
        self.turn(x, dim, 1.0);
    }

    /// The gradient of [`Rope::forward`], in place: the same turn backwards.
    pub fn backward(&self, dx: &mut Act, dim: usize) {
        self.turn(dx, dim, -1.0);
    }

    fn turn(&self, x: &mut Act, dim: usize, sign: f32) {
        let half = self.cos.features();
        assert!(2 * half <= dim && x.features().is_multiple_of(dim), "whole heads, as wide as what turns");
        if x.is_meta() {
            return;
        }
        let (heads, stride, to) = (x.features() / dim, x.stride(), x.shared());
        par::run(x.panels(), |panel| {
            let (cos, sin) = (self.cos.panel(panel).as_ptr(), self.sin.panel(panel).as_ptr());
            // SAFETY: a panel of `x` has `heads * dim` vectors, one of the tables `half`, and the assertion holds
            // `half` against `dim`. `x` is borrowed for writing, and no other task has this panel.
            unsafe { turn_panel(to.get().add(panel * stride), cos, sin, heads, dim, half, sign) };
        });
    }
}

/// # Safety
/// The features of `S`; `x` holds `heads * dim` vectors, `cos` and `sin` hold `half` each, and `half <= dim / 2`.
#[inline(always)]
unsafe fn turn_kernel<S: Simd>(
    x: *mut f32,
    cos: *const f32,
    sin: *const f32,
    heads: usize,
    dim: usize,
    half: usize,
    sign: f32,
) {
    // SAFETY: `feature` and `feature + half` are below `dim`: vectors within the head, as the caller says.
    unsafe {
        let sign = S::splat(sign);
        for head in 0..heads {
            for feature in 0..half {
                let first = x.add((head * dim + feature) * LANES);
                let second = first.add(half * LANES);
                let (a, b) = (S::load(first), S::load(second));
                let (c, s) = (S::load(cos.add(feature * LANES)), S::mul(sign, S::load(sin.add(feature * LANES))));
                S::store(first, S::sub(S::mul(a, c), S::mul(b, s)));
                S::store(second, S::fma(b, c, S::mul(a, s)));
            }
        }
    }
}

dispatch! {
    fn turn_panel = turn_kernel(
        x: *mut f32, cos: *const f32, sin: *const f32, heads: usize, dim: usize, half: usize, sign: f32,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_gradient, each_level, numbers};

    /// Sequences end to end; each has a rule of its own.
    fn reference(x: &[f64], sequences: &[usize], rules: &[(&[f32], f32)], heads: usize, dim: usize) -> Vec<f64> {
        let mut out = x.to_vec();
        let mut token = 0;
        for (&length, (inv_freq, factor)) in sequences.iter().zip(rules) {
            let half = inv_freq.len();
            for position in 0..length {
                for head in 0..heads {
                    let at = (token * heads + head) * dim;
                    for i in 0..half {
                        let (s, c) = f64::from(position as f32 * inv_freq[i]).sin_cos();
                        let (s, c) = (s * f64::from(*factor), c * f64::from(*factor));
                        out[at + i] = x[at + i] * c - x[at + half + i] * s;
                        out[at + half + i] = x[at + half + i] * c + x[at + i] * s;
                    }
                }
                token += 1;
            }
        }
        out
    }

    #[test]
    fn equals_the_definition_and_its_finite_differences() {
        each_level(|_| {
            for dim in [6, 10] {
                let (heads, sequences) = (3, [18, 1, 2, 12]);
                let (short, long): ([f32; 3], [f32; 3]) = ([1.0, 0.3, 0.01], [0.5, 0.2, 0.001]);
                let rules: [(&[f32], f32); 4] = [(&long, 1.2), (&short, 1.0), (&short, 1.0), (&long, 1.2)];
                let (x, seed) = (numbers(1, 33 * heads * dim), numbers(2, 33 * heads * dim));
                let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
                let pool = Pool::new();
                let rule = |length| if length > 10 { rules[0] } else { rules[1] };
                let rope = Rope::new(&pool, sequences, rule);
                let mut turned = Act::from_rows(&pool, &x, heads * dim);
                rope.forward(&mut turned, dim);
                let wanted = reference(&double(&x), &sequences, &rules, heads, dim);
                for (got, want) in turned.to_rows().iter().zip(wanted) {
                    assert!((f64::from(*got) - want).abs() < 1e-6);
                }
                let mut dx = Act::from_rows(&pool, &seed, heads * dim);
                rope.backward(&mut dx, dim);
                check_gradient("dx", &x, &dx.to_rows(), |x| {
                    let out = reference(x, &sequences, &rules, heads, dim);
                    out.iter().zip(&seed).map(|(o, &s)| o * f64::from(s)).sum()
                });
            }
        });
    }
}

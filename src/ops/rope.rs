//! Rotary position embedding, Hugging Face's half-split form: features i and i + dim/2 of a head turn by the angle
//! `position * inv_freq[i]`. Su et al., 2021. The backward pass turns the other way.
use super::panel::{Act, LANES, Pool};
use super::par;
use super::simd::{Simd, dispatch};
use std::sync::Arc;

/// Cosines and sines of each token: `[panel][dim / 2][16]` each.
#[derive(Debug)]
pub struct Rope {
    cos: Act,
    sin: Act,
}

impl Rope {
    /// The table for tokens at `positions`. Angles are f32 products, as in `transformers`.
    pub fn new(pool: &Arc<Pool>, positions: &[usize], inv_freq: &[f32]) -> Self {
        let mut cos = pool.act(positions.len(), inv_freq.len());
        let mut sin = pool.act(positions.len(), inv_freq.len());
        let (stride, cos_to, sin_to) = (cos.stride(), cos.shared(), sin.shared());
        par::run(cos.panels(), |panel| {
            for (lane, &position) in positions[panel * LANES..].iter().take(LANES).enumerate() {
                for (feature, &frequency) in inv_freq.iter().enumerate() {
                    let (s, c) = f64::from(position as f32 * frequency).sin_cos();
                    let at = panel * stride + feature * LANES + lane;
                    // SAFETY: a task owns its panel.
                    unsafe {
                        *cos_to.get().add(at) = c as f32;
                        *sin_to.get().add(at) = s as f32;
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
    pub fn forward(&self, x: &mut Act) {
        self.turn(x, 1.0);
    }

    /// The gradient of [`Rope::forward`], in place: the same turn backwards.
    pub fn backward(&self, dx: &mut Act) {
        self.turn(dx, -1.0);
    }

    fn turn(&self, x: &mut Act, sign: f32) {
        let half = self.cos.features();
        let (heads, stride, to) = (x.features() / (2 * half), x.stride(), x.shared());
        par::run(x.panels(), |panel| {
            let (cos, sin) = (self.cos.panel(panel).as_ptr(), self.sin.panel(panel).as_ptr());
            // SAFETY: a task owns its panel.
            unsafe { turn_panel(to.get().add(panel * stride), cos, sin, heads, half, sign) };
        });
    }
}

#[inline(always)]
unsafe fn turn_kernel<S: Simd>(x: *mut f32, cos: *const f32, sin: *const f32, heads: usize, half: usize, sign: f32) {
    // SAFETY: one panel of `heads * 2 * half` vectors, tables of `half`.
    unsafe {
        let sign = S::splat(sign);
        for head in 0..heads {
            for feature in 0..half {
                let first = x.add((head * 2 * half + feature) * LANES);
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
    fn turn_panel = turn_kernel(x: *mut f32, cos: *const f32, sin: *const f32, heads: usize, half: usize, sign: f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{check_gradient, each_level, numbers};

    fn reference(x: &[f64], positions: &[usize], inv_freq: &[f32], heads: usize) -> Vec<f64> {
        let half = inv_freq.len();
        let mut out = vec![0.0; x.len()];
        for (token, &position) in positions.iter().enumerate() {
            for head in 0..heads {
                let at = (token * heads + head) * 2 * half;
                for i in 0..half {
                    let (s, c) = f64::from(position as f32 * inv_freq[i]).sin_cos();
                    out[at + i] = x[at + i] * c - x[at + half + i] * s;
                    out[at + half + i] = x[at + half + i] * c + x[at + i] * s;
                }
            }
        }
        out
    }

    #[test]
    fn equals_the_definition_and_its_finite_differences() {
        each_level(|_| {
            let positions: Vec<usize> = (0..21).map(|t| t * 37 % 400).collect();
            let (heads, inv_freq) = (3, [1.0f32, 0.3, 0.01]);
            let (x, seed) = (numbers(1, 21 * heads * 6), numbers(2, 21 * heads * 6));
            let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let pool = Pool::new();
            let rope = Rope::new(&pool, &positions, &inv_freq);
            let mut turned = Act::from_rows(&pool, &x, heads * 6);
            rope.forward(&mut turned);
            for (got, want) in turned.to_rows().iter().zip(reference(&double(&x), &positions, &inv_freq, heads)) {
                assert!((f64::from(*got) - want).abs() < 1e-6);
            }
            let mut dx = Act::from_rows(&pool, &seed, heads * 6);
            rope.backward(&mut dx);
            check_gradient("dx", &x, &dx.to_rows(), |x| {
                let out = reference(x, &positions, &inv_freq, heads);
                out.iter().zip(&seed).map(|(o, &s)| o * f64::from(s)).sum()
            });
        });
    }
}

//! `DoRA` (Liu et al., 2024): magnitude and direction apart. With `V = W + s B A` and its row norms `n = ||V||`, the
//! output is `y = b + (m / n) ⊙ V x`. The magnitudes `m` are trained beside A and B. In backward `n` counts as a
//! constant, as in PEFT. With dropout, x' is the adapter's input after it: `y = b + W (x - x') + (m / n) ⊙ v`,
//! `v = W x' + B (s A x')`. Without dropout `x' = x`, and one product of the base is enough.
//!
//! `V` is never formed: `n_j² = ||W_j||² + 2 s (W A^T)_j · B_j + s² B_j (A A^T) B_j^T`, whose first term never changes.
use super::low_rank::Matrices;
use crate::grads::Grads;
use crate::linear::{Base, Formula, Input, Saved, project};
use crate::values::placed;
use crate::weight::Weight;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use tunesmith_device::{Array, FloatBuffer, Floats};
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::elementwise::sub;
use tunesmith_ops::feature_scale;
use tunesmith_ops::gemm::{Init, Matrix, Store, Term, matmul};
use tunesmith_ops::low_rank::{Update, row_norms};

/// In passes of at most this many tokens, as in decoding, [`Magnitude::norms`] keeps its result for the next call.
const FEW_TOKENS: usize = 16;

/// The magnitudes of one module.
#[derive(Debug, Clone)]
pub struct Magnitude {
    /// Their place among the trained values, `[out_features]`.
    pub range: Range<usize>,
    /// `||W_j||²` of each row of the base.
    pub squares: Array<f64>,
    /// The result of the last [`Magnitude::norms`], for the same values.
    known: Arc<Mutex<Option<Known>>>,
}

/// Row norms, and the A and B that they belong to.
#[derive(Debug)]
struct Known {
    a: Vec<f32>,
    b: Vec<f32>,
    norms: FloatBuffer,
}

impl Magnitude {
    /// Magnitudes at `range` of the trained values, of a base whose rows have these squares.
    pub fn new(range: Range<usize>, squares: Array<f64>) -> Self {
        Self { range, squares, known: Arc::default() }
    }

    /// The row norms of `W + s B A`, by [`row_norms`]. They cost a product with the whole base. So in a pass of at most
    /// [`FEW_TOKENS`], as in decoding, the last result is used again until A or B change.
    pub fn norms(
        &self,
        pool: &Arc<Pool>,
        weight: Store<'_>,
        update: Update<'_>,
        in_features: usize,
        tokens: usize,
    ) -> FloatBuffer {
        let fresh = || row_norms(pool, weight, &self.squares, update, in_features);
        if tokens > FEW_TOKENS {
            return fresh();
        }
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().as_ref().filter(|known| update.a.equal(&known.a) && update.b.equal(&known.b)) {
            return known.norms.clone();
        }
        // The lock is not held here: while a thread waits in a parallel loop, it may take up other work that calls this
        // function.
        let norms = fresh();
        *lock() = Some(Known { a: update.a.read(), b: update.b.read(), norms: norms.clone() });
        norms
    }
}

/// The `DoRA` adapter of a module in a pass: A, B, and the magnitudes.
#[derive(Debug)]
pub struct Dora {
    pub matrices: Matrices,
    pub magnitude: Magnitude,
}

impl Formula for Dora {
    fn forward(&self, base: Base<'_>, x: &Activation, residual: Option<&Activation>) -> (Activation, Option<Saved>) {
        let (matrices, inputs, weight) = (&self.matrices, base.linear.in_features, base.weight());
        let whole = |x| Term { matrix: Matrix::rows(weight.store(), inputs), x };
        let mut y = base.output(x);
        let dropped = matrices.drop_some(base, x);
        let x_low = dropped.as_ref().unwrap_or(x);
        let product = matrices.product(base, x.tokens());
        let low = project(&[(product, x_low)]).swap_remove(0);
        let mut v = base.output(x);
        matmul(&mut v, Init::Zero, &[whole(x_low), Term { matrix: product.b, x: &low }]);
        match &dropped {
            Some(dropped) => base.sum(&mut y, residual, &[whole(&sub(x, dropped))]),
            None => base.sum(&mut y, residual, &[]),
        }
        let update = Update {
            a: base.pass.values.at(&matrices.a),
            b: base.pass.values.at(&matrices.b),
            rank: matrices.rank,
            scale: matrices.scale,
        };
        let norm = self.magnitude.norms(x.pool(), weight.store(), update, inputs, x.tokens());
        let magnitudes = base.pass.values.at(&self.magnitude.range);
        let gain = feature_scale::ratio(magnitudes, norm.view());
        feature_scale::add(&mut y, &v, gain.view());
        (y, Some(Saved { acts: vec![low, v], numbers: vec![norm, gain] }))
    }

    fn backward(
        &self,
        base: Base<'_>,
        input: &Input<'_>,
        saved: Option<&Saved>,
        dy: &Activation,
        dx: Option<(&mut Activation, bool)>,
        grads: &mut Grads<'_>,
    ) {
        let Some(Saved { acts, numbers }) = saved else { return };
        let ([low, v], [norm, gain]) = (&acts[..], &numbers[..]) else { return };
        let (d_low, dv) = {
            let dropped = self.matrices.drop_some(base, input.x);
            feature_scale::backward(dy, v, norm.view(), grads.at(&self.magnitude.range));
            // The gradient of `W x' + B (s A x')`.
            let dv = feature_scale::times(dy, gain.view());
            (self.matrices.gradients(base, low, &dv, dropped.as_ref().unwrap_or(input.x), grads), dv)
        };
        base.gradients(input, dy, grads);
        if let Some((dx, add)) = dx {
            self.matrices.input_gradient(base, dy, Some(&dv), &d_low, dx, add);
        }
    }
}

/// For a fresh adapter: `||W_j||²` of each row of the base, and `||W_j + s (B A)_j||`, the initial magnitudes. `values`
/// is the buffer of trained values, where the weight lies if it is trained itself.
pub fn start(weight: &Weight, values: Floats<'_>, update: Update<'_>, in_features: usize) -> (Array<f64>, Vec<f32>) {
    let squares = placed(row_squares(weight, values, in_features), update.a.device());
    let view = weight.view(values.into());
    let norms = row_norms(&Pool::on(update.a.device()), view.store(), &squares, update, in_features);
    (squares, norms.read())
}

/// Scales a merged row in place so that its norm is `magnitude`.
pub fn set_norm(row: &mut [f32], magnitude: f32) {
    let square: f64 = row.iter().map(|&value| f64::from(value).powi(2)).sum();
    let gain = magnitude / square.sqrt() as f32;
    for value in row {
        *value *= gain;
    }
}

/// `||W_j||²` of each row j of the weight, `[out_features]`.
pub fn row_squares(weight: &Weight, values: Floats<'_>, in_features: usize) -> Vec<f64> {
    let (view, mut row) = (weight.view(values.into()), vec![0.0f32; in_features]);
    let store = view.store();
    let square = |at| {
        store.widen(at * in_features, &mut row);
        row.iter().map(|&value| f64::from(value) * f64::from(value)).sum()
    };
    (0..store.len() / in_features).map(square).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::Linear;
    use crate::pass::{Drops, Pass};
    use crate::values::Values;
    use tunesmith_device::Device;
    use tunesmith_ops::testing::{check_gradient, each_level, numbers};

    const TOKENS: usize = 21;
    const IN: usize = 19;
    const OUT: usize = 13;
    const RANK: usize = 3;
    const SCALE: f64 = 0.75;

    /// `b + W (x - x') + m / n ⊙ (W + s B A) x'` in f64, times `seed`, summed: the norms `n` given, since they count as
    /// constants.
    fn reference([x, mask, w, bias, a, b, m, seed]: [&[f64]; 8], norm: &[f64]) -> f64 {
        let mut sum = 0.0;
        for token in 0..TOKENS {
            let x = |i: usize| x[token * IN + i];
            let dropped = |i: usize| x(i) * mask[token * IN + i];
            let low: Vec<f64> = (0..RANK).map(|k| (0..IN).map(|i| a[k * IN + i] * dropped(i)).sum()).collect();
            for j in 0..OUT {
                let base = |x: &dyn Fn(usize) -> f64| (0..IN).map(|i| w[j * IN + i] * x(i)).sum::<f64>();
                let ba: f64 = (0..RANK).map(|k| b[j * RANK + k] * low[k]).sum();
                let v = base(&dropped) + SCALE * ba;
                let y = bias[j] + base(&|i| x(i) - dropped(i)) + m[j] / norm[j] * v;
                sum += y * seed[token * OUT + j];
            }
        }
        sum
    }

    #[test]
    fn dora_equals_its_formula_and_its_finite_differences() {
        each_level(|level| {
            for rate in [0.0f32, 0.4] {
                let pool = Pool::new();
                let (x, w, bias) = (numbers(1, TOKENS * IN), numbers(2, OUT * IN), numbers(3, OUT));
                let (a, b, m) = (numbers(4, RANK * IN), numbers(5, OUT * RANK), numbers(6, OUT));
                let seed = numbers(7, TOKENS * OUT);
                let values = [&a[..], &b, &m].concat();
                let (a_range, b_range) = (0..a.len(), a.len()..a.len() + b.len());
                let m_range = b_range.end..values.len();
                let weight = Weight::frozen(w.clone(), Device::Cpu);
                let squares = row_squares(&weight, Floats::default(), IN);
                let linear = Linear {
                    bias: Some(Weight::frozen(bias.clone(), Device::Cpu)),
                    out_features: OUT,
                    in_features: IN,
                    adapter: Some(Box::new(Dora {
                        matrices: Matrices {
                            a: a_range.clone(),
                            b: b_range.clone(),
                            rank: RANK,
                            scale: SCALE as f32,
                            module: 5,
                            expert: None,
                        },
                        magnitude: Magnitude::new(m_range.clone(), squares.clone().into()),
                    })),
                    weight,
                };
                let drops = Drops { rate, seed: 1, step: 2, first_row: 3, picked: &[] };
                let pass = Pass {
                    values: (&values).into(),
                    pool: &pool,
                    balance: None,
                    dropout: (rate > 0.0).then_some(drops),
                };
                let (xa, dy) = (Activation::from_rows(&pool, &x, IN), Activation::from_rows(&pool, &seed, OUT));
                let (y, kept) = linear.forward(&pass, &xa, None);
                let mut grads = vec![0.0; values.len()];
                let mut dx = pool.act(TOKENS, IN);
                linear.backward(
                    &pass,
                    &Input::new(&xa),
                    kept.as_ref(),
                    &dy,
                    Some((&mut dx, false)),
                    &mut Grads::whole(&mut grads),
                );

                let ones = Activation::from_rows(&pool, &vec![1.0; TOKENS * IN], IN);
                let mask =
                    pass.dropout.map_or_else(|| ones.to_rows(), |drops| drops.of(5, TOKENS).apply(&ones).to_rows());
                let update = Update { a: (&a).into(), b: (&b).into(), rank: RANK, scale: SCALE as f32 };
                let norms = row_norms(&pool, (&w).into(), &squares.clone().into(), update, IN).read();
                let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|&value| f64::from(value)).collect() };
                let norms = wide(&norms);
                let (x, mask, w, bias) = (wide(&x), wide(&mask), wide(&w), wide(&bias));
                let (af, bf, mf, seed) = (wide(&a), wide(&b), wide(&m), wide(&seed));
                let expected = reference([&x, &mask, &w, &bias, &af, &bf, &mf, &seed], &norms);
                let got: f64 = y.to_rows().iter().zip(&seed).map(|(y, s)| f64::from(*y) * s).sum();
                assert!((got - expected).abs() < 1e-4, "{level:?} {rate}: {got} != {expected}");
                let narrow: Vec<f32> = x.iter().map(|&value| value as f32).collect();
                check_gradient("x", &narrow, &dx.to_rows(), |x| {
                    reference([x, &mask, &w, &bias, &af, &bf, &mf, &seed], &norms)
                });
                check_gradient("A", &a, &grads[a_range], |a| {
                    reference([&x, &mask, &w, &bias, a, &bf, &mf, &seed], &norms)
                });
                check_gradient("B", &b, &grads[b_range], |b| {
                    reference([&x, &mask, &w, &bias, &af, b, &mf, &seed], &norms)
                });
                check_gradient("magnitude", &m, &grads[m_range], |m| {
                    reference([&x, &mask, &w, &bias, &af, &bf, m, &seed], &norms)
                });
            }
        });
    }

    #[test]
    fn norms_equal_those_of_the_whole_matrix() {
        let (out, inputs, rank, scale) = (70, 33, 5, 0.7f32);
        let (w, a, b) = (numbers(1, out * inputs), numbers(2, rank * inputs), numbers(3, out * rank));
        let weight = Weight::frozen(w.clone(), Device::Cpu);
        let squares = row_squares(&weight, Floats::default(), inputs);
        let update = Update { a: (&a).into(), b: (&b).into(), rank, scale };
        let magnitude = Magnitude::new(0..out, squares.into());
        let found = |update, tokens| {
            magnitude.norms(&Pool::new(), weight.view(Values::default()).store(), update, inputs, tokens).read()
        };
        let norms = found(update, 1);
        let other = numbers(4, out * rank);
        let moved = Update { b: (&other).into(), ..update };
        assert_ne!(found(moved, 1), norms, "what is kept is of A and B");
        assert_eq!(found(update, 1), found(update, 17), "kept as found");
        assert_eq!(found(update, 1), norms);
        for (row, norm) in norms.into_iter().enumerate() {
            let square: f64 = (0..inputs)
                .map(|i| {
                    let ba: f64 = (0..rank).map(|k| f64::from(b[row * rank + k]) * f64::from(a[k * inputs + i])).sum();
                    (f64::from(w[row * inputs + i]) + f64::from(scale) * ba).powi(2)
                })
                .sum();
            assert!((f64::from(norm) / square.sqrt() - 1.0).abs() < 1e-6, "row {row}: {norm} != {}", square.sqrt());
        }
    }
}

//! `DoRA` (Liu et al., 2024): magnitude and direction apart. With `V = W + s B A` and its row norms `n = ||V||`, the
//! output is `y = b + (m / n) ⊙ V x`; `m` is trained beside A and B, and `n` counts as a constant in backward, as in
//! PEFT.
//!
//! `V` is never formed: `n_j² = ||W_j||² + 2 s (W A^T)_j · B_j + s² B_j (A A^T) B_j^T`, whose first term never changes.
use super::weight::Weight;
use crate::ops::gemm::{Init, Matrix, Store, Term, matmul};
use crate::ops::panel::{Act, LANES, Pool};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The magnitudes of one module.
#[derive(Debug, Clone)]
pub struct Magnitude {
    /// Their place among the trained values, `[out_features]`.
    pub range: Range<usize>,
    /// `||W_j||²` of each row of the base.
    pub squares: Vec<f64>,
    /// What [`Magnitude::norms`] found last.
    known: Arc<Mutex<Option<Known>>>,
}

/// Row norms, and the A and B that they belong to.
#[derive(Debug)]
struct Known {
    a: Vec<f32>,
    b: Vec<f32>,
    norms: Vec<f32>,
}

impl Magnitude {
    /// Magnitudes at `range` of the trained values, of a base whose rows have these squares.
    pub fn new(range: Range<usize>, squares: Vec<f64>) -> Self {
        Self { range, squares, known: Arc::default() }
    }

    /// As [`row_norms`]. Where a few `tokens` are asked for, as token by token of an answer, the norms are kept until A or
    /// B is another: they cost a product with the whole base.
    pub fn norms(
        &self,
        pool: &Arc<Pool>,
        weight: Store<'_>,
        update: Update<'_>,
        in_features: usize,
        tokens: usize,
    ) -> Vec<f32> {
        let fresh = || row_norms(pool, weight, &self.squares, update, in_features);
        if tokens > LANES {
            return fresh();
        }
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().as_ref().filter(|known| known.a == update.a && known.b == update.b) {
            return known.norms.clone();
        }
        // Not under the lock: a thread that waits for others of its pool may take up work that comes by here.
        let norms = fresh();
        *lock() = Some(Known { a: update.a.to_vec(), b: update.b.to_vec(), norms: norms.clone() });
        norms
    }
}

/// The low-rank update of a weight: `scale * B A`.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// `[rank, in_features]`.
    pub a: &'a [f32],
    /// `[out_features, rank]`.
    pub b: &'a [f32],
    /// Rows of A.
    pub rank: usize,
    /// What the product is multiplied by.
    pub scale: f32,
}

/// `||W_j||²` of each row.
pub fn row_squares(weight: &Weight, values: &[f32], in_features: usize) -> Vec<f64> {
    let (view, mut row) = (weight.view(values.into()), vec![0.0f32; in_features]);
    let store = view.store();
    let square = |at| {
        store.widen(at * in_features, &mut row);
        row.iter().map(|&value| f64::from(value) * f64::from(value)).sum()
    };
    (0..store.len() / in_features).map(square).collect()
}

/// `||W_j + s (B A)_j||` of each row, for a base whose rows have these squares.
pub fn row_norms(
    pool: &Arc<Pool>,
    weight: Store<'_>,
    squares: &[f64],
    update: Update<'_>,
    in_features: usize,
) -> Vec<f32> {
    let Update { a, b, rank, scale } = update;
    let rows = Act::from_rows(pool, a, in_features);
    // A W^T `[rank, out_features]` and A A^T `[rank, rank]`.
    let (mut aw, mut aa) = (pool.act(rank, squares.len()), pool.act(rank, rank));
    matmul(&mut aw, Init::Zero, &[Term { matrix: Matrix::rows(weight, in_features), x: &rows }]);
    matmul(&mut aa, Init::Zero, &[Term { matrix: Matrix::rows(a, in_features), x: &rows }]);
    let gram: Vec<f64> = aa.to_rows().into_iter().map(f64::from).collect();
    let scale = f64::from(scale);
    let norm = |(row, square): (usize, &f64)| {
        let b = &b[row * rank..][..rank];
        let (mut cross, mut own) = (0.0, 0.0);
        for (k, &value) in b.iter().enumerate() {
            let value = f64::from(value);
            cross += value * f64::from(aw.at(k, row));
            own += value * gram[k * rank..][..rank].iter().zip(b).map(|(g, &b)| g * f64::from(b)).sum::<f64>();
        }
        (square + scale * (2.0 * cross + scale * own)).max(0.0).sqrt() as f32
    };
    squares.par_iter().with_min_len(64).enumerate().map(norm).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::values::Values;
    use crate::ops::testing::numbers;

    #[test]
    fn norms_equal_those_of_the_whole_matrix() {
        let (out, inputs, rank, scale) = (70, 33, 5, 0.7f32);
        let (w, a, b) = (numbers(1, out * inputs), numbers(2, rank * inputs), numbers(3, out * rank));
        let weight = Weight::frozen(w.clone(), &[out, inputs]).unwrap();
        let squares = row_squares(&weight, &[], inputs);
        let update = Update { a: &a, b: &b, rank, scale };
        let magnitude = Magnitude::new(0..out, squares);
        let found = |update, tokens| {
            magnitude.norms(&Pool::new(), weight.view(Values::default()).store(), update, inputs, tokens)
        };
        let norms = found(update, 1);
        let other = numbers(4, out * rank);
        let moved = Update { b: &other, ..update };
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

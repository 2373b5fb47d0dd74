//! Row norms of a weight with a low-rank update, `||W_j + s (B A)_j||`, as `DoRA` needs them (Liu et al., 2024,
//! <https://arxiv.org/abs/2402.09353>).
use crate::floats::Floats;
use crate::gemm::{Init, Matrix, Store, Term, matmul};
use crate::panel::{Act, Pool};
use rayon::prelude::*;
use std::sync::Arc;
use tunesmith_device::Device;

/// The low-rank update of a weight: `scale * B A`.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// A `[rank, in_features]`.
    pub a: Floats<'a>,
    /// B `[out_features, rank]`.
    pub b: Floats<'a>,
    /// Rows of A, columns of B.
    pub rank: usize,
    /// What the product is multiplied by.
    pub scale: f32,
}

/// `||W_j + s (B A)_j||` of each row j, given `squares[j] = ||W_j||²`.
///
/// The sum is never formed: `||W_j||² + 2 s (W A^T)_j · B_j + s² B_j (A A^T) B_j^T`.
pub fn row_norms(
    pool: &Arc<Pool>,
    weight: Store<'_>,
    squares: &[f64],
    update: Update<'_>,
    in_features: usize,
) -> Vec<f32> {
    let Update { a, b, rank, scale } = update;
    let rows = if a.device() == Device::Cpu {
        Act::from_rows(pool, a.host(), in_features)
    } else {
        pool.act(rank, in_features)
    };
    // A W^T `[rank, out_features]` and A A^T `[rank, rank]`.
    let (mut aw, mut aa) = (pool.act(rank, squares.len()), pool.act(rank, rank));
    matmul(&mut aw, Init::Zero, &[Term { matrix: Matrix::rows(weight, in_features), x: &rows }]);
    matmul(&mut aa, Init::Zero, &[Term { matrix: Matrix::rows(a, in_features), x: &rows }]);
    if rows.is_meta() {
        return vec![1.0; squares.len()];
    }
    let b = b.host();
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
    use crate::testing::{each_level, numbers};

    #[test]
    fn norms_are_those_of_the_sum() {
        each_level(|level| {
            for (outputs, inputs, rank) in [(1, 1, 1), (70, 19, 3), (5, 33, 8)] {
                let (w, a, b) = (numbers(1, outputs * inputs), numbers(2, rank * inputs), numbers(3, outputs * rank));
                let square = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
                let squares: Vec<f64> = w.chunks(inputs).map(square).collect();
                let update = Update { a: (&a).into(), b: (&b).into(), rank, scale: 0.75 };
                let norms = row_norms(&Pool::new(), Store::F32(&w), &squares, update, inputs);
                for (row, got) in norms.into_iter().enumerate() {
                    let value = |i: usize| {
                        let ba = |k: usize| f64::from(b[row * rank + k]) * f64::from(a[k * inputs + i]);
                        f64::from(w[row * inputs + i]) + 0.75 * (0..rank).map(ba).sum::<f64>()
                    };
                    let want = (0..inputs).map(|i| value(i).powi(2)).sum::<f64>().sqrt();
                    assert!((f64::from(got) - want).abs() < 1e-4, "{level:?}: {got} != {want}");
                }
            }
        });
    }
}

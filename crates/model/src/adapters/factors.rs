//! A and B from a truncated SVD, for initializations that approximate a weight or a residual by `scale B A`.
use rayon::prelude::*;

use crate::svd;

/// A `[rank, cols]` and B `[rows, rank]` with `scale B A = sum u s v^T`, the roots of the singular values on both
/// sides.
pub(super) fn factors(triplets: &svd::Triplets, rows: usize, scale: f32) -> [Vec<f32>; 2] {
    let roots: Vec<f64> = triplets.s.iter().map(|value| (value / f64::from(scale)).sqrt()).collect();
    let row = |(root, v): (&f64, &Vec<f64>)| v.iter().map(|value| (root * value) as f32).collect::<Vec<_>>();
    let a = roots.iter().zip(&triplets.v).flat_map(row).collect();
    let columns: Vec<_> = roots.iter().zip(&triplets.u).collect();
    let b = (0..rows).flat_map(|row| columns.iter().map(move |(root, u)| (*root * u[row]) as f32)).collect();
    [a, b]
}

/// Subtracts `scale B A` from a weight whose rows have `cols` numbers.
pub(super) fn subtract(weight: &mut [f32], cols: usize, scale: f32, [a, b]: [&[f32]; 2]) {
    let rank = a.len() / cols;
    weight.par_chunks_mut(cols).zip(b.par_chunks(rank)).for_each(|(row, b)| {
        for (col, value) in row.iter_mut().enumerate() {
            let ba: f64 = b.iter().enumerate().map(|(k, &b)| f64::from(b) * f64::from(a[k * cols + col])).sum();
            *value = (f64::from(*value) - f64::from(scale) * ba) as f32;
        }
    });
}

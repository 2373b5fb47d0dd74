//! Row norms on the CPU, many rows in parallel.
use super::Update;
use crate::activation::Activation;
use rayon::prelude::*;
use tunesmith_cpu_slice::CpuSlice as _;

/// The norm of each row. `aw` is A W^T `[rank, out_features]`, `aa` is A A^T `[rank, rank]`.
pub(super) fn row_norms(squares: &[f64], update: Update<'_>, aw: &Activation, aa: &Activation) -> Vec<f32> {
    let Update { b, rank, scale, .. } = update;
    let b = b.cpu_slice();
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

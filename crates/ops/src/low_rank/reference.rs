//! The definition in f64: forms the sum.

/// The norm of each row of `W + scale * B A`: `w [out_features, in_features]`, `a [rank, in_features]`,
/// `b [out_features, rank]`.
pub(super) fn row_norms(w: &[f32], a: &[f32], b: &[f32], rank: usize, scale: f64) -> Vec<f64> {
    let inputs = a.len() / rank;
    let norm = |(w, b): (&[f32], &[f32])| {
        let value = |i: usize| {
            let ba = |k: usize| f64::from(b[k]) * f64::from(a[k * inputs + i]);
            f64::from(w[i]) + scale * (0..rank).map(ba).sum::<f64>()
        };
        (0..inputs).map(|i| value(i).powi(2)).sum::<f64>().sqrt()
    };
    w.chunks(inputs).zip(b.chunks(rank)).map(norm).collect()
}

//! The definitions in f64, on rows.

/// One element of a term: `sum_k w[m, k] x[k]`, for row `m` of `w [m, k]` and one token's `x [k]`.
fn dot(w: &[f32], x: &[f32]) -> f64 {
    w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
}

/// `sum over terms of w x^T`, `[tokens, m]`: each term is `w [m, k]`, `x [tokens, k]` and `k`.
pub(super) fn matmul(init: &[f32], rows: usize, terms: &[(&[f32], &[f32], usize)]) -> Vec<f64> {
    let element = |(at, &init): (usize, &f32)| {
        let (token, row) = (at / rows, at % rows);
        let term =
            |&(w, x, depth): &(&[f32], &[f32], usize)| dot(&w[row * depth..][..depth], &x[token * depth..][..depth]);
        f64::from(init) + terms.iter().map(term).sum::<f64>()
    };
    init.iter().enumerate().map(element).collect()
}

/// `sum_t y[t, m] x[t, n]`, `[m, n]`: `y [tokens, m]`, `x [tokens, n]`.
pub(super) fn outer(y: &[f32], rows: usize, x: &[f32], cols: usize) -> Vec<f64> {
    let element = |at: usize| {
        let pairs = y.chunks(rows).zip(x.chunks(cols));
        pairs.map(|(y, x)| f64::from(y[at / cols]) * f64::from(x[at % cols])).sum()
    };
    (0..rows * cols).map(element).collect()
}

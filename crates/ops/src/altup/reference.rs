//! The definition in f64, on rows.

/// Of `x [tokens, streams * dim]` and `coefs [tokens, streams * streams]`.
pub(super) fn predict(x: &[f64], coefs: &[f64], streams: usize, dim: usize) -> Vec<f64> {
    let rows = x.chunks(streams * dim).zip(coefs.chunks(streams * streams));
    let one = |(x, c): (&[f64], &[f64])| {
        let of = |at: usize| {
            let (to, feature) = (at / dim, at % dim);
            x[at] + (0..streams).map(|from| c[to * streams + from] * x[from * dim + feature]).sum::<f64>()
        };
        (0..streams * dim).map(of).collect::<Vec<f64>>()
    };
    rows.flat_map(one).collect()
}

/// Of `p [tokens, streams * dim]`, `u [tokens, dim]` and `coefs [tokens, streams]`.
pub(super) fn correct(p: &[f64], u: &[f64], coefs: &[f64], active: usize, dim: usize) -> Vec<f64> {
    let streams = p.len() / u.len();
    let of = |at: usize| {
        let (token, stream, feature) = (at / (streams * dim), at / dim % streams, at % dim);
        let change = u[token * dim + feature] - p[(token * streams + active) * dim + feature];
        p[at] + (1.0 + coefs[token * streams + stream]) * change
    };
    (0..p.len()).map(of).collect()
}

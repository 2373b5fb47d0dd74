//! The definition in f64, on rows.

/// `x [tokens, groups * dim]`, `weight [dim]`.
pub(super) fn apply(x: &[f64], weight: &[f64], offset: f64, eps: f64) -> Vec<f64> {
    let one = |x: &[f64]| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * (w + offset)).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(one).collect()
}

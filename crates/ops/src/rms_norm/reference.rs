//! The definition in f64, on rows.

/// `x [tokens, groups * dim]`, `weight [dim]` or `[groups * dim]`.
pub(super) fn apply(x: &[f64], dim: usize, weight: &[f64], offset: f64, eps: f64) -> Vec<f64> {
    let one = |(group, x): (usize, &[f64])| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let weight = weight.iter().cycle().skip(group * dim % weight.len());
        x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * (w + offset)).collect::<Vec<_>>()
    };
    x.chunks(dim).enumerate().flat_map(one).collect()
}

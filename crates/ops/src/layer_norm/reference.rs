//! The definition in f64, on rows.

/// `x [tokens, features]`, `weight` and `bias` `[features]`.
pub(super) fn apply(x: &[f64], weight: &[f64], bias: &[f64], eps: f64) -> Vec<f64> {
    let one = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let var = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / x.len() as f64;
        let of = |((x, w), b): ((&f64, &f64), &f64)| (x - mean) / (var + eps).sqrt() * w + b;
        x.iter().zip(weight).zip(bias).map(of).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(one).collect()
}

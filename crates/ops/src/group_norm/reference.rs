//! The definition in f64, on rows.

/// `x [places, features]`, `weight` and `bias` `[features]`.
pub(super) fn forward(x: &[f64], groups: usize, eps: f64, weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let (features, size) = (weight.len(), weight.len() / groups);
    let own = |group: usize| {
        x.iter().enumerate().filter(move |(at, _)| at % features / size == group).map(|(_, value)| *value)
    };
    let stats = |group: usize| {
        let count = own(group).count() as f64;
        let mean = own(group).sum::<f64>() / count;
        (mean, own(group).map(|x| (x - mean) * (x - mean)).sum::<f64>() / count)
    };
    let stats: Vec<(f64, f64)> = (0..groups).map(stats).collect();
    let of = |(at, x): (usize, &f64)| {
        let feature = at % features;
        let (mean, var) = stats[feature / size];
        (x - mean) / (var + eps).sqrt() * weight[feature] + bias[feature]
    };
    x.iter().enumerate().map(of).collect()
}

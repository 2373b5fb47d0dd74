//! The definition in f64, on rows `[tokens, features]`.

pub(super) fn forward(x: &[f64], multiplier: f64, features: usize) -> Vec<f64> {
    let one = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / features as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / features as f64;
        let cut = mean + multiplier * variance.sqrt();
        row.iter().map(|x| (x - cut).max(0.0)).collect::<Vec<f64>>()
    };
    x.chunks(features).flat_map(one).collect()
}

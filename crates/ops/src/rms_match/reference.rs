//! The definition in f64, on rows `[tokens, features]`.

fn mean_square(row: &[f64]) -> f64 {
    row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64
}

pub(super) fn forward(x: &[f64], r: &[f64], features: usize) -> Vec<f64> {
    let one = |(x, r): (&[f64], &[f64])| {
        let factor = mean_square(r).sqrt() / mean_square(x).max(f64::from(super::FLOOR)).sqrt();
        x.iter().map(|x| x * factor).collect::<Vec<f64>>()
    };
    x.chunks(features).zip(r.chunks(features)).flat_map(one).collect()
}

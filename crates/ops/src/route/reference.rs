//! The definition in f64, on rows.

/// The weights `[tokens, experts]`; zero where an expert is not chosen.
pub(super) fn weights(logits: &[f64], experts: usize, per_token: usize, normalised: bool) -> Vec<f64> {
    let one = |row: &[f64]| {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        let p: Vec<f64> = row.iter().map(|x| x.exp() / sum).collect();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
        let sum: f64 = if normalised { order[..per_token].iter().map(|&e| p[e]).sum() } else { 1.0 };
        (0..experts).map(|e| if order[..per_token].contains(&e) { p[e] / sum } else { 0.0 }).collect::<Vec<f64>>()
    };
    logits.chunks(experts).flat_map(one).collect()
}

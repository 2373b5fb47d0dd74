//! The definition in f64: keys and values of all positions, and softmax over them.
use crate::latent_heads::LatentHeads;

/// The mixed values `[heads * value]` of one query `[heads * (nope + rope)]` that sees `positions`, each a latent with what turns, by a
/// projection `weight [heads * (nope + value)][rank]`.
pub(super) fn decode(
    q: &[f64],
    positions: &[Vec<f64>],
    weight: &[Vec<f64>],
    heads: LatentHeads,
    scale: f64,
) -> Vec<f64> {
    let LatentHeads { heads: count, nope, rope, value } = heads;
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut mixed = Vec::new();
    for head in 0..count {
        let q = &q[head * (nope + rope)..][..nope + rope];
        let rows = &weight[head * (nope + value)..][..nope + value];
        let project = |position: &[f64], rows: &[Vec<f64>]| -> Vec<f64> {
            rows.iter().map(|row| dot(row, &position[..row.len()])).collect()
        };
        let rank = rows[0].len();
        let score = |position: &Vec<f64>| {
            let key = [project(position, &rows[..nope]), position[rank..].to_vec()].concat();
            (scale * dot(q, &key)).exp()
        };
        let weights: Vec<f64> = positions.iter().map(score).collect();
        let total: f64 = weights.iter().sum();
        let mut o = vec![0.0; value];
        for (position, weight) in positions.iter().zip(&weights) {
            let v = project(position, &rows[nope..]);
            o.iter_mut().zip(v).for_each(|(o, v)| *o += weight / total * v);
        }
        mixed.extend(o);
    }
    mixed
}

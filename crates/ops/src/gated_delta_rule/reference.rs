//! The recurrence in f64, on rows.
use super::Heads;
use std::ops::Range;

/// The inputs of [`super::Inputs`], row-major.
pub(super) struct Rows<'a> {
    pub(super) qkv: &'a [f64],
    pub(super) b: &'a [f64],
    pub(super) a: &'a [f64],
    pub(super) a_log: &'a [f64],
    pub(super) dt_bias: &'a [f64],
    pub(super) beta_max: f64,
}

fn normed(x: &[f64]) -> Vec<f64> {
    let root = (x.iter().map(|x| x * x).sum::<f64>() + f64::from(super::NORM_EPS)).sqrt();
    x.iter().map(|x| x / root).collect()
}

pub(super) fn forward(rows: &Rows<'_>, heads: Heads, sequences: &[Range<usize>]) -> Vec<f64> {
    let Heads { key, value, key_dim, value_dim } = heads;
    let (width, keys) = (2 * heads.keys() + heads.values(), key * key_dim);
    let tokens = rows.qkv.len() / width;
    let mut out = vec![0.0; tokens * heads.values()];
    for sequence in sequences {
        for head in 0..value {
            let mut state = vec![vec![0.0; value_dim]; key_dim];
            for token in sequence.clone() {
                let row = &rows.qkv[token * width..][..width];
                let at = head / (heads.value / heads.key) * key_dim;
                let q: Vec<f64> = normed(&row[at..][..key_dim]).iter().map(|q| q / (key_dim as f64).sqrt()).collect();
                let k = normed(&row[keys + at..][..key_dim]);
                let v = &row[2 * keys + head * value_dim..][..value_dim];
                let beta = rows.beta_max / (1.0 + (-rows.b[token * value + head]).exp());
                let x = rows.a[token * value + head] + rows.dt_bias[head];
                let decay = (-rows.a_log[head].exp() * x.exp().ln_1p()).exp();
                for j in 0..value_dim {
                    for row in &mut state {
                        row[j] *= decay;
                    }
                    let found: f64 = state.iter().zip(&k).map(|(row, k)| row[j] * k).sum();
                    let u = beta * (v[j] - found);
                    state.iter_mut().zip(&k).for_each(|(row, k)| row[j] += k * u);
                    out[token * heads.values() + head * value_dim + j] =
                        state.iter().zip(&q).map(|(row, q)| row[j] * q).sum();
                }
            }
        }
    }
    out
}

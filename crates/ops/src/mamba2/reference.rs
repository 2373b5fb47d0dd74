//! The recurrence in f64, on rows.
use super::Heads;
use std::ops::Range;

/// The inputs of [`super::Inputs`], row-major.
pub(super) struct Rows<'a> {
    pub(super) xbc: &'a [f64],
    pub(super) dt: &'a [f64],
    pub(super) a_log: &'a [f64],
    pub(super) d: &'a [f64],
    pub(super) dt_bias: &'a [f64],
    pub(super) limits: [f64; 2],
}

pub(super) fn forward(rows: &Rows<'_>, heads: Heads, sequences: &[Range<usize>]) -> Vec<f64> {
    let Heads { count, groups, dim, state: width } = heads;
    let tokens = rows.xbc.len() / heads.features();
    let mut out = vec![0.0; tokens * heads.values()];
    for sequence in sequences {
        for head in 0..count {
            let mut state = vec![vec![0.0; dim]; width];
            for token in sequence.clone() {
                let row = &rows.xbc[token * heads.features()..][..heads.features()];
                let x = &row[head * dim..][..dim];
                let at = heads.values() + head / (count / groups) * width;
                let (b, c) = (&row[at..][..width], &row[at + groups * width..][..width]);
                let raw = rows.dt[token * count + head] + rows.dt_bias[head];
                let step = raw.exp().ln_1p().clamp(rows.limits[0], rows.limits[1]);
                let decay = (-rows.a_log[head].exp() * step).exp();
                for j in 0..dim {
                    for (row, b) in state.iter_mut().zip(b) {
                        row[j] = decay * row[j] + b * step * x[j];
                    }
                    let read: f64 = state.iter().zip(c).map(|(row, c)| row[j] * c).sum();
                    out[token * heads.values() + head * dim + j] = read + rows.d[head] * x[j];
                }
            }
        }
    }
    out
}

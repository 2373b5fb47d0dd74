//! The definition in f64, on rows.

/// `gain[j] v[t, j]`, with `v [tokens, features]` row-major.
pub(super) fn times(v: &[f32], gain: &[f64]) -> Vec<f64> {
    v.iter().enumerate().map(|(at, v)| gain[at % gain.len()] * f64::from(*v)).collect()
}

//! The definition in f64.

pub(super) fn sum(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum()
}

//! The definition in f64.

pub(super) fn clamp(x: f64, [low, high]: [f64; 2]) -> f64 {
    x.max(low).min(high)
}

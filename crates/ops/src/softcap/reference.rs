//! The definition in f64.

pub(super) fn cap(x: f64, cap: f64) -> f64 {
    cap * (x / cap).tanh()
}

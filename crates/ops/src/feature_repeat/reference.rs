//! The definition in f64, on numbers of any shape: each of them, so often.

pub(super) fn forward(x: &[f64], times: usize) -> Vec<f64> {
    x.iter().flat_map(|&number| std::iter::repeat_n(number, times)).collect()
}

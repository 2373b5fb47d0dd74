//! The definition in f64.

pub(super) fn update(averages: &mut [f64], values: &[f64], weight: f64) {
    for (average, value) in averages.iter_mut().zip(values) {
        *average += weight * (value - *average);
    }
}

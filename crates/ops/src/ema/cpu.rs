//! The moving average on the CPU: one task updates [`TASK`] numbers.
use crate::par::TASK;
use rayon::prelude::*;

pub(super) fn update(averages: &mut [f32], values: &[f32], weight: f32) {
    averages.par_chunks_mut(TASK).zip(values.par_chunks(TASK)).for_each(|(averages, values)| {
        for (average, value) in averages.iter_mut().zip(values) {
            *average = if weight < 0.5 {
                *average + weight * (value - *average)
            } else {
                value - (value - *average) * (1.0 - weight)
            };
        }
    });
}

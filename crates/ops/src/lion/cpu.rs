//! Lion's update on the CPU: one task updates [`TASK`] values.
use super::Step;
use crate::par::TASK;
use rayon::prelude::*;

pub(super) fn update(values: &mut [f32], grads: &[f32], exp_avg: &mut [f32], step: &Step) {
    let Step { factor, rate, beta1, beta2, weight_decay } = *step;
    let factor = factor.known();
    let keep = (1.0 - rate * weight_decay) as f32;
    let (rest1, rest2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
    let (beta1, beta2, rate) = (beta1 as f32, beta2 as f32, rate as f32);
    let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(exp_avg.par_chunks_mut(TASK));
    parts.for_each(|((values, grads), momentum)| {
        for ((value, grad), m) in values.iter_mut().zip(grads).zip(momentum) {
            let grad = grad * factor;
            let direction = beta1 * *m + rest1 * grad;
            // Here the sign of 0 is 0; `f32::signum` would give 1.
            let sign = f32::from(i8::from(direction > 0.0) - i8::from(direction < 0.0));
            *value = *value * keep - rate * sign;
            *m = beta2 * *m + rest2 * grad;
        }
    });
}

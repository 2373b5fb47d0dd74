//! `AdamW`'s update on the CPU: one task updates [`TASK`] values.
use super::Step;
use crate::denormal::flush_denormal;
use crate::par::TASK;
use rayon::prelude::*;

pub(super) fn update(values: &mut [f32], grads: &[f32], m: &mut [f32], v: &mut [f32], step: &Step) {
    let [keep, pace, root] = step.rounded();
    let factor = step.factor.known();
    let (beta1, beta2) = (step.beta1 as f32, step.beta2 as f32);
    let (rest1, rest2) = ((1.0 - step.beta1) as f32, (1.0 - step.beta2) as f32);
    let epsilon = step.epsilon as f32;
    let moments = m.par_chunks_mut(TASK).zip(v.par_chunks_mut(TASK));
    let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK)).zip(moments);
    parts.for_each(|((values, grads), (m, v))| {
        for (((value, grad), m), v) in values.iter_mut().zip(grads).zip(m).zip(v) {
            let grad = grad * factor;
            *m = flush_denormal(beta1 * *m + rest1 * grad);
            *v = flush_denormal(beta2 * *v + rest2 * grad * grad);
            let denominator = v.sqrt() / root + epsilon;
            *value = *value * keep - pace * (*m / denominator);
        }
    });
}

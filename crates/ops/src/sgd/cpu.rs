//! Stochastic gradient descent on the CPU: one task updates [`TASK`] values.
use super::Step;
use crate::denormal::flush_denormal;
use crate::par::TASK;
use rayon::prelude::*;

pub(super) fn update(values: &mut [f32], grads: &[f32], buffer: Option<&mut [f32]>, step: &Step) {
    let Step { factor, rate, momentum, dampening, nesterov, weight_decay } = *step;
    let factor = factor.known();
    let (rate, decay) = (rate as f32, weight_decay as f32);
    let parts = values.par_chunks_mut(TASK).zip(grads.par_chunks(TASK));
    let Some(buffer) = buffer else {
        parts.for_each(|(values, grads)| {
            for (value, grad) in values.iter_mut().zip(grads) {
                *value -= rate * (grad * factor + decay * *value);
            }
        });
        return;
    };
    let (momentum, fresh) = (momentum as f32, (1.0 - dampening) as f32);
    parts.zip(buffer.par_chunks_mut(TASK)).for_each(|((values, grads), buffer)| {
        for ((value, grad), velocity) in values.iter_mut().zip(grads).zip(buffer) {
            let grad = grad * factor + decay * *value;
            *velocity = flush_denormal(momentum * *velocity + fresh * grad);
            let direction = if nesterov { grad + momentum * *velocity } else { *velocity };
            *value -= rate * direction;
        }
    });
}

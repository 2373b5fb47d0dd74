//! The definition in f64.
use super::Step;

/// `buffer` is empty without momentum.
pub(super) fn update(values: &mut [f64], grads: &[f64], buffer: &mut [f64], step: &Step) {
    for (at, (value, grad)) in values.iter_mut().zip(grads).enumerate() {
        let grad = grad * f64::from(step.factor.known()) + step.weight_decay * *value;
        let direction = buffer.get_mut(at).map_or(grad, |velocity| {
            *velocity = step.momentum * *velocity + (1.0 - step.dampening) * grad;
            if step.nesterov { grad + step.momentum * *velocity } else { *velocity }
        });
        *value -= step.rate * direction;
    }
}

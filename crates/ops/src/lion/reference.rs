//! The definition in f64.
use super::Step;

pub(super) fn update(values: &mut [f64], grads: &[f64], exp_avg: &mut [f64], step: &Step) {
    for ((value, grad), m) in values.iter_mut().zip(grads).zip(exp_avg) {
        let grad = grad * f64::from(step.factor.known());
        let direction = step.beta1 * *m + (1.0 - step.beta1) * grad;
        let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
        *value = (1.0 - step.rate * step.weight_decay) * *value - step.rate * sign;
        *m = step.beta2 * *m + (1.0 - step.beta2) * grad;
    }
}

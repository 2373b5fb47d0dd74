//! The definition in f64.
use super::Step;

pub(crate) fn update(values: &mut [f64], grads: &[f64], m: &mut [f64], v: &mut [f64], step: &Step) {
    let Step { beta1, beta2, .. } = *step;
    let t = step.number as f64;
    for (((value, grad), m), v) in values.iter_mut().zip(grads).zip(m).zip(v) {
        let grad = grad * f64::from(step.factor.known());
        *m = beta1 * *m + (1.0 - beta1) * grad;
        *v = beta2 * *v + (1.0 - beta2) * grad * grad;
        let denominator = v.sqrt() / (1.0 - beta2.powf(t)).sqrt() + step.epsilon;
        *value = (1.0 - step.rate * step.weight_decay) * *value - step.rate / (1.0 - beta1.powf(t)) * *m / denominator;
    }
}

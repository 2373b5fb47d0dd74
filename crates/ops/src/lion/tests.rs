//! Steps against the definition.
use super::*;
use crate::par::TASK;
use crate::testing::{f64s, near, numbers};

#[test]
fn steps_follow_the_definition() {
    let step = Step { factor: 0.5, rate: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
    let count = TASK + 5;
    let (mut values, mut momentum) = (numbers(1, count), vec![0.0; count]);
    let (mut expected, mut expected_momentum) = (f64s(&values), f64s(&momentum));
    for seed in 2..5 {
        let mut grads = numbers(seed, count);
        // No direction, and so no step.
        grads[3] = 0.0;
        update((&mut values).into(), (&grads).into(), (&mut momentum).into(), &step);
        reference::update(&mut expected, &f64s(&grads), &mut expected_momentum, &step);
    }
    near("values", &values, &expected, 1e-6);
    near("exp_avg", &momentum, &expected_momentum, 1e-6);
}

//! Steps against the definition.
use super::*;
use crate::par::TASK;
use crate::testing::{each_engine, f64s, near, numbers};

#[test]
fn steps_follow_the_definition() {
    each_engine(|engine| {
        let step = Step { factor: 0.5.into(), rate: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
        let count = TASK + 5;
        let (values, momentum) = (numbers(1, count), vec![0.0; count]);
        let (mut expected, mut expected_momentum) = (f64s(&values), f64s(&momentum));
        let (mut on_device, mut buffer) = (engine.array(&values), engine.array(&momentum));
        for seed in 2..5 {
            let mut grads = numbers(seed, count);
            // No direction, and so no step.
            grads[3] = 0.0;
            update(on_device.view_mut(), engine.array(&grads).view(), buffer.view_mut(), &step);
            reference::update(&mut expected, &f64s(&grads), &mut expected_momentum, &step);
        }
        near("values", &on_device.read(), &expected, 1e-6);
        near("exp_avg", &buffer.read(), &expected_momentum, 1e-6);
    });
}

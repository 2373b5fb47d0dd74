//! Steps against the definition: plain, with momentum, and Nesterov's.
use super::*;
use crate::par::TASK;
use crate::testing::{f64s, near, numbers};

#[test]
fn steps_follow_the_definition() {
    let count = TASK + 5;
    for (momentum, dampening, nesterov) in [(0.0, 0.0, false), (0.9, 0.2, false), (0.9, 0.0, true)] {
        let step = Step { factor: 0.5, rate: 0.1, momentum, dampening, nesterov, weight_decay: 0.1 };
        let (mut values, mut buffer) = (numbers(1, count), vec![0.0; if momentum > 0.0 { count } else { 0 }]);
        let (mut expected, mut expected_buffer) = (f64s(&values), f64s(&buffer));
        for seed in 2..5 {
            let grads = numbers(seed, count);
            let of_op = (momentum > 0.0).then(|| FloatsMut::from(&mut buffer));
            update((&mut values).into(), (&grads).into(), of_op, &step);
            reference::update(&mut expected, &f64s(&grads), &mut expected_buffer, &step);
        }
        near("values", &values, &expected, 1e-6);
        near("momentum", &buffer, &expected_buffer, 1e-6);
    }
}

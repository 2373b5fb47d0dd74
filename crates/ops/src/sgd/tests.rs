//! Steps against the definition: plain, with momentum, and Nesterov's.
use super::*;
use crate::par::TASK;
use crate::testing::{each_engine, f64s, near, numbers};

#[test]
fn steps_follow_the_definition() {
    each_engine(|engine| {
        let count = TASK + 5;
        for (momentum, dampening, nesterov) in [(0.0, 0.0, false), (0.9, 0.2, false), (0.9, 0.0, true)] {
            let step = Step { factor: 0.5.into(), rate: 0.1, momentum, dampening, nesterov, weight_decay: 0.1 };
            let (values, buffer) = (numbers(1, count), vec![0.0; if momentum > 0.0 { count } else { 0 }]);
            let (mut expected, mut expected_buffer) = (f64s(&values), f64s(&buffer));
            let (mut on_device, mut momentum_there) = (engine.array(&values), engine.array(&buffer));
            for seed in 2..5 {
                let grads = numbers(seed, count);
                let of_op = (momentum > 0.0).then(|| momentum_there.view_mut());
                update(on_device.view_mut(), engine.array(&grads).view(), of_op, &step);
                reference::update(&mut expected, &f64s(&grads), &mut expected_buffer, &step);
            }
            near("values", &on_device.read(), &expected, 1e-6);
            near("momentum", &momentum_there.read(), &expected_buffer, 1e-6);
        }
    });
}

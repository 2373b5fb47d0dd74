//! Steps against the definition.
use super::*;
use crate::par::TASK;
use crate::testing::{each_engine, f64s, near, numbers};

#[test]
fn steps_follow_the_definition() {
    each_engine(|engine| {
        let count = TASK + 5;
        let [values, m, v] = [numbers(1, count), vec![0.0; count], vec![0.0; count]];
        let [mut values64, mut m64, mut v64] = [f64s(&values), f64s(&m), f64s(&v)];
        let [mut on_device, mut md, mut vd] = [&values, &m, &v].map(|numbers| engine.array(numbers));
        for number in 1..4 {
            let grads = numbers(number + 1, count);
            let step = Step {
                factor: 0.5.into(),
                rate: 0.01,
                beta1: 0.9,
                beta2: 0.999,
                epsilon: 1e-8,
                weight_decay: 0.1,
                number,
            };
            let grads_there = engine.array(&grads);
            update(on_device.view_mut(), grads_there.view(), md.view_mut(), vd.view_mut(), &step);
            reference::update(&mut values64, &f64s(&grads), &mut m64, &mut v64, &step);
        }
        near("values", &on_device.read(), &values64, 1e-5);
        near("exp_avg", &md.read(), &m64, 1e-6);
        near("exp_avg_sq", &vd.read(), &v64, 1e-6);
    });
}

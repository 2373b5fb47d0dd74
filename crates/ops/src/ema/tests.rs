//! The average against the definition, for small and large weights.
use super::*;
use crate::par::TASK;
use crate::testing::{each_engine, f64s, near, numbers};

#[test]
fn averages_move_by_their_weight() {
    each_engine(|engine| {
        let (start, values) = (numbers(1, TASK + 11), numbers(2, TASK + 11));
        for weight in [0.0f32, 0.05, 0.4, 0.6, 1.0] {
            let (mut found, mut expected) = (engine.array(&start), f64s(&start));
            update(found.view_mut(), engine.array(&values).view(), weight);
            reference::update(&mut expected, &f64s(&values), f64::from(weight));
            let found = found.read();
            near("averages", &found, &expected, 1e-6);
            assert!(weight < 1.0 || found == values, "a weight of 1 copies");
        }
    });
}

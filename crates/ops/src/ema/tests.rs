//! The average against the definition, for small and large weights.
use super::*;
use crate::par::TASK;
use crate::testing::{f64s, near, numbers};

#[test]
fn averages_move_by_their_weight() {
    let (start, values) = (numbers(1, TASK + 11), numbers(2, TASK + 11));
    for weight in [0.0f32, 0.05, 0.4, 0.6, 1.0] {
        let (mut found, mut expected) = (start.clone(), f64s(&start));
        update((&mut found).into(), (&values).into(), weight);
        reference::update(&mut expected, &f64s(&values), f64::from(weight));
        near("averages", &found, &expected, 1e-6);
        assert!(weight < 1.0 || found == values, "a weight of 1 copies");
    }
}

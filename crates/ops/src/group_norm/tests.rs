//! The norm against the definition.
use super::*;
use crate::testing::{each_engine, f64s, near, numbers};

#[test]
fn equals_the_definition() {
    each_engine(|engine| {
        for (places, groups, size) in [(1, 1, 2), (5, 2, 3), (17, 4, 8), (40, 3, 5), (300, 32, 1)] {
            let features = groups * size;
            // A mean far from zero: the variance must not be a difference of large numbers.
            let x: Vec<f32> = numbers(1, places * features).iter().map(|x| x + 20.0).collect();
            let (weight, bias) = (numbers(2, features), numbers(3, features));
            let [weights, biases] = [&weight, &bias].map(|values| engine.array(values));
            let pool = engine.pool();
            let h = forward(&Activation::from_rows(&pool, &x, features), groups, 1e-2, weights.view(), biases.view());
            let wanted = reference::forward(&f64s(&x), groups, 1e-2, &f64s(&weight), &f64s(&bias));
            near("h", &h.to_rows(), &wanted, 2e-5);
        }
    });
}

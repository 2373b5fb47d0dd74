//! Copies and their gradients against the definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, f64s, near, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let pool = engine.pool();
        for (tokens, features, times) in [(37, 3, 5), (16, 1, 24), (1, 4, 1), (19, 7, 2)] {
            let (x, seed) = (numbers(1, tokens * features), numbers(2, tokens * features * times));
            let y = forward(&Activation::from_rows(&pool, &x, features), times);
            near("y", &y.to_rows(), &reference::forward(&f64s(&x), times), 0.0);
            // The loss is the sum of the results, each times its seed: `seed` is its gradient.
            let dx = backward(&Activation::from_rows(&pool, &seed, features * times), times);
            let loss = |x: &[f64]| -> f64 {
                reference::forward(x, times).iter().zip(&seed).map(|(&x, &seed)| x * f64::from(seed)).sum()
            };
            check_gradient("dx", &x, &dx.to_rows(), loss);
        }
    });
}

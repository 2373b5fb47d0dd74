//! The cut against its definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, f64s, near, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let pool = engine.pool();
        for (tokens, features, multiplier) in [(37, 5, 0.3), (16, 48, 1.3), (1, 33, -0.4), (19, 70, 0.0)] {
            let (x, seed) = (numbers(1, tokens * features), numbers(2, tokens * features));
            let rows = |values: &[f32]| Activation::from_rows(&pool, values, features);
            let y = forward(&rows(&x), multiplier).to_rows();
            near("y", &y, &reference::forward(&f64s(&x), f64::from(multiplier), features), 1e-5);
            let kept = y.iter().filter(|y| **y > 0.0).count();
            assert!(kept > 0 && kept < y.len(), "{kept} of {}", y.len());
            let mut dx = rows(&seed);
            backward(&rows(&x), multiplier, &mut dx);
            // The loss is the sum of the results, each times its seed: `seed` is its gradient.
            let loss = |x: &[f64]| -> f64 {
                let y = reference::forward(x, f64::from(multiplier), features);
                y.iter().zip(&seed).map(|(&y, &seed)| y * f64::from(seed)).sum()
            };
            check_gradient("dx", &x, &dx.to_rows(), loss);
        }
    });
}

#[test]
fn features_that_are_alike_have_a_gradient_without_a_deviation() {
    each_engine(|engine| {
        let pool = engine.pool();
        let x = Activation::from_rows(&pool, &[0.5; 12], 4);
        // All are at the cut, and none above it.
        assert_eq!(forward(&x, 1.0).to_rows(), [0.0; 12]);
        let mut dx = Activation::from_rows(&pool, &[1.0; 12], 4);
        backward(&x, 1.0, &mut dx);
        assert_eq!(dx.to_rows(), [0.0; 12]);
    });
}

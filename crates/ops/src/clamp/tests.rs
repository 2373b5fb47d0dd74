//! Bounds and their gradient against the definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let (x, seed) = (numbers(1, 19 * 5), numbers(2, 19 * 5));
        for bounds in [[-0.4f32, 0.3], [f32::NEG_INFINITY, 0.2], [-0.1, f32::INFINITY]] {
            let (pool, wide) = (engine.pool(), bounds.map(f64::from));
            let before = Activation::from_rows(&pool, &x, 5);
            let held = forward(&before, bounds).to_rows();
            assert!(held.iter().zip(&x).any(|(held, x)| held != x), "something lies beyond the bounds");
            for (got, want) in held.iter().zip(&x) {
                assert!((f64::from(*got) - reference::clamp(f64::from(*want), wide)).abs() < 1e-7);
            }
            let mut dx = Activation::from_rows(&pool, &seed, 5);
            backward(&before, bounds, &mut dx);
            let sum = |x: &[f64]| x.iter().zip(&seed).map(|(&x, &s)| reference::clamp(x, wide) * f64::from(s)).sum();
            check_gradient("dx", &x, &dx.to_rows(), sum);
        }
    });
}

//! The cap and its gradient against the definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let (x, seed): (Vec<f32>, _) = (numbers(1, 19 * 5).iter().map(|x| x * 9.0).collect(), numbers(2, 19 * 5));
        let pool = engine.pool();
        let mut capped = Activation::from_rows(&pool, &x, 5);
        forward(&mut capped, 2.0);
        for (got, want) in capped.to_rows().iter().zip(&x) {
            assert!((f64::from(*got) - reference::cap(f64::from(*want), 2.0)).abs() < 1e-6);
        }
        let mut dx = Activation::from_rows(&pool, &seed, 5);
        backward(&capped, 2.0, &mut dx);
        let wanted = |x: &[f64]| x.iter().zip(&seed).map(|(&x, &s)| reference::cap(x, 2.0) * f64::from(s)).sum();
        check_gradient("dx", &x, &dx.to_rows(), wanted);
    });
}

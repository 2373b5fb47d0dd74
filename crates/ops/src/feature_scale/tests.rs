//! The factors and their gradient against the formula and finite differences.
use super::*;
use crate::activation::Pool;
use crate::testing::{check_gradient, each_engine, numbers};

#[test]
fn equals_its_formula_and_its_finite_differences() {
    each_engine(|engine| {
        let (tokens, features) = (37, 70);
        let pool = engine.pool();
        let (v, seed) = (numbers(1, tokens * features), numbers(2, tokens * features));
        let (magnitude, norm) = (numbers(3, features), vec![0.5; features]);
        let gain: Vec<f32> = magnitude.iter().zip(&norm).map(|(magnitude, norm)| magnitude / norm).collect();
        let (va, dy) = (Activation::from_rows(&pool, &v, features), Activation::from_rows(&pool, &seed, features));
        let (gains, norms) = (engine.array(&gain), engine.array(&norm));
        let y = times(&va, gains.view());
        let double: Vec<f64> = gain.iter().map(|&gain| f64::from(gain)).collect();
        // A product in f64 is exact, so that rounding it gives the product in f32.
        let plain: Vec<f32> = reference::times(&v, &double).into_iter().map(|value| value as f32).collect();
        assert_eq!(y.to_rows(), plain);
        let mut twice = y.copy();
        add(&mut twice, &va, gains.view());
        assert_eq!(twice.to_rows(), plain.iter().map(|value| 2.0 * value).collect::<Vec<_>>());
        let mut d_magnitude = engine.array(&vec![0.0; features]);
        backward(&dy, &va, norms.view(), d_magnitude.view_mut());
        check_gradient("magnitude", &magnitude, &d_magnitude.read(), |magnitude| {
            let gain: Vec<f64> = magnitude.iter().map(|magnitude| magnitude / 0.5).collect();
            reference::times(&v, &gain).iter().zip(&seed).map(|(y, &s)| y * f64::from(s)).sum()
        });
    });
}

#[test]
#[should_panic(expected = "both have one shape")]
fn another_shape_is_refused() {
    let pool = Pool::new();
    let (mut y, v) = (Activation::from_rows(&pool, &[0.0; 5], 5), Activation::from_rows(&pool, &[0.0; 40], 2));
    add(&mut y, &v, [1.0; 2][..].into());
}

#[test]
#[should_panic(expected = "a norm for each feature")]
fn a_gradient_of_another_width_is_refused() {
    let pool = Pool::new();
    let (dy, v) = (Activation::from_rows(&pool, &[0.0; 6], 3), Activation::from_rows(&pool, &[0.0; 6], 3));
    backward(&dy, &v, [1.0; 2][..].into(), (&mut [0.0; 2][..]).into());
}

#[test]
fn gains_are_magnitudes_over_norms() {
    crate::testing::each_engine(|engine| {
        let (magnitudes, norms) = (numbers(1, 300), numbers(2, 300));
        let found = ratio(engine.array(&magnitudes).view(), engine.array(&norms).view()).read();
        for (found, (magnitude, norm)) in found.iter().zip(magnitudes.iter().zip(&norms)) {
            assert!((found / (magnitude / norm) - 1.0).abs() < 1e-6);
        }
    });
}

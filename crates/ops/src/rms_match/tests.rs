//! Sizes of rows against the definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, f64s, near, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let pool = engine.pool();
        for (tokens, features) in [(37, 5), (16, 48), (1, 33), (19, 70)] {
            let (mut x, r) = (numbers(1, tokens * features), numbers(2, tokens * features));
            // Every third row is below the floor.
            for row in x.chunks_mut(features).step_by(3) {
                for x in row.iter_mut() {
                    *x *= 1e-3;
                }
            }
            let (seed, start) = (numbers(3, x.len()), numbers(4, x.len()));
            let rows = |values: &[f32]| Activation::from_rows(&pool, values, features);
            let (xa, ra) = (rows(&x), rows(&r));
            near("y", &forward(&xa, &ra).to_rows(), &reference::forward(&f64s(&x), &f64s(&r), features), 1e-5);
            let mut dr = rows(&start);
            let dx = backward(&xa, &ra, &rows(&seed), &mut dr);
            // The loss is the sum of the results, each times its seed: `seed` is its gradient.
            let loss = |x: &[f64], r: &[f64]| -> f64 {
                reference::forward(x, r, features).iter().zip(&seed).map(|(&y, &seed)| y * f64::from(seed)).sum()
            };
            check_gradient("dx", &x, &dx.to_rows(), |x| loss(x, &f64s(&r)));
            let added: Vec<f32> = dr.to_rows().iter().zip(&start).map(|(sum, start)| sum - start).collect();
            check_gradient("dr", &r, &added, |r| loss(&f64s(&x), r));
        }
    });
}

#[test]
fn a_row_of_zeros_gives_zeros_and_finite_gradients() {
    each_engine(|engine| {
        let pool = engine.pool();
        let rows = |values: &[f32]| Activation::from_rows(&pool, values, 6);
        let (zeros, x, seed) = (rows(&[0.0; 12]), rows(&numbers(1, 12)), rows(&numbers(2, 12)));
        assert_eq!(forward(&x, &zeros).to_rows(), [0.0; 12]);
        for (x, r) in [(&x, &zeros), (&zeros, &x), (&zeros, &zeros)] {
            let mut dr = rows(&[0.0; 12]);
            let dx = backward(x, r, &seed, &mut dr);
            assert!(dx.to_rows().iter().chain(&dr.to_rows()).all(|value| value.is_finite()));
        }
    });
}

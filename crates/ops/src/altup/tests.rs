//! Predictions and corrections against the definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, f64s, near, numbers};

/// Tokens, streams, features of a stream.
const SHAPES: [[usize; 3]; 4] = [[37, 4, 5], [16, 2, 24], [1, 3, 40], [19, 4, 33]];

/// The sum of the results, each times its seed: `seed` is their gradient.
fn weighted(results: &[f64], seed: &[f32]) -> f64 {
    results.iter().zip(seed).map(|(&y, &seed)| y * f64::from(seed)).sum()
}

#[test]
fn predictions_have_the_gradients_of_their_finite_differences() {
    each_engine(|engine| {
        let pool = engine.pool();
        for [tokens, streams, dim] in SHAPES {
            let (x, coefs) = (numbers(1, tokens * streams * dim), numbers(2, tokens * streams * streams));
            let seed = numbers(3, x.len());
            let rows = |values: &[f32], features| Activation::from_rows(&pool, values, features);
            let (xa, ca) = (rows(&x, streams * dim), rows(&coefs, streams * streams));
            near(
                "p",
                &predict(&xa, &ca, streams).to_rows(),
                &reference::predict(&f64s(&x), &f64s(&coefs), streams, dim),
                1e-5,
            );
            let (dx, d_coefs) = predict_backward(&xa, &ca, streams, &rows(&seed, streams * dim));
            let loss = |x: &[f64], c: &[f64]| weighted(&reference::predict(x, c, streams, dim), &seed);
            check_gradient("dx", &x, &dx.to_rows(), |x| loss(x, &f64s(&coefs)));
            check_gradient("dc", &coefs, &d_coefs.to_rows(), |c| loss(&f64s(&x), c));
        }
    });
}

#[test]
fn corrections_have_the_gradients_of_their_finite_differences() {
    each_engine(|engine| {
        let pool = engine.pool();
        for [tokens, streams, dim] in SHAPES {
            let (p, u) = (numbers(1, tokens * streams * dim), numbers(2, tokens * dim));
            let (coefs, seed) = (numbers(3, tokens * streams), numbers(4, p.len()));
            let rows = |values: &[f32], features| Activation::from_rows(&pool, values, features);
            let (ua, ca) = (rows(&u, dim), rows(&coefs, streams));
            for active in [0, streams - 1] {
                let mut y = rows(&p, streams * dim);
                let before = y.columns(active * dim..(active + 1) * dim);
                correct(&mut y, &ua, &ca, active);
                let expected = reference::correct(&f64s(&p), &f64s(&u), &f64s(&coefs), active, dim);
                near("y", &y.to_rows(), &expected, 1e-5);
                let mut dp = rows(&seed, streams * dim);
                let (du, d_coefs) = correct_backward(&before, &ua, &ca, active, &mut dp);
                let loss = |p: &[f64], u: &[f64], c: &[f64]| weighted(&reference::correct(p, u, c, active, dim), &seed);
                check_gradient("dp", &p, &dp.to_rows(), |p| loss(p, &f64s(&u), &f64s(&coefs)));
                check_gradient("du", &u, &du.to_rows(), |u| loss(&f64s(&p), u, &f64s(&coefs)));
                check_gradient("dc", &coefs, &d_coefs.to_rows(), |c| loss(&f64s(&p), &f64s(&u), c));
            }
        }
    });
}

#[test]
fn some_streams_get_what_is_added_and_their_sum_is_its_gradient() {
    each_engine(|engine| {
        let pool = engine.pool();
        for [tokens, streams, dim] in SHAPES {
            let (y, x) = (numbers(1, tokens * streams * dim), numbers(2, tokens * dim));
            let mut ya = Activation::from_rows(&pool, &y, streams * dim);
            let sums = sum(&ya, dim, 1..streams).to_rows();
            add(&mut ya, &Activation::from_rows(&pool, &x, dim), 1..streams);
            let place = |at: usize| (at / (streams * dim), at / dim % streams, at % dim);
            let expected = y.iter().enumerate().map(|(at, y)| {
                let (token, stream, feature) = place(at);
                f64::from(*y) + if stream > 0 { f64::from(x[token * dim + feature]) } else { 0.0 }
            });
            near("y", &ya.to_rows(), &expected.collect::<Vec<_>>(), 1e-6);
            let mut expected = vec![0.0; tokens * dim];
            for (at, y) in y.iter().enumerate() {
                let (token, stream, feature) = place(at);
                expected[token * dim + feature] += if stream > 0 { f64::from(*y) } else { 0.0 };
            }
            near("sum", &sums, &expected, 1e-6);
        }
    });
}

//! The norm and its gradients against the definition and finite differences.
use super::*;
use crate::elementwise::add_bias_backward;
use crate::testing::{check_gradient, each_engine, f64s, near, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        for (tokens, dim) in [(1, 1), (5, 7), (17, 8), (33, 65), (3, 300)] {
            let (x, seed) = (numbers(1, tokens * dim), numbers(3, tokens * dim));
            // A mean far from zero: the variance must not be a difference of large numbers.
            let x: Vec<f32> = x.iter().map(|x| x + 20.0).collect();
            let (weight, bias) = (numbers(2, dim), numbers(4, dim));
            let pool = engine.pool();
            let panels = |x: &[f32]| Activation::from_rows(&pool, x, dim);
            let (xa, dh) = (panels(&x), panels(&seed));
            let [weights, biases] = [&weight, &bias].map(|values| engine.array(values));
            let found = stats(&xa, 1e-2);
            let h = apply(&xa, &found, weights.view(), biases.view());
            let wanted = |x: &[f64], w: &[f64], b: &[f64]| reference::apply(x, w, b, 1e-2);
            near("h", &h.to_rows(), &wanted(&f64s(&x), &f64s(&weight), &f64s(&bias)), 2e-5);
            let loss = |x: &[f64], w: &[f64], b: &[f64]| -> f64 {
                wanted(x, w, b).iter().zip(&seed).map(|(h, &s)| h * f64::from(s)).sum()
            };
            let mut dx = pool.act(tokens, dim);
            backward(&xa, &found, weights.view(), &dh, &mut dx, false);
            check_gradient("dx", &x, &dx.to_rows(), |x| loss(x, &f64s(&weight), &f64s(&bias)));
            let once = dx.to_rows();
            backward(&xa, &found, weights.view(), &dh, &mut dx, true);
            assert!(dx.to_rows().iter().zip(&once).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-4));
            let [mut dw, mut db] = [0, 1].map(|_| engine.array(&vec![0.0; dim]));
            backward_weight(&xa, &found, &dh, dw.view_mut());
            check_gradient("dw", &weight, &dw.read(), |w| loss(&f64s(&x), w, &f64s(&bias)));
            add_bias_backward(&dh, db.view_mut());
            check_gradient("db", &bias, &db.read(), |b| loss(&f64s(&x), &f64s(&weight), b));
        }
    });
}

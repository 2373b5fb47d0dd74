//! The norm and its gradients against the definition and finite differences.
use super::*;
use crate::activation::Pool;
use crate::testing::{check_gradient, each_engine, each_level, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let shared = [(1, 1, 1, 1, 0.0), (5, 1, 7, 1, 1.0), (17, 3, 8, 1, 0.0), (33, 1, 65, 1, 1.0)];
        let own = [(17, 3, 7, 3, 0.0), (33, 2, 65, 2, 1.0)];
        for (tokens, groups, dim, weights, offset) in shared.into_iter().chain(own) {
            let (x, weight, seed) =
                (numbers(1, tokens * groups * dim), numbers(2, weights * dim), numbers(3, tokens * groups * dim));
            let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let pool = engine.pool();
            let (xa, dh) =
                (Activation::from_rows(&pool, &x, groups * dim), Activation::from_rows(&pool, &seed, groups * dim));
            let rstd = stats(&xa, groups, 1e-3);
            let weights = engine.array(&weight);
            let gain = Gain { weight: weights.view(), offset };
            let h = apply(&xa, &rstd, gain);
            for (got, want) in
                h.to_rows().iter().zip(reference::apply(&double(&x), dim, &double(&weight), f64::from(offset), 1e-3))
            {
                assert!((f64::from(*got) - want).abs() < 1e-5, "{got} != {want}");
            }
            let loss = |x: &[f64], w: &[f64]| -> f64 {
                reference::apply(x, dim, w, f64::from(offset), 1e-3)
                    .iter()
                    .zip(&seed)
                    .map(|(h, &s)| h * f64::from(s))
                    .sum()
            };
            let mut dx = pool.act(tokens, groups * dim);
            backward(&xa, &rstd, gain, &dh, &mut dx, false);
            check_gradient("dx", &x, &dx.to_rows(), |x| loss(x, &double(&weight)));
            let once = dx.to_rows();
            backward(&xa, &rstd, gain, &dh, &mut dx, true);
            assert!(dx.to_rows().iter().zip(&once).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-4));
            let mut dw = engine.array(&vec![0.0; weight.len()]);
            backward_weight(&xa, &rstd, &dh, dw.view_mut());
            check_gradient("dw", &weight, &dw.read(), |w| loss(&double(&x), w));
        }
    });
}

#[test]
fn of_a_vector_as_of_one_token_to_the_bit() {
    each_level(|level| {
        for (groups, dim, weights, offset) in
            [(1, 1, 1, 0.0), (3, 7, 1, 1.0), (2, 33, 2, 0.0), (1, 576, 1, 0.0), (4, 64, 1, 1.0)]
        {
            let (pool, weight) = (Pool::new(), numbers(2, weights * dim));
            let gain = Gain { weight: (&weight[..]).into(), offset };
            let x = Activation::from_rows(&pool, &numbers(1, groups * dim), groups * dim);
            let expected = apply(&x, &stats(&x, groups, 1e-3), gain).to_rows();
            assert!(of_vector(&x.to_vector(), groups, 1e-3, gain).to_rows() == expected, "{level:?} {groups} x {dim}");
        }
    });
}

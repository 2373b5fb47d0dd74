//! Losses and gradients against their definitions and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, numbers};

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_engine(|engine| {
        for (tokens, vocabulary) in [(1, 1), (5, 7), (17, 33), (32, 258)] {
            let logits: Vec<f32> = numbers(1, tokens * vocabulary).iter().map(|x| x * 20.0).collect();
            let targets: Vec<u32> = (0..tokens).map(|t| (t * 13 % vocabulary) as u32).collect();
            let pool = engine.pool();
            let mut act = Activation::from_rows(&pool, &logits, vocabulary);
            let losses = cross_entropy(&mut act, &targets).read();
            let double: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
            for (got, want) in losses.iter().zip(reference::cross_entropy(&double, &targets, vocabulary)) {
                assert!((f64::from(got.nll) - want).abs() < 1e-5, "{} != {want}", got.nll);
            }
            let mut gradient = act.to_rows();
            for (token, row) in gradient.chunks_mut(vocabulary).enumerate() {
                for value in row.iter_mut() {
                    *value /= losses[token].sum;
                }
                row[targets[token] as usize] -= 1.0;
            }
            check_gradient("logits", &logits, &gradient, |x| {
                reference::cross_entropy(x, &targets, vocabulary).iter().sum()
            });
        }
    });
}

#[test]
fn squared_errors_equal_their_definition_and_its_finite_differences() {
    each_engine(|engine| {
        for tokens in [1, 5, 17] {
            let (values, wanted) = (numbers(1, tokens), numbers(2, tokens));
            let scales: Vec<f32> = numbers(3, tokens).iter().map(|x| 0.6 + 0.5 * x).collect();
            let targets: Vec<u32> = wanted.iter().map(|number| number.to_bits()).collect();
            let mut act = Activation::from_rows(&engine.pool(), &values, 1);
            let errors = squared(&mut act, &targets, &scales).read();
            let error = |value: f64, token: usize| (value - f64::from(wanted[token])).powi(2);
            for (token, found) in errors.iter().enumerate() {
                assert!((f64::from(found.nll) - error(f64::from(values[token]), token)).abs() < 1e-6 && !found.right);
            }
            let objective = |values: &[f64]| -> f64 {
                values.iter().enumerate().map(|(token, &value)| f64::from(scales[token]) * error(value, token)).sum()
            };
            check_gradient("values", &values, &act.to_rows(), objective);
        }
    });
}

#[test]
fn smoothing_and_z_loss_equal_their_definition_and_its_finite_differences() {
    each_engine(|engine| {
        for (tokens, vocabulary) in [(1, 3), (5, 7), (17, 33), (32, 130)] {
            let logits: Vec<f32> = numbers(5, tokens * vocabulary).iter().map(|x| x * 6.0).collect();
            let targets: Vec<u32> = (0..tokens).map(|t| (t * 13 % vocabulary) as u32).collect();
            let scales: Vec<f32> = numbers(6, tokens).iter().map(|x| 0.6 + 0.5 * x).collect();
            for terms in [
                Terms::default(),
                Terms { smoothing: 0.1, z: 0.0 },
                Terms { smoothing: 0.0, z: 1e-2 },
                Terms { smoothing: 0.3, z: 1e-2 },
            ] {
                let objective = |logits: &[f64]| reference::objective(logits, &targets, &scales, terms);
                let pool = engine.pool();
                let mut act = Activation::from_rows(&pool, &logits, vocabulary);
                let losses = gradient(&mut act, &targets, &scales, terms).read();
                let double: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
                for (got, want) in losses.iter().zip(reference::cross_entropy(&double, &targets, vocabulary)) {
                    assert!((f64::from(got.nll) - want).abs() < 1e-5, "{} != {want}: plain cross-entropy", got.nll);
                }
                check_gradient("logits", &logits, &act.to_rows(), objective);
            }
        }
    });
}

#[test]
fn a_linear_head_has_the_gradients_of_its_finite_differences() {
    use super::linear::{Objective, Projection, WeightGradient};
    use crate::gemm::Store;
    let (rows, hidden) = (37, 7);
    each_engine(|engine| {
        for (outputs, softcap, squared, smoothing, weighted) in [
            (1, None, true, 0.0, true),
            (1, None, true, 0.0, false),
            (11, None, false, 0.0, false),
            (11, Some(2.0), false, 0.0, false),
            (33, None, false, 0.1, true),
            (33, Some(3.0), false, 0.1, true),
        ] {
            let case = reference::LinearCase {
                hidden,
                outputs,
                softcap,
                squared,
                terms: Terms { smoothing, z: smoothing / 10.0 },
                weights: if weighted { numbers(5, rows).iter().map(|x| 0.6 + 0.5 * x).collect() } else { Vec::new() },
                targets: (0..rows)
                    .map(|t| if squared { 0.25f32.to_bits() } else { (t * 13 % outputs) as u32 })
                    .collect(),
            };
            let (h, w) = (numbers(1, rows * hidden), numbers(2, outputs * hidden));
            let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let (pool, chunks, wd) = (engine.pool(), engine.pool(), engine.array(&w));
            let projection = Projection { weight: Store::F32(wd.view()), outputs, softcap, pool: &chunks };
            let objective = Objective { terms: case.terms, squared, weights: &case.weights };
            let act = Activation::from_rows(&pool, &h, hidden);
            let mut dw = engine.array(&vec![0.0; w.len()]);
            let whole = WeightGradient::Whole(dw.view_mut());
            let found = projection.forward_backward(&act, &case.targets, objective, 0.5, whole);
            let (dw, halved) = (dw.read(), |x: f64| 0.5 * x);
            check_gradient("h", &h, &found.dh.to_rows(), |h| halved(reference::linear(h, &double(&w), &case)));
            check_gradient("w", &w, &dw, |w| halved(reference::linear(&double(&h), w, &case)));
            let ids: Vec<u32> = (0..outputs as u32).step_by(3).collect();
            let mut picked = engine.array(&vec![0.0; ids.len() * hidden]);
            let some = WeightGradient::Rows { ids: &ids, gradients: picked.view_mut() };
            projection.forward_backward(&act, &case.targets, objective, 0.5, some);
            for (&id, row) in ids.iter().zip(picked.read().chunks(hidden)) {
                assert_eq!(row, &dw[id as usize * hidden..][..hidden], "{engine:?}: row {id} of {outputs}");
            }
            let plain = reference::LinearCase { terms: Terms::default(), ..case };
            let total = reference::linear(&double(&h), &double(&w), &plain);
            let (found, right) = found.losses.sum();
            assert!((found - total).abs() < 1e-4, "{engine:?}: {found} != {total}");
            let losses = projection.losses(&act, &plain.targets, squared);
            let sum = losses
                .iter()
                .enumerate()
                .map(|(t, (loss, _))| f64::from(*loss) * plain.weights.get(t).map_or(1.0, |&weight| f64::from(weight)));
            assert!((sum.sum::<f64>() - total).abs() < 1e-4, "losses without gradients");
            assert_eq!(losses.iter().filter(|(_, right)| *right).count(), right);
        }
    });
}

#[test]
fn a_chunk_does_not_depend_on_the_others() {
    use super::linear::{Objective, Projection, WeightGradient, chunk_tokens};
    use crate::gemm::Store;
    let (hidden, outputs) = (5, 9);
    let (first, rest) = (chunk_tokens([outputs, hidden], Device::Cpu), 21);
    let (h, w) = (numbers(1, (first + rest) * hidden), numbers(2, outputs * hidden));
    let targets: Vec<u32> = (0..first + rest).map(|t| (t * 7 % outputs) as u32).collect();
    each_engine(|engine| {
        let (pool, chunks, w) = (engine.pool(), engine.pool(), engine.array(&w));
        for softcap in [None, Some(2.0)] {
            let projection = Projection { weight: Store::F32(w.view()), outputs, softcap, pool: &chunks };
            let gradient = |rows: std::ops::Range<usize>, dw: &mut Array<f32>| {
                let h = Activation::from_rows(&pool, &h[rows.start * hidden..rows.end * hidden], hidden);
                let whole = WeightGradient::Whole(dw.view_mut());
                let found = projection.forward_backward(&h, &targets[rows], Objective::default(), 0.5, whole);
                (found.dh.to_rows(), found.losses.sum())
            };
            let [mut dw, mut parts] = [(); 2].map(|()| engine.array(&vec![0.0; outputs * hidden]));
            let (all, (total, right)) = gradient(0..first + rest, &mut dw);
            let (one, (total_of_one, right_of_one)) = gradient(0..first, &mut parts);
            let (two, (total_of_two, right_of_two)) = gradient(first..first + rest, &mut parts);
            assert_eq!((all, dw.read()), ([one, two].concat(), parts.read()), "{engine:?}");
            assert_eq!((total, right), (total_of_one + total_of_two, right_of_one + right_of_two), "{engine:?}");
        }
    });
}

#[test]
fn a_logit_that_is_not_a_number_shows_in_the_loss_of_its_token_alone() {
    each_engine(|engine| {
        let (tokens, vocabulary) = (5, 40);
        let mut logits = numbers(1, tokens * vocabulary);
        logits[2 * vocabulary + 37] = f32::NAN;
        let mut act = Activation::from_rows(&engine.pool(), &logits, vocabulary);
        let losses = cross_entropy(&mut act, &[0, 1, 2, 3, 4]).read();
        let found: Vec<bool> = losses.iter().map(|loss| loss.nll.is_nan()).collect();
        assert_eq!(found, [false, false, true, false, false], "{engine:?}");
    });
}

//! Losses and gradients against their definitions and finite differences.
use super::*;
use crate::panel::Pool;
use crate::testing::{check_gradient, each_level, numbers};

fn reference(logits: &[f64], targets: &[u32], vocabulary: usize) -> Vec<f64> {
    let one = |(row, &target): (&[f64], &u32)| {
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top - row[target as usize]
    };
    logits.chunks(vocabulary).zip(targets).map(one).collect()
}

#[test]
fn equals_the_definition_and_its_finite_differences() {
    each_level(|_| {
        for (tokens, vocabulary) in [(1, 1), (5, 7), (17, 33), (32, 258)] {
            let logits: Vec<f32> = numbers(1, tokens * vocabulary).iter().map(|x| x * 20.0).collect();
            let targets: Vec<u32> = (0..tokens).map(|t| (t * 13 % vocabulary) as u32).collect();
            let pool = Pool::new();
            let mut act = Act::from_rows(&pool, &logits, vocabulary);
            let losses = cross_entropy(&mut act, &targets);
            let double: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
            for (got, want) in losses.iter().zip(reference(&double, &targets, vocabulary)) {
                assert!((f64::from(got.nll) - want).abs() < 1e-5, "{} != {want}", got.nll);
            }
            let mut gradient = act.to_rows();
            for (token, row) in gradient.chunks_mut(vocabulary).enumerate() {
                for value in row.iter_mut() {
                    *value /= losses[token].sum;
                }
                row[targets[token] as usize] -= 1.0;
            }
            check_gradient("logits", &logits, &gradient, |x| reference(x, &targets, vocabulary).iter().sum());
        }
    });
}

#[test]
fn squared_errors_equal_their_definition_and_its_finite_differences() {
    for tokens in [1, 5, 17] {
        let (values, wanted) = (numbers(1, tokens), numbers(2, tokens));
        let scales: Vec<f32> = numbers(3, tokens).iter().map(|x| 0.6 + 0.5 * x).collect();
        let targets: Vec<u32> = wanted.iter().map(|number| number.to_bits()).collect();
        let mut act = Act::from_rows(&Pool::new(), &values, 1);
        let errors = squared(&mut act, &targets, &scales);
        let error = |value: f64, token: usize| (value - f64::from(wanted[token])).powi(2);
        for (token, found) in errors.iter().enumerate() {
            assert!((f64::from(*found) - error(f64::from(values[token]), token)).abs() < 1e-6);
        }
        let objective = |values: &[f64]| -> f64 {
            values.iter().enumerate().map(|(token, &value)| f64::from(scales[token]) * error(value, token)).sum()
        };
        check_gradient("values", &values, &act.to_rows(), objective);
    }
}

#[test]
fn smoothing_and_z_loss_equal_their_definition_and_its_finite_differences() {
    each_level(|_| {
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
                let objective = |logits: &[f64]| -> f64 {
                    let one = |((row, &target), &scale): ((&[f64], &u32), &f32)| {
                        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        let lse = row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top;
                        // As the LabelSmoother of Transformers: a share of the mean over the vocabulary of -log p.
                        let spread = row.iter().map(|x| lse - x).sum::<f64>() / vocabulary as f64;
                        let (smoothing, z) = (f64::from(terms.smoothing), f64::from(terms.z));
                        let nll = lse - row[target as usize];
                        f64::from(scale) * ((1.0 - smoothing) * nll + smoothing * spread + z * lse * lse)
                    };
                    logits.chunks(vocabulary).zip(&targets).zip(&scales).map(one).sum()
                };
                let pool = Pool::new();
                let mut act = Act::from_rows(&pool, &logits, vocabulary);
                let losses = gradient(&mut act, &targets, &scales, terms);
                let double: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
                for (got, want) in losses.iter().zip(reference(&double, &targets, vocabulary)) {
                    assert!((f64::from(got.nll) - want).abs() < 1e-5, "{} != {want}: plain cross-entropy", got.nll);
                }
                check_gradient("logits", &logits, &act.to_rows(), objective);
            }
        }
    });
}

/// The objective of a linear head on `h`, in f64.
fn linear_reference(h: &[f64], w: &[f64], case: &LinearCase) -> f64 {
    let hidden = case.hidden;
    let logits: Vec<f64> = h
        .chunks(hidden)
        .flat_map(|h| w.chunks(hidden).map(|w| h.iter().zip(w).map(|(h, w)| h * w).sum::<f64>()).collect::<Vec<_>>())
        .map(|logit| case.softcap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh()))
        .collect();
    let one = |(token, row): (usize, &[f64])| {
        let weight = case.weights.get(token).map_or(1.0, |&weight| f64::from(weight));
        let target = case.targets[token];
        if case.squared {
            return weight * (row[0] - f64::from(f32::from_bits(target))).powi(2);
        }
        let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        let (smoothing, z) = (f64::from(case.terms.smoothing), f64::from(case.terms.z));
        let spread = lse - row.iter().sum::<f64>() / row.len() as f64;
        weight * ((1.0 - smoothing) * (lse - row[target as usize]) + smoothing * spread + z * lse * lse)
    };
    logits.chunks(case.outputs).enumerate().map(one).sum()
}

struct LinearCase {
    hidden: usize,
    outputs: usize,
    softcap: Option<f32>,
    squared: bool,
    terms: Terms,
    weights: Vec<f32>,
    targets: Vec<u32>,
}

#[test]
fn a_linear_head_has_the_gradients_of_its_finite_differences() {
    use super::linear::{Objective, Projection, WeightGradient};
    use crate::gemm::Store;
    let (rows, hidden) = (37, 7);
    each_level(|level| {
        for (outputs, softcap, squared, smoothing, weighted) in [
            (1, None, true, 0.0, true),
            (1, None, true, 0.0, false),
            (11, None, false, 0.0, false),
            (11, Some(2.0), false, 0.0, false),
            (33, None, false, 0.1, true),
            (33, Some(3.0), false, 0.1, true),
        ] {
            let case = LinearCase {
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
            let (pool, chunks) = (Pool::new(), Pool::new());
            let projection = Projection { weight: Store::F32(&w), outputs, softcap, pool: &chunks };
            let objective = Objective { terms: case.terms, squared, weights: &case.weights };
            let act = Act::from_rows(&pool, &h, hidden);
            let mut dw = vec![0.0; w.len()];
            let whole = WeightGradient::Whole((&mut dw).into());
            let found = projection.forward_backward(&act, &case.targets, objective, 0.5, whole);
            let halved = |x: f64| 0.5 * x;
            check_gradient("h", &h, &found.dh.to_rows(), |h| halved(linear_reference(h, &double(&w), &case)));
            check_gradient("w", &w, &dw, |w| halved(linear_reference(&double(&h), w, &case)));
            let ids: Vec<u32> = (0..outputs as u32).step_by(3).collect();
            let mut picked = vec![0.0; ids.len() * hidden];
            let some = WeightGradient::Rows { ids: &ids, gradients: (&mut picked).into() };
            projection.forward_backward(&act, &case.targets, objective, 0.5, some);
            for (&id, row) in ids.iter().zip(picked.chunks(hidden)) {
                assert_eq!(row, &dw[id as usize * hidden..][..hidden], "{level:?}: row {id} of {outputs}");
            }
            let plain = LinearCase { terms: Terms::default(), ..case };
            let total = linear_reference(&double(&h), &double(&w), &plain);
            assert!((found.total - total).abs() < 1e-4, "{level:?}: {} != {total}", found.total);
            let losses = projection.losses(&act, &plain.targets, squared);
            let sum = losses
                .iter()
                .enumerate()
                .map(|(t, (loss, _))| f64::from(*loss) * plain.weights.get(t).map_or(1.0, |&weight| f64::from(weight)));
            assert!((sum.sum::<f64>() - total).abs() < 1e-4, "losses without gradients");
            assert_eq!(losses.iter().filter(|(_, right)| *right).count(), found.right);
        }
    });
}

#[test]
fn a_chunk_does_not_depend_on_the_others() {
    use super::linear::{Objective, Projection, WeightGradient, chunk_tokens};
    use crate::gemm::Store;
    let (hidden, outputs) = (5, 9);
    let (first, rest) = (chunk_tokens(outputs), 21);
    let (h, w) = (numbers(1, (first + rest) * hidden), numbers(2, outputs * hidden));
    let targets: Vec<u32> = (0..first + rest).map(|t| (t * 7 % outputs) as u32).collect();
    let (pool, chunks) = (Pool::new(), Pool::new());
    for softcap in [None, Some(2.0)] {
        let projection = Projection { weight: Store::F32(&w), outputs, softcap, pool: &chunks };
        let gradient = |rows: std::ops::Range<usize>, dw: &mut [f32]| {
            let h = Act::from_rows(&pool, &h[rows.start * hidden..rows.end * hidden], hidden);
            let whole = WeightGradient::Whole(dw.into());
            projection.forward_backward(&h, &targets[rows], Objective::default(), 0.5, whole).dh.to_rows()
        };
        let (mut dw, mut parts) = (vec![0.0; w.len()], vec![0.0; w.len()]);
        let all = gradient(0..first + rest, &mut dw);
        let two = [gradient(0..first, &mut parts), gradient(first..first + rest, &mut parts)].concat();
        assert_eq!((all, dw), (two, parts));
    }
}

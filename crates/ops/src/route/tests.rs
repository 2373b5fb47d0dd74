//! Routing against its definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, numbers};

const TOKENS: usize = 21;
const EXPERTS: usize = 6;
const FEATURES: usize = 3;

/// A router, and the bias of its choice.
type Case = (Router, Option<Vec<f32>>);

/// Softmax and sigmoid, with a bias and without, among all and in groups, normalised and not.
fn cases() -> Vec<Case> {
    let soft = |per_token, normalised| (Router::softmax(per_token, normalised), None);
    let mut cases = vec![soft(1, false), soft(2, false), soft(2, true), soft(EXPERTS, true)];
    let groups = |count, chosen| Some(Groups { count, chosen, score: GroupScore::BestTwo });
    let by_best = |count, chosen| Some(Groups { count, chosen, score: GroupScore::Best });
    let bias = || Some(numbers(9, EXPERTS).iter().map(|x| 0.5 * x).collect::<Vec<f32>>());
    for (per_token, groups, normalised, scale, bias) in [
        (1, None, None, 1.0, None),
        (2, None, Some(0.0), 1.0, bias()),
        (3, None, Some(1e-6), 1.0, bias()),
        (2, groups(3, 1), Some(1e-20), 2.5, bias()),
        (3, groups(3, 2), None, 0.7, bias()),
        // A sum that is large beside the scores.
        (3, groups(2, 1), Some(0.3), 1.8, None),
        (3, by_best(3, 2), None, 1.3, None),
        // Groups of one expert.
        (2, by_best(EXPERTS, 4), Some(0.0), 1.0, bias()),
    ] {
        for scores in [Scores::Sigmoid, Scores::Softmax] {
            cases.push((Router { per_token, scores, groups, normalised, scale }, bias.clone()));
        }
    }
    cases
}

/// An expert's bias.
fn bias(expert: usize) -> Vec<f32> {
    numbers(20 + expert as u64, FEATURES)
}

/// Experts that multiply a token by `expert + 1` and add a bias: `out = sum_e w_e ((e + 1) x + b_e)`, times `seed`, summed.
fn objective(logits: &[f64], x: &[f64], seed: &[f32], (router, choice): &Case) -> f64 {
    let w = reference::weights(logits, EXPERTS, choice.as_deref(), *router);
    let biases: Vec<Vec<f32>> = (0..EXPERTS).map(bias).collect();
    let out = |at: usize, x: f64| -> f64 {
        let of = |e: usize| w[at / FEATURES * EXPERTS + e] * ((e + 1) as f64 * x + f64::from(biases[e][at % FEATURES]));
        (0..EXPERTS).map(of).sum()
    };
    x.iter().zip(seed).enumerate().map(|(at, (&x, &seed))| out(at, x) * f64::from(seed)).sum()
}

#[test]
fn tokens_go_out_and_come_back_with_the_gradients_of_their_finite_differences() {
    each_engine(|engine| {
        for case in &cases() {
            // Far enough apart that a small difference changes no choice.
            let logits: Vec<f32> =
                numbers(1, TOKENS * EXPERTS).iter().enumerate().map(|(at, x)| x + (at * 7 % EXPERTS) as f32).collect();
            let (x, seed) = (numbers(2, TOKENS * FEATURES), numbers(3, TOKENS * FEATURES));
            let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let (pool, own) = (engine.pool(), Pool::stepped_on(engine.device()));
            let routing = route(&Activation::from_rows(&pool, &logits, EXPERTS), case.1.as_deref(), case.0);
            let (xa, d_out) =
                (Activation::from_rows(&pool, &x, FEATURES), Activation::from_rows(&pool, &seed, FEATURES));
            let (mut out, mut dx) = (xa.like(), xa.like());
            out.zero();
            dx.zero();
            let mut d_weights = routing.weight_gradients(true);
            for expert in routing.groups().concat() {
                let factor = (expert + 1) as f32;
                let middle = routing.dispatch(expert, &xa, &own);
                let mut y = middle.copy();
                crate::elementwise::scale(&mut y, factor);
                let bias = engine.array(&bias(expert));
                crate::elementwise::add_bias(&mut y, bias.view());
                routing.combine(expert, &y, &mut out);
                // The gradient of the tokens is here also that of what the weight's gradient is found with.
                let mut d_middle = routing.combine_backward(expert, &d_out, &own);
                let dy = d_middle.copy();
                crate::elementwise::scale(&mut d_middle, factor);
                routing.set_weight_gradient(expert, &d_middle, &middle, &mut d_weights);
                routing.add_bias_gradient(expert, &dy, bias.view(), &mut d_weights);
                routing.dispatch_backward(expert, &d_middle, &mut dx);
            }
            let found: f64 = out.to_rows().iter().zip(&seed).map(|(y, s)| f64::from(*y) * f64::from(*s)).sum();
            let wanted = objective(&double(&logits), &double(&x), &seed, case);
            assert!((found - wanted).abs() < 1e-4, "{found} != {wanted}");
            check_gradient("x", &x, &dx.to_rows(), |x| objective(&double(&logits), x, &seed, case));
            let d_logits = routing.backward(d_weights, None, &pool).to_rows();
            check_gradient("logits", &logits, &d_logits, |logits| objective(logits, &double(&x), &seed, case));
        }
    });
}

#[test]
fn factors_of_experts_have_the_gradients_of_their_finite_differences() {
    each_engine(|engine| {
        for normalised in [false, true] {
            let logits: Vec<f32> =
                numbers(1, TOKENS * EXPERTS).iter().enumerate().map(|(at, x)| x + (at * 7 % EXPERTS) as f32).collect();
            let (x, seed) = (numbers(2, TOKENS * FEATURES), numbers(3, TOKENS * FEATURES));
            // One of them is 0, which has a gradient too.
            let factors: Vec<f32> = (0..EXPERTS).map(|expert| expert as f32 * 0.5 - 1.0).collect();
            let objective = |logits: &[f64], factors: &[f64]| -> f64 {
                let w = reference::weights(logits, EXPERTS, None, Router::softmax(3, normalised));
                let factor = |at: usize| -> f64 {
                    (0..EXPERTS).map(|e| w[at / FEATURES * EXPERTS + e] * factors[e] * (e + 1) as f64).sum()
                };
                let each = x.iter().zip(&seed).enumerate();
                each.map(|(at, (x, seed))| factor(at) * f64::from(*x) * f64::from(*seed)).sum()
            };
            let (pool, own) = (engine.pool(), Pool::stepped_on(engine.device()));
            let mut routing =
                route(&Activation::from_rows(&pool, &logits, EXPERTS), None, Router::softmax(3, normalised));
            routing.scale(engine.array(&factors).view());
            let (xa, d_out) =
                (Activation::from_rows(&pool, &x, FEATURES), Activation::from_rows(&pool, &seed, FEATURES));
            let mut out = xa.like();
            out.zero();
            let mut d_weights = routing.weight_gradients(false);
            for expert in routing.groups().concat() {
                let middle = routing.dispatch(expert, &xa, &own);
                let mut y = middle.copy();
                crate::elementwise::scale(&mut y, (expert + 1) as f32);
                routing.combine(expert, &y, &mut out);
                let mut d_middle = routing.combine_backward(expert, &d_out, &own);
                crate::elementwise::scale(&mut d_middle, (expert + 1) as f32);
                routing.set_weight_gradient(expert, &d_middle, &middle, &mut d_weights);
            }
            let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let found: f64 = out.to_rows().iter().zip(&seed).map(|(y, s)| f64::from(*y) * f64::from(*s)).sum();
            assert!((found - objective(&double(&logits), &double(&factors))).abs() < 1e-4);
            let of_factors = routing.scale_backward(&mut d_weights, &pool).to_rows();
            let sum = |expert: usize| of_factors.iter().skip(expert).step_by(EXPERTS).sum();
            let sums: Vec<f32> = (0..EXPERTS).map(sum).collect();
            check_gradient("factors", &factors, &sums, |factors| objective(&double(&logits), factors));
            let d_logits = routing.backward(d_weights, None, &pool).to_rows();
            check_gradient("logits", &logits, &d_logits, |logits| objective(logits, &double(&factors)));
        }
    });
}

#[test]
fn the_load_and_its_gradient_are_those_of_the_probabilities() {
    each_engine(|engine| {
        let logits = numbers(1, TOKENS * EXPERTS);
        let double: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        let pool = engine.pool();
        // The bias of a choice by sigmoids is no part of the loss.
        let bias = numbers(9, EXPERTS);
        let sigmoid = Router { scores: Scores::Sigmoid, ..Router::softmax(2, true) };
        for (router, bias) in [(Router::softmax(2, true), None), (sigmoid, Some(&bias[..]))] {
            let routing = route(&Activation::from_rows(&pool, &logits, EXPERTS), bias, router);
            let load = routing.load();
            let chosen = reference::weights(&double, EXPERTS, None, Router::softmax(2, true));
            for (expert, (tokens, _)) in load.iter().enumerate() {
                let expected = chosen.iter().skip(expert).step_by(EXPERTS).filter(|&&weight| weight > 0.0).count();
                assert_eq!(*tokens, expected as f64);
            }
            let factors = numbers(2, EXPERTS);
            let objective = |logits: &[f64]| -> f64 {
                let probabilities = reference::scores(logits, EXPERTS, Scores::Softmax);
                probabilities.iter().enumerate().map(|(at, p)| p * f64::from(factors[at % EXPERTS])).sum()
            };
            let found: f64 = load.iter().zip(&factors).map(|((_, sum), &factor)| sum * f64::from(factor)).sum();
            assert!((found - objective(&double)).abs() < 1e-4);
            let d_logits = routing.backward(routing.weight_gradients(false), Some(&factors), &pool).to_rows();
            check_gradient("logits", &logits, &d_logits, objective);
        }
    });
}

#[test]
fn a_gate_has_the_gradient_of_its_finite_differences() {
    each_engine(|engine| {
        let (logits, x, seed) = (numbers(1, TOKENS), numbers(2, TOKENS * FEATURES), numbers(3, TOKENS * FEATURES));
        let pool = engine.pool();
        let gate = SigmoidGate::new(&Activation::from_rows(&pool, &logits, 1));
        let (middle, mut d_middle) =
            (Activation::from_rows(&pool, &x, FEATURES), Activation::from_rows(&pool, &seed, FEATURES));
        gate.apply(&mut d_middle);
        let d_logits = gate.backward(&d_middle, &middle, &pool).to_rows();
        check_gradient("logits", &logits, &d_logits, |logits| {
            let each = x.iter().zip(&seed).enumerate();
            each.map(|(at, (x, s))| f64::from(*x) * f64::from(*s) / (1.0 + (-logits[at / FEATURES]).exp())).sum()
        });
    });
}

#[test]
fn experts_of_a_few_tokens_are_in_one_group_and_of_many_each_in_its_own() {
    let count = 40;
    let groups = |pool: &Arc<Pool>, tokens: usize| {
        let logits = numbers(1, tokens * count);
        route(&Activation::from_rows(pool, &logits, count), None, Router::softmax(3, true)).groups()
    };
    let sizes = |groups: &[Vec<usize>]| groups.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(&groups(&Pool::new(), 1)), [3]);
    let few = groups(&Pool::new(), LANES);
    assert!(few.concat().is_sorted() && few.len() > 1, "{few:?}");
    assert!(few.iter().all(|group| (1..=GROUP).contains(&group.len())), "{few:?}");
    assert!(groups(&Pool::new(), LANES + 1).iter().all(|group| group.len() == 1));
    assert!(groups(&Pool::on(Device::Meta), 1).iter().all(|group| group.len() == 1));
}

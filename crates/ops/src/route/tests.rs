//! Routing against its definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, numbers};

const TOKENS: usize = 21;
const EXPERTS: usize = 5;
const FEATURES: usize = 3;

/// An expert's bias.
fn bias(expert: usize) -> Vec<f32> {
    numbers(20 + expert as u64, FEATURES)
}

/// Experts that multiply a token by `expert + 1` and add a bias: `out = sum_e w_e ((e + 1) x + b_e)`, times `seed`, summed.
fn objective(logits: &[f64], x: &[f64], seed: &[f32], per_token: usize, normalised: bool) -> f64 {
    let w = reference::weights(logits, EXPERTS, per_token, normalised);
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
        for (per_token, normalised) in [(1, false), (2, false), (2, true), (EXPERTS, true)] {
            // Far enough apart that a small difference changes no choice.
            let logits: Vec<f32> =
                numbers(1, TOKENS * EXPERTS).iter().enumerate().map(|(at, x)| x + (at * 7 % EXPERTS) as f32).collect();
            let (x, seed) = (numbers(2, TOKENS * FEATURES), numbers(3, TOKENS * FEATURES));
            let double = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let (pool, own) = (engine.pool(), Pool::stepped_on(engine.device()));
            let routing = route(&Activation::from_rows(&pool, &logits, EXPERTS), per_token, normalised);
            let (xa, d_out) =
                (Activation::from_rows(&pool, &x, FEATURES), Activation::from_rows(&pool, &seed, FEATURES));
            let (mut out, mut dx) = (xa.like(), xa.like());
            out.zero();
            dx.zero();
            let mut d_weights = routing.weight_gradients();
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
            let wanted = objective(&double(&logits), &double(&x), &seed, per_token, normalised);
            assert!((found - wanted).abs() < 1e-4, "{found} != {wanted}");
            check_gradient("x", &x, &dx.to_rows(), |x| objective(&double(&logits), x, &seed, per_token, normalised));
            let d_logits = routing.backward(d_weights, None, &pool).to_rows();
            check_gradient("logits", &logits, &d_logits, |logits| {
                objective(logits, &double(&x), &seed, per_token, normalised)
            });
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
                let w = reference::weights(logits, EXPERTS, 3, normalised);
                let factor = |at: usize| -> f64 {
                    (0..EXPERTS).map(|e| w[at / FEATURES * EXPERTS + e] * factors[e] * (e + 1) as f64).sum()
                };
                let each = x.iter().zip(&seed).enumerate();
                each.map(|(at, (x, seed))| factor(at) * f64::from(*x) * f64::from(*seed)).sum()
            };
            let (pool, own) = (engine.pool(), Pool::stepped_on(engine.device()));
            let mut routing = route(&Activation::from_rows(&pool, &logits, EXPERTS), 3, normalised);
            routing.scale(engine.array(&factors).view());
            let (xa, d_out) =
                (Activation::from_rows(&pool, &x, FEATURES), Activation::from_rows(&pool, &seed, FEATURES));
            let mut out = xa.like();
            out.zero();
            let mut d_weights = routing.weight_gradients();
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
        let pool = engine.pool();
        let routing = route(&Activation::from_rows(&pool, &logits, EXPERTS), 2, true);
        let load: Vec<(f64, f64)> = routing.load().collect();
        assert_eq!(load.iter().map(|(tokens, _)| tokens).sum::<f64>(), (2 * TOKENS) as f64);
        let factors = numbers(2, EXPERTS);
        let objective = |logits: &[f64]| -> f64 {
            let probabilities = reference::weights(logits, EXPERTS, EXPERTS, false);
            probabilities.iter().enumerate().map(|(at, p)| p * f64::from(factors[at % EXPERTS])).sum()
        };
        let found: f64 = load.iter().zip(&factors).map(|((_, sum), &factor)| sum * f64::from(factor)).sum();
        let double: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        assert!((found - objective(&double)).abs() < 1e-4);
        let d_logits = routing.backward(routing.weight_gradients(), Some(&factors), &pool).to_rows();
        check_gradient("logits", &logits, &d_logits, objective);
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
        route(&Activation::from_rows(pool, &logits, count), 3, true).groups()
    };
    let sizes = |groups: &[Vec<usize>]| groups.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(&groups(&Pool::new(), 1)), [3]);
    let few = groups(&Pool::new(), LANES);
    assert!(few.concat().is_sorted() && few.len() > 1, "{few:?}");
    assert!(few.iter().all(|group| (1..=GROUP).contains(&group.len())), "{few:?}");
    assert!(groups(&Pool::new(), LANES + 1).iter().all(|group| group.len() == 1));
    assert!(groups(&Pool::on(Device::Meta), 1).iter().all(|group| group.len() == 1));
}

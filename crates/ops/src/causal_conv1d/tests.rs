//! The convolution and its gradients against the definition and finite differences.
use super::*;
use crate::activation::Pool;
use crate::testing::{check_gradient, each_engine, f64s, near, numbers};

/// Sequences shorter than a kernel, at a panel's edges, and longer than a panel.
const SEQUENCES: [Range<usize>; 6] = [0..1, 1..3, 3..16, 16..17, 17..52, 52..70];

#[test]
fn equals_its_definition_and_its_finite_differences() {
    each_engine(|engine| {
        let (tokens, channels, pool) = (70, 37, engine.pool());
        let (x, seed) = (numbers(1, tokens * channels), numbers(2, tokens * channels));
        let (xa, dy) = (Activation::from_rows(&pool, &x, channels), Activation::from_rows(&pool, &seed, channels));
        for (kernel, with_bias, silu) in [(1, false, false), (3, true, false), (4, false, true), (7, true, true)] {
            let (weight, bias) = (numbers(3, channels * kernel), numbers(4, channels));
            let (weights, biases) = (engine.array(&weight), engine.array(&bias));
            let conv = Conv { weight: weights.view(), bias: with_bias.then(|| biases.view()), silu };
            let value = |x: &[f64], weight: &[f64], bias: &[f64]| {
                reference::forward(x, weight, with_bias.then_some(bias), silu, channels, &SEQUENCES)
            };
            let y = forward(conv, &xa, &SEQUENCES);
            near("y", &y.to_rows(), &value(&f64s(&x), &f64s(&weight), &f64s(&bias)), 1e-5);
            let (mut d_weight, mut d_bias) =
                (engine.array(&vec![0.0; weight.len()]), engine.array(&vec![0.0; channels]));
            let (dx, dz) = backward(conv, &xa, dy.copy(), &SEQUENCES, Some(d_weight.view_mut()));
            crate::elementwise::add_bias_backward(&dz, d_bias.view_mut());
            let loss = |y: Vec<f64>| y.iter().zip(&seed).map(|(y, &s)| y * f64::from(s)).sum::<f64>();
            check_gradient("x", &x, &dx.to_rows(), |x| loss(value(x, &f64s(&weight), &f64s(&bias))));
            check_gradient("weight", &weight, &d_weight.read(), |weight| loss(value(&f64s(&x), weight, &f64s(&bias))));
            if with_bias {
                check_gradient("bias", &bias, &d_bias.read(), |bias| loss(value(&f64s(&x), &f64s(&weight), bias)));
            }
        }
    });
}

#[test]
#[should_panic(expected = "each token is in a sequence")]
fn tokens_without_a_sequence_are_refused() {
    let x = Activation::from_rows(&Pool::new(), &[0.0; 6], 2);
    let conv = Conv { weight: [1.0; 4][..].into(), bias: None, silu: false };
    let _ = forward(conv, &x, std::slice::from_ref(&(0..2)));
}

//! Plain loops in one task: a router has few logits.
use super::{Expert, Routing};
use crate::activation::Activation;

pub(super) fn route(logits: &Activation, per_token: usize, normalised: bool) -> Routing {
    let count = logits.features();
    let mut probabilities = logits.to_rows();
    let mut chosen = vec![(Vec::new(), Vec::new()); count];
    let mut order: Vec<usize> = Vec::with_capacity(count);
    for (row, p) in probabilities.chunks_exact_mut(count).enumerate() {
        let top = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for p in p.iter_mut() {
            *p = (*p - top).exp();
        }
        let sum: f32 = p.iter().sum();
        for p in p.iter_mut() {
            *p /= sum;
        }
        order.clear();
        order.extend(0..count);
        order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
        order.truncate(per_token);
        let sum: f32 = if normalised { order.iter().map(|&expert| p[expert]).sum() } else { 1.0 };
        for &expert in &order {
            chosen[expert].0.push(row);
            chosen[expert].1.push(p[expert] / sum);
        }
    }
    let experts = chosen.into_iter().map(|(tokens, weights)| Expert { tokens: tokens.into(), weights: weights.into() });
    let experts = experts.collect();
    Routing { tokens: logits.tokens(), probabilities, experts, normalised, factors: Vec::new(), group: 1 }
}

/// `gradient` is `[tokens, experts]`.
pub(super) fn set_weight_gradient(
    routing: &Routing,
    expert: usize,
    d_middle: &Activation,
    middle: &Activation,
    gradient: &mut [f32],
) {
    let (tokens, count) = (&routing.experts[expert].tokens, routing.experts.len());
    for (&token, d) in tokens.iter().zip(factor_gradients(&routing.weights(expert), d_middle, middle)) {
        gradient[token * count + expert] = d;
    }
}

/// As [`set_weight_gradient`], added to what is there.
pub(super) fn add_weight_gradient(
    routing: &Routing,
    expert: usize,
    dy: &Activation,
    biases: &Activation,
    gradient: &mut [f32],
) {
    let (tokens, count) = (&routing.experts[expert].tokens, routing.experts.len());
    for (&token, d) in tokens.iter().zip(factor_gradients(&routing.weights(expert), dy, biases)) {
        gradient[token * count + expert] += d;
    }
}

/// `gradient [tokens, experts]` is that of weights times factors, and becomes that of the weights; `of_factors` becomes each token's
/// part of that of the factors.
pub(super) fn scale_backward(routing: &Routing, gradient: &mut [f32], of_factors: &mut [f32]) {
    let count = routing.experts.len();
    for (expert, (Expert { tokens, weights }, factor)) in routing.experts.iter().zip(&routing.factors).enumerate() {
        for (&token, weight) in tokens.iter().zip(weights.iter()) {
            let at = token * count + expert;
            of_factors[at] = gradient[at] * weight;
            gradient[at] *= factor;
        }
    }
}

/// Turns the gradient of the weights `[tokens, experts]` into that of the logits.
pub(super) fn backward(routing: &Routing, gradient: &mut [f32], balance: Option<&[f32]>) {
    let count = routing.experts.len();
    if routing.normalised {
        // w = p / S: dp = (dw - sum dw w) / S, for the chosen.
        let mut sums = vec![(0.0f32, 0.0f32); gradient.len() / count];
        for (expert, Expert { tokens, weights }) in routing.experts.iter().enumerate() {
            for (&token, weight) in tokens.iter().zip(weights.iter()) {
                sums[token].0 += routing.probabilities[token * count + expert];
                sums[token].1 += gradient[token * count + expert] * weight;
            }
        }
        for (expert, it) in routing.experts.iter().enumerate() {
            for &token in &it.tokens[..] {
                let d = &mut gradient[token * count + expert];
                *d = (*d - sums[token].1) / sums[token].0;
            }
        }
    }
    for (d, p) in gradient.chunks_exact_mut(count).zip(routing.probabilities.chunks_exact(count)) {
        if let Some(balance) = balance {
            d.iter_mut().zip(balance).for_each(|(d, balance)| *d += balance);
        }
        let along: f32 = d.iter().zip(p).map(|(d, p)| d * p).sum();
        d.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - along));
    }
}

/// The gradient of each token's factor, given `d_middle`, which carries the factor already.
fn factor_gradients(factors: &[f32], d_middle: &Activation, middle: &Activation) -> Vec<f32> {
    let along = d_middle.dot(middle).into_iter().zip(factors);
    along.map(|(sum, &factor)| if factor == 0.0 { 0.0 } else { sum / factor }).collect()
}

/// Of `logits [tokens, 1]`.
pub(super) fn sigmoid(logits: &Activation) -> Vec<f32> {
    logits.to_rows().into_iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect()
}

pub(super) fn sigmoid_backward(factors: &[f32], d_middle: &Activation, middle: &Activation) -> Vec<f32> {
    let d = factor_gradients(factors, d_middle, middle);
    d.iter().zip(factors).map(|(d, g)| d * g * (1.0 - g)).collect()
}

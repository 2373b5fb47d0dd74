//! Routing in a mixture of experts (Shazeer et al., 2017, <https://arxiv.org/abs/1701.06538>): each token goes through
//! the experts with its largest probabilities `p = softmax(logits)`. An expert's output counts with the weight `w = p`, or
//! `w = p / sum of the chosen p`.
//!
//! Of tokens `[tokens, features]` an expert sees its own, which [`Routing::dispatch`] copies; [`Routing::combine`] adds its
//! outputs to all.
#[cfg(test)]
mod tests;

use crate::panel::{Act, Pool};
use std::sync::Arc;
use tunesmith_device::Device;

/// Which tokens go through which experts, and with which weights.
#[derive(Debug)]
pub struct Routing {
    /// `[tokens, experts]`.
    probabilities: Vec<f32>,
    experts: Vec<Expert>,
    normalised: bool,
}

/// One expert's tokens, rising, and its weight for each.
#[derive(Debug, Clone, Default)]
struct Expert {
    tokens: Vec<usize>,
    weights: Vec<f32>,
}

/// The gradient of the experts' weights, `[tokens, experts]`; zero where an expert was not chosen.
#[derive(Debug)]
pub struct WeightGradients(Vec<f32>);

/// Sends each token of `logits [tokens, experts]` to the `per_token` experts with the largest ones, the first of equal
/// ones. `normalised`: a token's weights sum to 1.
pub fn route(logits: &Act, per_token: usize, normalised: bool) -> Routing {
    let count = logits.features();
    if logits.device() == Device::Meta {
        return balanced(logits.tokens(), count, per_token);
    }
    let mut probabilities = logits.to_rows();
    let mut experts = vec![Expert::default(); count];
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
            experts[expert].tokens.push(row);
            experts[expert].weights.push(p[expert] / sum);
        }
    }
    Routing { probabilities, experts, normalised }
}

/// On the meta device no token has a favourite: they spread evenly.
fn balanced(tokens: usize, count: usize, per_token: usize) -> Routing {
    let pairs = tokens * per_token;
    let (each, used) = (pairs.div_ceil(count).max(1), count.min(pairs));
    let mut experts = vec![Expert::default(); count];
    for expert in &mut experts[..used] {
        *expert = Expert { tokens: (0..each).collect(), weights: vec![0.0; each] };
    }
    Routing { probabilities: vec![0.0; tokens * count], experts, normalised: false }
}

impl Routing {
    /// Whether an expert has tokens.
    pub fn is_used(&self, expert: usize) -> bool {
        !self.experts[expert].tokens.is_empty()
    }

    /// How many tokens each expert has, and the sum of its probabilities over all tokens: what the load-balancing loss is
    /// made of.
    pub fn load(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let count = self.experts.len();
        self.experts.iter().enumerate().map(move |(expert, it)| {
            let sum = self.probabilities.iter().skip(expert).step_by(count).map(|&p| f64::from(p)).sum();
            (it.tokens.len() as f64, sum)
        })
    }

    /// An expert's tokens of `x [tokens, features]`, in memory of `pool`.
    pub fn dispatch(&self, expert: usize, x: &Act, pool: &Arc<Pool>) -> Act {
        x.gather_to(pool, &self.experts[expert].tokens)
    }

    /// Adds an expert's outputs `y`, times its weights, to its tokens in `out [tokens, features]`.
    pub fn combine(&self, expert: usize, y: &Act, out: &mut Act) {
        let Expert { tokens, weights } = &self.experts[expert];
        out.scatter_add(tokens, Some(weights), y);
    }

    /// The gradient of [`Routing::dispatch`]: adds that of an expert's tokens, `dx`, to `dh [tokens, features]`.
    pub fn dispatch_backward(&self, expert: usize, dx: &Act, dh: &mut Act) {
        dh.scatter_add(&self.experts[expert].tokens, None, dx);
    }

    /// The gradient of [`Routing::combine`] with respect to an expert's outputs, given that of `out`.
    pub fn combine_backward(&self, expert: usize, d_out: &Act, pool: &Arc<Pool>) -> Act {
        let Expert { tokens, weights } = &self.experts[expert];
        let mut dy = d_out.gather_to(pool, tokens);
        dy.times(weights);
        dy
    }

    /// Zeros, for [`Routing::set_weight_gradient`].
    pub fn weight_gradients(&self) -> WeightGradients {
        WeightGradients(vec![0.0; self.probabilities.len()])
    }

    /// Sets the gradient of an expert's weights. Let its output be `D m`: `dL/dw = d_out · D m = (D^T d_out) · m`. `d_middle`
    /// is `w D^T d_out` and `middle` is `m`, both of the expert's tokens.
    pub fn set_weight_gradient(&self, expert: usize, d_middle: &Act, middle: &Act, to: &mut WeightGradients) {
        let (Expert { tokens, weights }, count) = (&self.experts[expert], self.experts.len());
        for (&token, d) in tokens.iter().zip(factor_gradients(weights, d_middle, middle)) {
            to.0[token * count + expert] = d;
        }
    }

    /// From the gradient of the weights to that of the logits, `[tokens, experts]` in memory of `pool`. `balance`: what the
    /// load-balancing loss adds to the gradient of each token's probability of each expert.
    pub fn backward(&self, d_weights: WeightGradients, balance: Option<&[f32]>, pool: &Arc<Pool>) -> Act {
        let (WeightGradients(mut gradient), count) = (d_weights, self.experts.len());
        if self.normalised {
            // w = p / S: dp = (dw - sum dw w) / S, for the chosen.
            let mut sums = vec![(0.0f32, 0.0f32); gradient.len() / count];
            for (expert, Expert { tokens, weights }) in self.experts.iter().enumerate() {
                for (&token, weight) in tokens.iter().zip(weights) {
                    sums[token].0 += self.probabilities[token * count + expert];
                    sums[token].1 += gradient[token * count + expert] * weight;
                }
            }
            for (expert, it) in self.experts.iter().enumerate() {
                for &token in &it.tokens {
                    let d = &mut gradient[token * count + expert];
                    *d = (*d - sums[token].1) / sums[token].0;
                }
            }
        }
        for (d, p) in gradient.chunks_exact_mut(count).zip(self.probabilities.chunks_exact(count)) {
            if let Some(balance) = balance {
                d.iter_mut().zip(balance).for_each(|(d, balance)| *d += balance);
            }
            let along: f32 = d.iter().zip(p).map(|(d, p)| d * p).sum();
            d.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - along));
        }
        Act::from_rows(pool, &gradient, count)
    }
}

/// The gradient of each token's factor, given `d_middle`, which carries the factor already.
fn factor_gradients(factors: &[f32], d_middle: &Act, middle: &Act) -> Vec<f32> {
    let along = d_middle.dot(middle).into_iter().zip(factors);
    along.map(|(sum, &factor)| if factor == 0.0 { 0.0 } else { sum / factor }).collect()
}

/// A factor for each token, `sigmoid(logit)`: the gate of an expert that every token goes through.
#[derive(Debug)]
pub struct SigmoidGate(Vec<f32>);

impl SigmoidGate {
    /// Of `logits [tokens, 1]`.
    pub fn new(logits: &Act) -> Self {
        Self(logits.to_rows().into_iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect())
    }

    /// Multiplies each token of `y [tokens, features]` by its factor. It is its own gradient with respect to `y`.
    pub fn apply(&self, y: &mut Act) {
        y.times(&self.0);
    }

    /// The gradient of the logits, `[tokens, 1]`; the arguments are those of [`Routing::set_weight_gradient`].
    pub fn backward(&self, d_middle: &Act, middle: &Act, pool: &Arc<Pool>) -> Act {
        let d = factor_gradients(&self.0, d_middle, middle);
        let d: Vec<f32> = d.iter().zip(&self.0).map(|(d, g)| d * g * (1.0 - g)).collect();
        Act::from_rows(pool, &d, 1)
    }
}

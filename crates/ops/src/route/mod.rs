//! Routing in a mixture of experts (Shazeer et al., 2017, <https://arxiv.org/abs/1701.06538>): each token goes through
//! the experts with its largest scores `s = softmax(logits)` or `s = sigmoid(logits)`. An expert's output counts with the weight
//! `w = c s`, or `w = c s / (sum of the chosen s + eps)`; an expert may have a factor by which all of its weights are multiplied
//! ([`Routing::scale`]).
//!
//! A bias may move the choice, and is no part of the weights (Wang et al., 2024, <https://arxiv.org/abs/2408.15664>). The choice may
//! be among the experts of the best groups (DeepSeek-V2, <https://arxiv.org/abs/2405.04434>, and DeepSeek-V3,
//! <https://arxiv.org/abs/2412.19437>).
//!
//! Of tokens `[tokens, features]` an expert sees its own, which [`Routing::dispatch`] copies; [`Routing::combine`] adds its
//! outputs to all.
//!
//! The host routes for a GPU too: it has to know the experts' numbers of tokens, and their logits are few. So it waits for a GPU when
//! it routes, and once more in the backward pass, for what the gradients of all weights are made of.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::{Activation, LANES, Pool};
use crate::elementwise;
use crate::floats::Floats;
use std::sync::Arc;
use tunesmith_device::Device;

/// Which tokens go through which experts, and with which weights.
#[derive(Debug)]
pub struct Routing {
    tokens: usize,
    /// `[tokens, experts]`, probabilities for a softmax and logits for a sigmoid; none where only counting is done.
    scores: Vec<f32>,
    experts: Vec<Expert>,
    router: Router,
    /// What the weights of each expert are multiplied by; empty without that.
    factors: Vec<f32>,
    /// The most experts of a group.
    group: usize,
}

/// In the place of a factor of 0, whose gradient would be lost.
const SMALLEST_FACTOR: f32 = 1e-20;

/// How a router chooses experts and weighs them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    /// Experts that a token goes through.
    pub per_token: usize,
    /// What the logits go through.
    pub scores: Scores,
    /// Among which experts it chooses; `None`: among all.
    pub groups: Option<Groups>,
    /// What is added to the sum of a token's chosen scores, which its weights are divided by; `None`: they are not.
    pub normalised: Option<f32>,
    /// Factor `c` on all weights.
    pub scale: f32,
}

/// What a router's logits go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// A softmax over all experts.
    Softmax,
    /// A sigmoid of each expert's logit for itself.
    Sigmoid,
}

/// Experts in groups of equal size, one after the other. A token's experts are in the groups with the largest scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups.
    pub count: usize,
    /// How many of them a token may go to.
    pub chosen: usize,
    /// What the score of a group is.
    pub score: GroupScore,
}

/// The score of a group of experts, from their scores with the bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// That of its best expert (DeepSeek-V2, `group_limited_greedy`).
    Best,
    /// The sum of its best two, which it must have (DeepSeek-V3).
    BestTwo,
}

impl GroupScore {
    /// The fewest experts of a group.
    pub const fn experts(self) -> usize {
        match self {
            Self::Best => 1,
            Self::BestTwo => 2,
        }
    }
}

impl Router {
    /// A softmax over all experts, and weights that sum to 1 if `normalised`.
    pub const fn softmax(per_token: usize, normalised: bool) -> Self {
        let normalised = if normalised { Some(0.0) } else { None };
        Self { per_token, scores: Scores::Softmax, groups: None, normalised, scale: 1.0 }
    }
}

/// The most experts of a group in a pass of at most [`LANES`] tokens. Each takes a panel.
const GROUP: usize = 16;

/// One expert's tokens, rising, and its weight for each.
#[derive(Debug, Clone, Default)]
struct Expert {
    tokens: Arc<[usize]>,
    weights: Arc<[f32]>,
}

/// The gradient of the experts' weights, `[tokens, experts]`; zero where an expert was not chosen.
#[derive(Debug)]
pub struct WeightGradients {
    values: Vec<f32>,
    /// What a GPU adds to them, until the host reads it.
    pending: cuda::Pending,
}

/// Sends each token of `logits [tokens, experts]` to the experts with the largest scores, the first of equal ones. `bias
/// [experts]` is added to the scores for the choice.
///
/// # Panics
/// If the bias is not one for each expert, or the groups are not of one size or hold too few experts.
pub fn route(logits: &Activation, bias: Option<&[f32]>, router: Router) -> Routing {
    let count = logits.features();
    assert!(bias.is_none_or(|bias| bias.len() == count), "a bias for each expert");
    if let Some(Groups { count: groups, chosen, score }) = router.groups {
        assert!(groups > 0 && count.is_multiple_of(groups) && count / groups >= score.experts(), "groups of one size");
        assert!(chosen <= groups && chosen * (count / groups) >= router.per_token, "groups of enough experts");
    }
    match logits.device() {
        device if device.only_counts() => balanced(logits.tokens(), count, router),
        Device::Cpu | Device::Cuda(_) => {
            // An expert of a larger pass has work for all threads, and activations that are not held beside others'.
            let group = if logits.tokens() <= LANES { GROUP } else { 1 };
            Routing { group, ..cpu::route(logits, bias, router) }
        }
        Device::Meta => unreachable!("it only counts"),
    }
}

/// Where only counting is done no token has a favourite: they spread evenly. Experts are counted one by one: passes that are so small
/// that the CPU takes several at once need no prediction.
fn balanced(tokens: usize, count: usize, router: Router) -> Routing {
    let pairs = tokens * router.per_token;
    let (each, used) = (pairs.div_ceil(count).max(1), count.min(pairs));
    let mut experts = vec![Expert::default(); count];
    experts[..used].fill(Expert { tokens: (0..each).collect(), weights: vec![0.0; each].into() });
    Routing { tokens, scores: Vec::new(), experts, router, factors: Vec::new(), group: 1 }
}

impl Routing {
    /// From here on the weights of each expert are multiplied by its one of `factors [experts]`. Where only counting is done they
    /// have no values.
    pub fn scale(&mut self, factors: Floats<'_>) {
        if factors.device().only_counts() {
            return;
        }
        self.factors = factors.read();
        self.factors.iter_mut().filter(|factor| **factor == 0.0).for_each(|factor| *factor = SMALLEST_FACTOR);
    }

    /// An expert's weights times its factor.
    fn weights(&self, expert: usize) -> Arc<[f32]> {
        let weights = &self.experts[expert].weights;
        match self.factors.get(expert) {
            Some(factor) => weights.iter().map(|weight| weight * factor).collect(),
            None => Arc::clone(weights),
        }
    }

    /// The gradient of [`Routing::scale`]: turns that of the weights times factors into that of the weights, and gives what each
    /// token adds to that of the factors, `[tokens, experts]` in memory of `pool`.
    pub fn scale_backward(&self, gradients: &mut WeightGradients, pool: &Arc<Pool>) -> Activation {
        let count = self.experts.len();
        let mut of_factors = vec![0.0; self.tokens * count];
        if !pool.device().only_counts() {
            gradients.pending.read(self, &mut gradients.values);
            cpu::scale_backward(self, &mut gradients.values, &mut of_factors);
        }
        Activation::from_rows(pool, &of_factors, count)
    }

    /// The experts that have tokens, rising, in groups whose activations may be held at once: their products are computed
    /// together.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let used = |expert: &usize| !self.experts[*expert].tokens.is_empty();
        let used: Vec<usize> = (0..self.experts.len()).filter(used).collect();
        used.chunks(self.group).map(<[_]>::to_vec).collect()
    }

    /// How many tokens each expert has, and the sum of its probabilities over all tokens: what the load-balancing loss is
    /// made of. The probabilities are those of a softmax. Where the router's scores are sigmoids, the tokens are those that would
    /// choose the expert by these probabilities, as in Transformers' `load_balancing_loss_func`.
    pub fn load(&self) -> Vec<(f64, f64)> {
        cpu::load(self)
    }

    /// An expert's tokens of `x [tokens, features]`, in memory of `pool`.
    pub fn dispatch(&self, expert: usize, x: &Activation, pool: &Arc<Pool>) -> Activation {
        x.gather_to(pool, &self.experts[expert].tokens)
    }

    /// Adds an expert's outputs `y`, times its weights, to its tokens in `out [tokens, features]`.
    pub fn combine(&self, expert: usize, y: &Activation, out: &mut Activation) {
        out.scatter_add(&self.experts[expert].tokens, Some(&self.weights(expert)), y);
    }

    /// The gradient of [`Routing::dispatch`]: adds that of an expert's tokens, `dx`, to `dh [tokens, features]`.
    pub fn dispatch_backward(&self, expert: usize, dx: &Activation, dh: &mut Activation) {
        dh.scatter_add(&self.experts[expert].tokens, None, dx);
    }

    /// The gradient of [`Routing::combine`] with respect to an expert's outputs, given that of `out`.
    pub fn combine_backward(&self, expert: usize, d_out: &Activation, pool: &Arc<Pool>) -> Activation {
        let mut dy = d_out.gather_to(pool, &self.experts[expert].tokens);
        dy.times(&self.weights(expert));
        dy
    }

    /// The gradients of all experts' weights, zero until [`Routing::set_weight_gradient`] sets them. `biased`: experts' outputs have
    /// biases, for [`Routing::add_bias_gradient`].
    pub fn weight_gradients(&self, biased: bool) -> WeightGradients {
        WeightGradients { values: vec![0.0; self.scores.len()], pending: cuda::Pending::new(self, biased) }
    }

    /// Sets the gradient of an expert's weights. Let its output be `D m`: `dL/dw = d_out · D m = (D^T d_out) · m`. `d_middle`
    /// is `w D^T d_out` and `middle` is `m`, both of the expert's tokens.
    pub fn set_weight_gradient(
        &self,
        expert: usize,
        d_middle: &Activation,
        middle: &Activation,
        to: &mut WeightGradients,
    ) {
        match middle.device() {
            Device::Cpu => cpu::set_weight_gradient(self, expert, d_middle, middle, &mut to.values),
            Device::Cuda(_) => to.pending.products(0, expert, d_middle, middle),
            // The memory of a product that nobody reads.
            Device::Meta => drop(d_middle.dot(middle)),
        }
    }

    /// Adds what a bias `b [features]` of an expert's output adds to the gradient of its weights: `d_out · b`. `dy [its tokens,
    /// features]` is `w d_out`.
    pub fn add_bias_gradient(&self, expert: usize, dy: &Activation, bias: Floats<'_>, to: &mut WeightGradients) {
        let mut biases = dy.like();
        biases.zero();
        elementwise::add_bias(&mut biases, bias);
        match dy.device() {
            Device::Cpu => cpu::add_weight_gradient(self, expert, dy, &biases, &mut to.values),
            Device::Cuda(_) => to.pending.products(1, expert, dy, &biases),
            Device::Meta => drop(dy.dot(&biases)),
        }
    }

    /// From the gradient of the weights to that of the logits, `[tokens, experts]` in memory of `pool`. `balance`: what the
    /// load-balancing loss adds to the gradient of each token's probability of each expert.
    pub fn backward(&self, d_weights: WeightGradients, balance: Option<&[f32]>, pool: &Arc<Pool>) -> Activation {
        if pool.device().only_counts() {
            return Activation::from_rows(pool, &vec![0.0; self.tokens * self.experts.len()], self.experts.len());
        }
        let WeightGradients { values: mut gradient, mut pending } = d_weights;
        pending.read(self, &mut gradient);
        cpu::backward(self, &mut gradient, balance);
        Activation::from_rows(pool, &gradient, self.experts.len())
    }
}

/// A factor for each token, `sigmoid(logit)`: the gate of an expert that every token goes through.
#[derive(Debug)]
pub struct SigmoidGate(Gates);

/// `[tokens]`, where they are used: for a GPU's tokens nothing waits.
#[derive(Debug)]
enum Gates {
    Host(Vec<f32>),
    Gpu(Activation),
}

impl SigmoidGate {
    /// The factors of `logits [tokens, 1]`; zeros on the meta device.
    pub fn new(logits: &Activation) -> Self {
        Self(match logits.device() {
            Device::Cpu => Gates::Host(cpu::sigmoid(logits)),
            Device::Cuda(_) => Gates::Gpu(cuda::gates(logits)),
            Device::Meta => Gates::Host(vec![0.0; logits.tokens()]),
        })
    }

    /// Multiplies each token of `y [tokens, features]` by its factor. It is its own gradient with respect to `y`.
    pub fn apply(&self, y: &mut Activation) {
        match &self.0 {
            Gates::Host(factors) => y.times(factors),
            Gates::Gpu(factors) => cuda::gates_apply(factors, y),
        }
    }

    /// The gradient of the logits, `[tokens, 1]`; the arguments are those of [`Routing::set_weight_gradient`].
    pub fn backward(&self, d_middle: &Activation, middle: &Activation, pool: &Arc<Pool>) -> Activation {
        match &self.0 {
            Gates::Gpu(factors) => cuda::gates_backward(factors, d_middle, middle, pool),
            Gates::Host(factors) if middle.is_meta() => Activation::from_rows(pool, &vec![0.0; factors.len()], 1),
            Gates::Host(factors) => Activation::from_rows(pool, &cpu::sigmoid_backward(factors, d_middle, middle), 1),
        }
    }
}

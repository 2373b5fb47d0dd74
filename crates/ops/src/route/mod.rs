//! Routing in a mixture of experts (Shazeer et al., 2017, <https://arxiv.org/abs/1701.06538>): each token goes through
//! the experts with the largest scores, `s = softmax(logits)` or `s = sigmoid(logits)`. An expert's output counts with
//! the weight `w = c s`, or `w = c s / (sum of the chosen s + eps)`. An expert may also have a factor on all of its
//! weights ([`Routing::scale`]).
//!
//! A bias may affect the choice of experts without being part of the weights (Wang et al., 2024,
//! <https://arxiv.org/abs/2408.15664>). The choice may be limited to the experts of the best groups (DeepSeek-V2,
//! <https://arxiv.org/abs/2405.04434>, and DeepSeek-V3, <https://arxiv.org/abs/2412.19437>).
//!
//! [`Routing::dispatch`] copies an expert's own tokens out of `[tokens, features]`; [`Routing::combine`] adds the
//! expert's outputs to all tokens.
//!
//! The host routes for a GPU too, because it has to know how many tokens each expert has, and the logits are few. So it
//! waits for a GPU when it routes, and once more in the backward pass, for the products from which the gradients of all
//! weights are computed.
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

/// Which tokens go through which experts, and with which weights: the result of [`route`].
#[derive(Debug)]
pub struct Routing {
    tokens: usize,
    /// `[tokens, experts]`: probabilities for a softmax, logits for a sigmoid; empty if only memory is counted.
    scores: Vec<f32>,
    experts: Vec<Expert>,
    router: Router,
    /// The factor on the weights of each expert; empty without factors.
    factors: Vec<f32>,
    /// How many experts [`Routing::groups`] puts in a group at most.
    group: usize,
}

/// Used instead of a factor of 0, whose gradient would be lost.
const SMALLEST_FACTOR: f32 = 1e-20;

/// How a router chooses experts and weighs them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    /// How many experts a token goes through.
    pub per_token: usize,
    /// What the logits go through.
    pub scores: Scores,
    /// Limits the choice to the best groups of experts; `None` for a choice among all.
    pub groups: Option<Groups>,
    /// If set, a token's weights are divided by the sum of its chosen scores plus this.
    pub normalised: Option<f32>,
    /// The factor `c` on all weights.
    pub scale: f32,
}

/// What a router's logits go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// A softmax over all experts.
    Softmax,
    /// A separate sigmoid for each expert's logit.
    Sigmoid,
}

/// Experts in groups of equal size, in the order of their numbers. A token's experts come from the groups with the
/// largest scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// The number of groups.
    pub count: usize,
    /// How many groups a token's experts may come from.
    pub chosen: usize,
    /// How the score of a group is computed.
    pub score: GroupScore,
}

/// The score of a group of experts, computed from their scores with the bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The score of its best expert (DeepSeek-V2, `group_limited_greedy`).
    Best,
    /// The sum of the scores of its best two experts (DeepSeek-V3). A group then needs at least two experts.
    BestTwo,
}

impl GroupScore {
    /// How many experts a group needs at least.
    pub const fn experts(self) -> usize {
        match self {
            Self::Best => 1,
            Self::BestTwo => 2,
        }
    }
}

impl Router {
    /// A router with a softmax over all experts; if `normalised`, a token's weights sum to 1.
    pub const fn softmax(per_token: usize, normalised: bool) -> Self {
        let normalised = if normalised { Some(0.0) } else { None };
        Self { per_token, scores: Scores::Softmax, groups: None, normalised, scale: 1.0 }
    }
}

/// The most experts of a group in a pass of at most [`LANES`] tokens. Each of them takes one panel.
const GROUP: usize = 16;

/// The tokens of one expert, rising, and its weight for each.
#[derive(Debug, Clone, Default)]
struct Expert {
    tokens: Arc<[usize]>,
    weights: Arc<[f32]>,
}

/// The gradients of the experts' weights, `[tokens, experts]`; zero where an expert was not chosen.
#[derive(Debug)]
pub struct WeightGradients {
    values: Vec<f32>,
    /// What a GPU will add to them, until the host reads it.
    pending: cuda::Pending,
}

/// Sends each token of `logits [tokens, experts]` to the experts with the largest scores; of equal ones, the first in
/// number. `bias [experts]` is added to the scores for this choice only.
///
/// # Panics
/// If there is not one bias for each expert, or the groups differ in size or have too few experts.
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
            // In a larger pass, a single expert has work for all threads, and its activations are not held beside those
            // of others.
            let group = if logits.tokens() <= LANES { GROUP } else { 1 };
            Routing { group, ..cpu::route(logits, bias, router) }
        }
        Device::Meta => unreachable!("it only counts"),
    }
}

/// A routing for counting memory: tokens are spread evenly over experts. Experts are counted one at a time, because
/// passes so small that the CPU takes several experts at once need no prediction.
fn balanced(tokens: usize, count: usize, router: Router) -> Routing {
    let pairs = tokens * router.per_token;
    let (each, used) = (pairs.div_ceil(count).max(1), count.min(pairs));
    let mut experts = vec![Expert::default(); count];
    experts[..used].fill(Expert { tokens: (0..each).collect(), weights: vec![0.0; each].into() });
    Routing { tokens, scores: Vec::new(), experts, router, factors: Vec::new(), group: 1 }
}

impl Routing {
    /// Multiplies the weights of each expert by its factor, one of `factors [experts]`, from here on. Where only memory
    /// is counted, factors have no values.
    pub fn scale(&mut self, factors: Floats<'_>) {
        if factors.device().only_counts() {
            return;
        }
        self.factors = factors.read();
        self.factors.iter_mut().filter(|factor| **factor == 0.0).for_each(|factor| *factor = SMALLEST_FACTOR);
    }

    /// An expert's weights, times its factor if there is one.
    fn weights(&self, expert: usize) -> Arc<[f32]> {
        let weights = &self.experts[expert].weights;
        match self.factors.get(expert) {
            Some(factor) => weights.iter().map(|weight| weight * factor).collect(),
            None => Arc::clone(weights),
        }
    }

    /// The gradient of [`Routing::scale`]: turns the gradient of the weights times factors into that of the weights.
    /// Returns what each token adds to the gradient of the factors, `[tokens, experts]` in memory of `pool`.
    pub fn scale_backward(&self, gradients: &mut WeightGradients, pool: &Arc<Pool>) -> Activation {
        let count = self.experts.len();
        let mut of_factors = vec![0.0; self.tokens * count];
        if !pool.device().only_counts() {
            gradients.pending.read(self, &mut gradients.values);
            cpu::scale_backward(self, &mut gradients.values, &mut of_factors);
        }
        Activation::from_rows(pool, &of_factors, count)
    }

    /// The experts that have tokens, rising, in groups. The experts of a group are computed together, so their
    /// activations are held at the same time.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let used = |expert: &usize| !self.experts[*expert].tokens.is_empty();
        let used: Vec<usize> = (0..self.experts.len()).filter(used).collect();
        used.chunks(self.group).map(<[_]>::to_vec).collect()
    }

    /// How many tokens each expert has, and the sum of its probabilities over all tokens: the load-balancing loss is
    /// made of these. The probabilities are those of a softmax. If the router's scores are sigmoids, the tokens are
    /// those that would choose the expert by these probabilities, as in Transformers' `load_balancing_loss_func`.
    pub fn load(&self) -> Vec<(f64, f64)> {
        cpu::load(self)
    }

    /// Copies an expert's tokens of `x [tokens, features]`, in memory of `pool`.
    pub fn dispatch(&self, expert: usize, x: &Activation, pool: &Arc<Pool>) -> Activation {
        x.gather_to(pool, &self.experts[expert].tokens)
    }

    /// Adds an expert's outputs `y`, times its weights, to the expert's tokens in `out [tokens, features]`.
    pub fn combine(&self, expert: usize, y: &Activation, out: &mut Activation) {
        out.scatter_add(&self.experts[expert].tokens, Some(&self.weights(expert)), y);
    }

    /// The gradient of [`Routing::dispatch`]: adds `dx`, the gradient of an expert's tokens, to
    /// `dh [tokens, features]`.
    pub fn dispatch_backward(&self, expert: usize, dx: &Activation, dh: &mut Activation) {
        dh.scatter_add(&self.experts[expert].tokens, None, dx);
    }

    /// The gradient of [`Routing::combine`] with respect to an expert's outputs, from `d_out`, that of `out`.
    pub fn combine_backward(&self, expert: usize, d_out: &Activation, pool: &Arc<Pool>) -> Activation {
        let mut dy = d_out.gather_to(pool, &self.experts[expert].tokens);
        dy.times(&self.weights(expert));
        dy
    }

    /// The gradients of all experts' weights: zero until [`Routing::set_weight_gradient`] sets them. `biased` says that
    /// experts' outputs have biases, for [`Routing::add_bias_gradient`].
    pub fn weight_gradients(&self, biased: bool) -> WeightGradients {
        WeightGradients { values: vec![0.0; self.scores.len()], pending: cuda::Pending::new(self, biased) }
    }

    /// Sets the gradient of an expert's weights. With `D m` as the expert's output,
    /// `dL/dw = d_out · D m = (D^T d_out) · m`. `d_middle` is `w D^T d_out` and `middle` is `m`, both for the expert's
    /// tokens.
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
            // Counts the memory of a product that nobody reads.
            Device::Meta => drop(d_middle.dot(middle)),
        }
    }

    /// Adds what a bias `b [features]` of an expert's output contributes to the gradient of its weights: `d_out · b`.
    /// `dy [its tokens, features]` is `w d_out`.
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

    /// The gradient of the logits, `[tokens, experts]` in memory of `pool`, from that of the weights. `balance` is what
    /// the load-balancing loss adds to the gradient of each token's probability of each expert.
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

/// The gate of a shared expert, which every token goes through: a factor `sigmoid(logit)` for each token.
#[derive(Debug)]
pub struct SigmoidGate(Gates);

/// The factors `[tokens]`, on the device that uses them, so that nothing waits for a GPU.
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

    /// Multiplies each token of `y [tokens, features]` by its factor. The same call on a gradient is the backward pass
    /// with respect to `y`.
    pub fn apply(&self, y: &mut Activation) {
        match &self.0 {
            Gates::Host(factors) => y.times(factors),
            Gates::Gpu(factors) => cuda::gates_apply(factors, y),
        }
    }

    /// The gradient of the logits, `[tokens, 1]`. The arguments are those of [`Routing::set_weight_gradient`].
    pub fn backward(&self, d_middle: &Activation, middle: &Activation, pool: &Arc<Pool>) -> Activation {
        match &self.0 {
            Gates::Gpu(factors) => cuda::gates_backward(factors, d_middle, middle, pool),
            Gates::Host(factors) if middle.is_meta() => Activation::from_rows(pool, &vec![0.0; factors.len()], 1),
            Gates::Host(factors) => Activation::from_rows(pool, &cpu::sigmoid_backward(factors, d_middle, middle), 1),
        }
    }
}

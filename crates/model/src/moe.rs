//! A mixture of experts in the place of the MLP: a router gives each token a few of the experts, whose outputs are
//! summed by weight. Shazeer et al., 2017; Fedus et al., "Switch Transformers", 2022 (the loss for uneven use).
//!
//! The router's probabilities are `p = softmax(R h)` over all experts. A token goes through those with the largest p.
//! An expert's weight is its p, or p divided by the sum over the chosen experts. Gradients flow to `p` through the
//! weights: `dL/dw` of an expert with output `D m` is `dy . D m = (D^T dy) . m`, which its backward pass has at hand.
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::mlp::{self, Mlp};
use super::pass::Pass;
use super::weight::Weight;
use std::sync::Arc;
use tunesmith_ops::panel::{Act, Pool};

#[derive(Debug)]
pub struct Moe {
    /// Its weight is `[experts, hidden]`.
    pub router: Linear,
    pub experts: Vec<Mlp>,
    /// The expert that every token goes through, and the module whose sigmoid it is multiplied by.
    pub shared: Option<(Mlp, Linear)>,
    /// How many experts a token goes through.
    pub per_token: usize,
    /// The weights of a token's experts are made to sum to 1.
    pub normalised: bool,
    /// Where experts' activations come from, which are of very different lengths.
    pub pool: Arc<Pool>,
}

#[derive(Debug)]
pub struct Routing {
    /// The router's probabilities, `[rows, experts]`.
    probabilities: Vec<f32>,
    /// The tokens of each expert, rising, and its weight for each.
    chosen: Vec<(Vec<usize>, Vec<f32>)>,
}

impl Routing {
    /// How many tokens each expert had, and the sum of its probabilities.
    pub fn use_of_experts(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let experts = self.chosen.len();
        self.chosen.iter().enumerate().map(move |(expert, (rows, _))| {
            let sum = self.probabilities.iter().skip(expert).step_by(experts).map(|&p| f64::from(p)).sum();
            (rows.len() as f64, sum)
        })
    }
}

/// What one expert keeps for backward.
#[derive(Debug)]
struct One<T> {
    mlp: mlp::Saved<T>,
    down_extra: Option<linear::Saved<T>>,
}

impl<T> One<T> {
    fn map<U>(self, f: &impl Fn(T) -> U) -> One<U> {
        One { mlp: self.mlp.map(f), down_extra: self.down_extra.map(|extra| extra.map(f)) }
    }
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Act> {
    pub routing: Routing,
    /// Of the experts that have tokens.
    experts: Vec<Option<One<T>>>,
    shared: Option<Shared<T>>,
    router: Option<linear::Saved<T>>,
}

/// What the shared expert keeps: its own, the sigmoid it was multiplied by, and of the module that gave that.
type Shared<T> = (One<T>, Vec<f32>, Option<linear::Saved<T>>);

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let shared = |(one, gate, extra): Shared<T>| (one.map(f), gate, extra.map(|extra| extra.map(f)));
        Saved {
            routing: self.routing,
            experts: self.experts.into_iter().map(|one| one.map(|one| one.map(f))).collect(),
            shared: self.shared.map(shared),
            router: self.router.map(|extra| extra.map(f)),
        }
    }
}

impl Moe {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let shared = self.shared.iter_mut().flat_map(|(mlp, gate)| mlp.weights_mut().chain(gate.weights_mut()));
        let experts = self.experts.iter_mut().flat_map(Mlp::weights_mut);
        self.router.weights_mut().chain(experts).chain(shared).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let shared = self.shared.iter().flat_map(|(mlp, gate)| mlp.linears().chain([gate]));
        std::iter::once(&self.router).chain(self.experts.iter().flat_map(Mlp::linears)).chain(shared)
    }

    fn route(&self, pass: &Pass<'_>, h: &Act) -> (Routing, Option<linear::Saved>) {
        let experts = self.experts.len();
        let (logits, extra) = self.router.forward(pass, h, None);
        let mut probabilities = logits.to_rows();
        let mut chosen = vec![(Vec::new(), Vec::new()); experts];
        let mut order: Vec<usize> = Vec::with_capacity(experts);
        for (row, p) in probabilities.chunks_exact_mut(experts).enumerate() {
            let top = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for p in p.iter_mut() {
                *p = (*p - top).exp();
            }
            let sum: f32 = p.iter().sum();
            for p in p.iter_mut() {
                *p /= sum;
            }
            order.clear();
            order.extend(0..experts);
            order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
            order.truncate(self.per_token);
            let sum: f32 = if self.normalised { order.iter().map(|&expert| p[expert]).sum() } else { 1.0 };
            for &expert in &order {
                chosen[expert].0.push(row);
                chosen[expert].1.push(p[expert] / sum);
            }
        }
        (Routing { probabilities, chosen }, extra)
    }

    /// One expert's output on `x`.
    fn one(pass: &Pass<'_>, mlp: &Mlp, x: &Act) -> (Act, One<Act>) {
        let saved = mlp.forward(pass, x);
        let (y, down_extra) = mlp.down.forward(pass, &mlp.middle(&saved), None);
        (y, One { mlp: saved, down_extra })
    }

    /// `[rows, hidden]` to the same.
    pub fn forward(&self, pass: &Pass<'_>, h: &Act) -> (Act, Saved) {
        let (routing, router) = self.route(pass, h);
        let mut out = h.like();
        out.zero();
        let shared = self.shared.as_ref().map(|(mlp, to_gate)| {
            let (mut y, one) = Self::one(pass, mlp, h);
            let (gate, extra) = to_gate.forward(pass, h, None);
            let gate: Vec<f32> = gate.to_rows().into_iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
            y.times(&gate);
            out.add(&y);
            (one, gate, extra)
        });
        let mut experts = Vec::with_capacity(self.experts.len());
        for (mlp, (rows, weights)) in self.experts.iter().zip(&routing.chosen) {
            experts.push((!rows.is_empty()).then(|| {
                let (y, one) = Self::one(pass, mlp, &h.gather_to(&self.pool, rows));
                out.scatter_add(rows, Some(weights), &y);
                one
            }));
        }
        (out, Saved { routing, experts, shared, router })
    }

    /// The gradient of `x`, given that of the expert's output times its factors, and of each factor.
    fn one_backward(
        pass: &Pass<'_>,
        mlp: &Mlp,
        x: &Act,
        mut one: One<Act>,
        dy: &Act,
        factors: &[f32],
        grads: &mut Grads<'_>,
    ) -> (Act, Vec<f32>) {
        let middle = mlp.middle(&one.mlp);
        let mut d_middle = middle.like();
        let to = Some((&mut d_middle, false));
        mlp.down.backward(pass, &Input::new(&middle), one.down_extra.as_ref(), dy, to, grads);
        // `dy` carries the factor already.
        let along = d_middle.dot(&middle).into_iter().zip(factors);
        let d_factors = along.map(|(sum, &factor)| if factor == 0.0 { 0.0 } else { sum / factor }).collect();
        drop(middle);
        mlp.backward_middle(&mut one.mlp, &d_middle);
        (mlp.backward_gate_up(pass, x, one.mlp, grads), d_factors)
    }

    /// The gradient of `h`, given that of the output.
    pub fn backward(&self, pass: &Pass<'_>, h: &Act, saved: Saved, dy: &Act, grads: &mut Grads<'_>) -> Act {
        let Saved { routing, experts, shared, router } = saved;
        let count = self.experts.len();
        let mut dh = h.like();
        dh.zero();
        let mut d_weights = vec![0.0f32; routing.probabilities.len()];
        for (expert, one) in experts.into_iter().enumerate() {
            let Some(one) = one else { continue };
            let (rows, weights) = &routing.chosen[expert];
            let mut dy = dy.gather_to(&self.pool, rows);
            dy.times(weights);
            let x = h.gather_to(&self.pool, rows);
            let (dx, d_factors) = Self::one_backward(pass, &self.experts[expert], &x, one, &dy, weights, grads);
            dh.scatter_add(rows, None, &dx);
            for (&row, d) in rows.iter().zip(d_factors) {
                d_weights[row * count + expert] = d;
            }
        }
        if let (Some((mlp, to_gate)), Some((one, gate, extra))) = (&self.shared, shared) {
            let mut dy = dy.copy();
            dy.times(&gate);
            let (dx, d_gate) = Self::one_backward(pass, mlp, h, one, &dy, &gate, grads);
            dh.add(&dx);
            let d_gate: Vec<f32> = d_gate.iter().zip(&gate).map(|(d, g)| d * g * (1.0 - g)).collect();
            let d_gate = Act::from_rows(h.pool(), &d_gate, 1);
            to_gate.backward(pass, &Input::new(h), extra.as_ref(), &d_gate, Some((&mut dh, true)), grads);
        }
        let d_logits = self.backward_routing(pass, h, &routing, d_weights);
        self.router.backward(pass, &Input::new(h), router.as_ref(), &d_logits, Some((&mut dh, true)), grads);
        dh
    }

    /// From the gradient of the weights, `[rows, experts]`, zero where an expert was not chosen, to that of the router's output.
    fn backward_routing(&self, pass: &Pass<'_>, h: &Act, routing: &Routing, mut gradient: Vec<f32>) -> Act {
        let count = self.experts.len();
        if self.normalised {
            // w = p / S: dp = (dw - sum dw w) / S, for the chosen.
            let mut sums = vec![(0.0f32, 0.0f32); h.tokens()];
            for (expert, (rows, weights)) in routing.chosen.iter().enumerate() {
                for (&row, weight) in rows.iter().zip(weights) {
                    sums[row].0 += routing.probabilities[row * count + expert];
                    sums[row].1 += gradient[row * count + expert] * weight;
                }
            }
            for (expert, (rows, _)) in routing.chosen.iter().enumerate() {
                for &row in rows {
                    let d = &mut gradient[row * count + expert];
                    *d = (*d - sums[row].1) / sums[row].0;
                }
            }
        }
        for (d, p) in gradient.chunks_exact_mut(count).zip(routing.probabilities.chunks_exact(count)) {
            if let Some(balance) = pass.balance {
                d.iter_mut().zip(balance).for_each(|(d, balance)| *d += balance);
            }
            let along: f32 = d.iter().zip(p).map(|(d, p)| d * p).sum();
            d.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - along));
        }
        Act::from_rows(h.pool(), &gradient, count)
    }
}

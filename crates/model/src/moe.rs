//! A mixture of experts in the place of the MLP: a router gives each token a few of the experts, whose outputs are
//! summed by weight ([`tunesmith_ops::route`]). The load-balancing loss is that of Fedus et al., "Switch Transformers", 2022.
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::mlp::{self, Mlp};
use super::pass::Pass;
use super::weight::Weight;
use std::sync::Arc;
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::elementwise;
use tunesmith_ops::route::{Router, Routing, SigmoidGate, route};

#[derive(Debug)]
pub struct Moe {
    /// Its weight is `[experts, hidden]`.
    pub router: Linear,
    pub experts: Vec<Mlp>,
    /// The MLP beside the experts that every token goes through, and the module whose sigmoid its output is multiplied by.
    pub shared: Option<(Mlp, Option<Linear>)>,
    /// What each expert's weights are multiplied by, `[experts]`.
    pub factors: Option<Weight>,
    /// How a token's experts are chosen.
    pub how: Router,
    /// What is added to each expert's score for that choice, which is never trained.
    pub choice: Option<Vec<f32>>,
    /// Where experts' activations come from, which are of very different lengths.
    pub pool: Arc<Pool>,
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
pub struct Saved<T = Activation> {
    pub routing: Routing,
    /// Of the experts that have tokens.
    experts: Vec<Option<One<T>>>,
    shared: Option<Box<Shared<T>>>,
    router: Option<linear::Saved<T>>,
}

/// What the shared expert keeps: its own, its gate, and of the module that gave that.
type Shared<T> = (One<T>, Option<(SigmoidGate, Option<linear::Saved<T>>)>);

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let shared = |shared: Box<Shared<T>>| {
            let (one, gate) = *shared;
            Box::new((one.map(f), gate.map(|(gate, extra)| (gate, extra.map(|extra| extra.map(f))))))
        };
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
        let shared = self
            .shared
            .iter_mut()
            .flat_map(|(mlp, gate)| mlp.weights_mut().chain(gate.iter_mut().flat_map(Linear::weights_mut)));
        let experts = self.experts.iter_mut().flat_map(Mlp::weights_mut);
        self.router.weights_mut().chain(&mut self.factors).chain(experts).chain(shared).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let shared = self.shared.iter().flat_map(|(mlp, gate)| mlp.linears().chain(gate));
        std::iter::once(&self.router).chain(self.experts.iter().flat_map(Mlp::linears)).chain(shared)
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.linears().any(Linear::trains) || self.factors.as_ref().is_some_and(Weight::trains)
    }

    /// `[rows, hidden]` to the same.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation) -> (Activation, Saved) {
        self.forward_routed(pass, h, h)
    }

    /// As [`Moe::forward`], with a router that looks at `seen [rows, hidden]`.
    pub fn forward_routed(&self, pass: &Pass<'_>, seen: &Activation, h: &Activation) -> (Activation, Saved) {
        let (logits, router) = self.router.forward(pass, seen, None);
        let mut routing = route(&logits, self.choice.as_deref(), self.how);
        drop(logits);
        if let Some(factors) = &self.factors {
            routing.scale(factors.view(pass.values).vector());
        }
        let mut out = h.like();
        out.zero();
        let shared = self.shared.as_ref().map(|(mlp, to_gate)| {
            let (mut y, saved, down_extra) = Mlp::forward_grouped(pass, &[(mlp, h)]).swap_remove(0);
            let one = One { mlp: saved, down_extra };
            let gate = to_gate.as_ref().map(|to_gate| {
                let (logits, extra) = to_gate.forward(pass, h, None);
                let gate = SigmoidGate::new(&logits);
                gate.apply(&mut y);
                (gate, extra)
            });
            elementwise::add(&mut out, &y);
            Box::new((one, gate))
        });
        let mut experts: Vec<Option<One<Activation>>> = self.experts.iter().map(|_| None).collect();
        for group in routing.groups() {
            // A group of several is of a pass so small that none of its activations is shorter. Blocks share their memory.
            let pool = if group.len() > 1 { h.pool() } else { &self.pool };
            let inputs: Vec<Activation> = group.iter().map(|&expert| routing.dispatch(expert, h, pool)).collect();
            let each: Vec<_> = group.iter().map(|&expert| &self.experts[expert]).zip(&inputs).collect();
            let computed = Mlp::forward_grouped(pass, &each);
            drop(inputs);
            for (expert, (y, saved, down_extra)) in group.into_iter().zip(computed) {
                routing.combine(expert, &y, &mut out);
                experts[expert] = Some(One { mlp: saved, down_extra });
            }
        }
        (out, Saved { routing, experts, shared, router })
    }

    /// The gradient of `x`, given that of the expert's output times its factors. `factors` is called with the gradient of
    /// what `down` takes, and with that itself.
    fn one_backward(
        pass: &Pass<'_>,
        mlp: &Mlp,
        x: &Activation,
        mut one: One<Activation>,
        dy: &Activation,
        factors: impl FnOnce(&Activation, &Activation),
        grads: &mut Grads<'_>,
    ) -> Activation {
        let middle = mlp.middle(&one.mlp);
        let mut d_middle = middle.like();
        let to = Some((&mut d_middle, false));
        mlp.down.backward(pass, &Input::new(&middle), one.down_extra.as_ref(), dy, to, grads);
        factors(&d_middle, &middle);
        drop(middle);
        mlp.backward_middle(&mut one.mlp, &d_middle);
        mlp.backward_gate_up(pass, x, one.mlp, grads)
    }

    /// The gradient of `h`, given that of the output.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        saved: Saved,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let (mut dh, d_logits, router) = self.backward_experts(pass, h, saved, dy, grads);
        self.router.backward(pass, &Input::new(h), router.as_ref(), &d_logits, Some((&mut dh, true)), grads);
        dh
    }

    /// As [`Moe::backward`], of a router that looked at `seen`: the gradients of `seen` and of `h`.
    pub fn backward_routed(
        &self,
        pass: &Pass<'_>,
        (seen, h): (&Activation, &Activation),
        saved: Saved,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> (Activation, Activation) {
        let (dh, d_logits, router) = self.backward_experts(pass, h, saved, dy, grads);
        let mut d_seen = seen.like();
        self.router.backward(pass, &Input::new(seen), router.as_ref(), &d_logits, Some((&mut d_seen, false)), grads);
        (d_seen, dh)
    }

    /// The gradients of `h` by way of the experts, and of the router's output, with what the router keeps.
    fn backward_experts(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        saved: Saved,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> (Activation, Activation, Option<linear::Saved>) {
        let Saved { routing, experts, shared, router } = saved;
        let mut dh = h.like();
        dh.zero();
        let mut d_weights = routing.weight_gradients();
        for (expert, one) in experts.into_iter().enumerate() {
            let Some(one) = one else { continue };
            let dy = routing.combine_backward(expert, dy, &self.pool);
            let x = routing.dispatch(expert, h, &self.pool);
            let mlp = &self.experts[expert];
            let factors = |d_middle: &Activation, middle: &Activation| {
                routing.set_weight_gradient(expert, d_middle, middle, &mut d_weights);
                if let Some(bias) = &mlp.down.bias {
                    routing.add_bias_gradient(expert, &dy, bias.view(pass.values).vector(), &mut d_weights);
                }
            };
            let dx = Self::one_backward(pass, mlp, &x, one, &dy, factors, grads);
            routing.dispatch_backward(expert, &dx, &mut dh);
        }
        if let (Some((mlp, to_gate)), Some(shared)) = (&self.shared, shared) {
            let (one, gate) = *shared;
            let gated = gate.as_ref().map(|(gate, _)| {
                let mut dy = dy.copy();
                gate.apply(&mut dy);
                dy
            });
            let mut d_gate = None;
            let factors = |d_middle: &Activation, middle: &Activation| {
                d_gate = gate.as_ref().map(|(gate, extra)| (gate.backward(d_middle, middle, h.pool()), extra));
            };
            let dx = Self::one_backward(pass, mlp, h, one, gated.as_ref().unwrap_or(dy), factors, grads);
            elementwise::add(&mut dh, &dx);
            if let (Some((d_gate, extra)), Some(to_gate)) = (d_gate, to_gate) {
                to_gate.backward(pass, &Input::new(h), extra.as_ref(), &d_gate, Some((&mut dh, true)), grads);
            }
        }
        if let Some(factors) = &self.factors {
            let of_tokens = routing.scale_backward(&mut d_weights, h.pool());
            if let Some(range) = factors.trained() {
                elementwise::add_bias_backward(&of_tokens, grads.at(range));
            }
        }
        let d_logits = routing.backward(d_weights, pass.balance, h.pool());
        (dh, d_logits, router)
    }
}

//! A mixture of experts in place of the MLP. A router gives each token a few of the experts, whose outputs are added
//! with weights ([`tunesmith_ops::route`]). The load-balancing loss is that of Fedus et al., "Switch Transformers",
//! 2022.
use super::expert::{self, Expert};
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::pass::Pass;
use super::weight::Weight;
use std::sync::Arc;
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::elementwise;
use tunesmith_ops::route::{Router, Routing, SigmoidGate, route};

/// The experts of a block, and their router.
#[derive(Debug)]
pub struct Moe {
    /// Its weight is `[experts, hidden]`.
    pub router: Linear,
    pub experts: Vec<Expert>,
    /// The shared expert, which every token goes through; and the module, if any, whose sigmoid gates its output.
    pub shared: Option<(Expert, Option<Linear>)>,
    /// The projections to and from the latent features that the experts work on (Nemotron 3 Super); `None` where they
    /// work on all features.
    pub latent: Option<[Linear; 2]>,
    /// A factor on each expert's routing weights, `[experts]`.
    pub factors: Option<Weight>,
    /// How a token's experts are chosen.
    pub how: Router,
    /// What is added to each expert's score when experts are chosen, but not to its weight (`e_score_correction_bias`).
    /// It is never trained.
    pub choice: Option<Vec<f32>>,
    /// The pool of the experts' activations, whose lengths differ a lot. Blocks share it.
    pub pool: Arc<Pool>,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    pub routing: Routing,
    /// What each expert keeps; `None` for an expert without tokens.
    experts: Vec<Option<expert::Saved<T>>>,
    shared: Option<Box<Shared<T>>>,
    router: Option<linear::Saved<T>>,
    latent: Option<Box<Latent<T>>>,
}

/// What the shared expert keeps: of itself, its gate, and of the module that computed the gate.
type Shared<T> = (expert::Saved<T>, Option<(SigmoidGate, Option<linear::Saved<T>>)>);

/// The few features that experts see and give, and what the projections to and from them keep.
#[derive(Debug)]
struct Latent<T> {
    input: T,
    output: T,
    extra: [Option<linear::Saved<T>>; 2],
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
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
            latent: self.latent.map(|latent| {
                let Latent { input, output, extra } = *latent;
                let extra = extra.map(|extra| extra.map(|extra| extra.map(f)));
                Box::new(Latent { input: f(input), output: f(output), extra })
            }),
        }
    }
}

impl Moe {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let shared = self
            .shared
            .iter_mut()
            .flat_map(|(mlp, gate)| mlp.weights_mut().into_iter().chain(gate.iter_mut().flat_map(Linear::weights_mut)));
        let experts = self.experts.iter_mut().flat_map(Expert::weights_mut);
        let latent = self.latent.iter_mut().flatten().flat_map(Linear::weights_mut);
        self.router.weights_mut().chain(&mut self.factors).chain(experts).chain(shared).chain(latent).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let shared = self.shared.iter().flat_map(|(mlp, gate)| mlp.linears().chain(gate));
        let experts = self.experts.iter().flat_map(Expert::linears);
        std::iter::once(&self.router).chain(experts).chain(shared).chain(self.latent.iter().flatten())
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.linears().any(Linear::trains) || self.factors.as_ref().is_some_and(Weight::trains)
    }

    /// From `[rows, hidden]` to the same shape, and what backward needs.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation) -> (Activation, Saved) {
        self.forward_routed(pass, h, h)
    }

    /// As [`Moe::forward`], but the router reads `seen [rows, hidden]` instead of `h`.
    pub fn forward_routed(&self, pass: &Pass<'_>, seen: &Activation, h: &Activation) -> (Activation, Saved) {
        let (logits, router) = self.router.forward(pass, seen, None);
        let mut routing = route(&logits, self.choice.as_deref(), self.how);
        drop(logits);
        if let Some(factors) = &self.factors {
            routing.scale(factors.view(pass.values).vector());
        }
        let latent = self.latent.as_ref().map(|[narrow, _]| narrow.forward(pass, h, None));
        let input = latent.as_ref().map_or(h, |(input, _)| input);
        let mut out = input.like();
        out.zero();
        // Where experts give fewer features, what the shared one gives is added behind them.
        let mut beside = None;
        let shared = self.shared.as_ref().map(|(mlp, to_gate)| {
            let (mut y, one) = Expert::forward_grouped(pass, &[(mlp, h)]).swap_remove(0);
            let gate = to_gate.as_ref().map(|to_gate| {
                let (logits, extra) = to_gate.forward(pass, h, None);
                let gate = SigmoidGate::new(&logits);
                gate.apply(&mut y);
                (gate, extra)
            });
            match latent {
                Some(_) => beside = Some(y),
                None => elementwise::add(&mut out, &y),
            }
            Box::new((one, gate))
        });
        let mut experts: Vec<Option<expert::Saved>> = self.experts.iter().map(|_| None).collect();
        for group in routing.groups() {
            // A group of several is of a pass so small that none of its activations is shorter.
            let pool = if group.len() > 1 { h.pool() } else { &self.pool };
            let inputs: Vec<Activation> = group.iter().map(|&expert| routing.dispatch(expert, input, pool)).collect();
            let each: Vec<_> = group.iter().map(|&expert| &self.experts[expert]).zip(&inputs).collect();
            let computed = Expert::forward_grouped(pass, &each);
            drop(inputs);
            for (expert, (y, saved)) in group.into_iter().zip(computed) {
                routing.combine(expert, &y, &mut out);
                experts[expert] = Some(saved);
            }
        }
        let mut saved = Saved { routing, experts, shared, router, latent: None };
        if let (Some((input, narrow)), Some([_, widen])) = (latent, &self.latent) {
            let (y, extra) = widen.forward(pass, &out, beside.as_ref());
            saved.latent = Some(Box::new(Latent { input, output: out, extra: [narrow, extra] }));
            return (y, saved);
        }
        (out, saved)
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

    /// The gradient of `h` through the experts, the gradient of the router's output, and what the router keeps.
    fn backward_experts(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        saved: Saved,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> (Activation, Activation, Option<linear::Saved>) {
        let Saved { routing, experts, shared, router, latent } = saved;
        let mut dh = h.like();
        dh.zero();
        // The gradients of the few features that experts give and see, in the place of `dy` and `dh`.
        let mut d_latent = self.latent.as_ref().zip(latent.as_deref()).map(|([_, widen], latent)| {
            let (mut d_output, mut d_input) = (latent.output.like(), latent.input.like());
            let to = Some((&mut d_output, false));
            widen.backward(pass, &Input::new(&latent.output), latent.extra[1].as_ref(), dy, to, grads);
            d_input.zero();
            (d_output, d_input)
        });
        let input = latent.as_ref().map_or(h, |latent| &latent.input);
        let biased = self.experts.iter().any(|expert| expert.down().bias.is_some());
        let mut d_weights = routing.weight_gradients(biased);
        for (expert, saved) in experts.into_iter().enumerate() {
            let Some(saved) = saved else { continue };
            let (d_out, d_input) = match &mut d_latent {
                Some((d_output, d_input)) => (&*d_output, d_input),
                None => (dy, &mut dh),
            };
            let dy = routing.combine_backward(expert, d_out, &self.pool);
            let x = routing.dispatch(expert, input, &self.pool);
            let mlp = &self.experts[expert];
            let factors = |d_middle: &Activation, middle: &Activation| {
                routing.set_weight_gradient(expert, d_middle, middle, &mut d_weights);
                if let Some(bias) = &mlp.down().bias {
                    routing.add_bias_gradient(expert, &dy, bias.view(pass.values).vector(), &mut d_weights);
                }
            };
            let dx = mlp.backward(pass, &x, saved, &dy, factors, grads);
            routing.dispatch_backward(expert, &dx, d_input);
        }
        if let (Some([narrow, _]), Some((_, d_input)), Some(latent)) = (&self.latent, d_latent, latent) {
            let to = Some((&mut dh, true));
            narrow.backward(pass, &Input::new(h), latent.extra[0].as_ref(), &d_input, to, grads);
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
            let dx = mlp.backward(pass, h, one, gated.as_ref().unwrap_or(dy), factors, grads);
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

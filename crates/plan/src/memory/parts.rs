//! The activations of a block's parts: linear modules, MLP, and experts. Each takes them from a pool and gives them
//! back in the order of `model::{linear, mlp, moe}`.
use super::Trained;
use super::footprint::{Footprint, Input, Shape};
use super::pool::{Activation, LANES, Pool};
use std::collections::BTreeMap;
use std::sync::Arc;
use tunesmith_config::arch::{Arch, LinearSpec};

/// A linear module, with an adapter if it has one.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    shape: Shape,
    adapter: Option<Arc<dyn Footprint>>,
    /// Whether its weight, its bias or an adapter on it is trained.
    pub(super) trains: bool,
}

/// The activations that an adapter saves for its backward pass.
#[derive(Debug)]
pub(super) struct Extra(Vec<Activation>);

impl Extra {
    pub(super) fn map(self, f: &mut impl FnMut(Activation) -> Activation) -> Self {
        Self(self.0.into_iter().map(f).collect())
    }

    pub(super) fn give(self, pool: &mut Pool) {
        pool.give_all(self.0);
    }
}

impl Linear {
    /// The output, and what the adapter saves. `dropout`: the adapter applies dropout to its input.
    pub(super) fn forward(&self, pool: &mut Pool, dropout: bool) -> (Activation, Option<Extra>) {
        let Some(adapter) = &self.adapter else { return (pool.take(self.shape.out), None) };
        let (y, kept) = adapter.forward(pool, &Shape { dropout, ..self.shape });
        (y, Some(Extra(kept)))
    }

    /// Takes what the gradients need, and gives it back.
    pub(super) fn backward(&self, pool: &mut Pool, input: &mut Input, dropout: bool, want_dx: bool) {
        match &self.adapter {
            Some(adapter) => adapter.backward(pool, &Shape { dropout, ..self.shape }, input, want_dx),
            None => input.transpose(pool, &self.shape),
        }
    }
}

/// A gated MLP: gate, up and down projections.
#[derive(Debug, Clone)]
pub(super) struct Mlp {
    pub(super) gate_up: Vec<Linear>,
    pub(super) down: Linear,
    pub(super) inner: u64,
}

#[derive(Debug)]
pub(super) struct MlpSaved {
    gate: Activation,
    up: Activation,
    extra: Vec<Option<Extra>>,
}

impl MlpSaved {
    pub(super) fn map(self, f: &mut impl FnMut(Activation) -> Activation) -> Self {
        let (gate, up) = (f(self.gate), f(self.up));
        Self { gate, up, extra: self.extra.into_iter().map(|extra| extra.map(|extra| extra.map(f))).collect() }
    }

    pub(super) fn give(self, pool: &mut Pool) {
        pool.give_all([self.gate, self.up]);
        self.extra.into_iter().flatten().for_each(|extra| extra.give(pool));
    }
}

impl Mlp {
    pub(super) fn forward(&self, pool: &mut Pool, dropout: bool) -> MlpSaved {
        let (mut outs, extra): (Vec<Activation>, Vec<_>) =
            self.gate_up.iter().map(|linear| linear.forward(pool, dropout)).unzip();
        if outs.len() == 1 {
            outs.extend([pool.take(self.inner), pool.take(self.inner)]);
            let both = outs.swap_remove(0);
            pool.give(both);
        }
        let (gate, up) = (outs.remove(0), outs.remove(0));
        MlpSaved { gate, up, extra }
    }

    /// Walks back through `down` and the activation function; returns the gradient of the input of `down`, still in
    /// use.
    pub(super) fn backward_down(&self, pool: &mut Pool, middle: Option<Activation>, dropout: bool) -> Activation {
        let middle = middle.unwrap_or_else(|| pool.take(self.inner));
        let d_middle = pool.take(self.inner);
        let mut input = Input::default();
        self.down.backward(pool, &mut input, dropout, true);
        input.give(pool);
        pool.give(middle);
        d_middle
    }

    /// Walks back through gate and up; returns the gradient of the MLP's input, of `hidden` features.
    pub(super) fn backward_gate_up(&self, pool: &mut Pool, saved: MlpSaved, hidden: u64, dropout: bool) -> Activation {
        let (mut input, dh) = (Input::default(), pool.take(hidden));
        let MlpSaved { gate, up, extra } = saved;
        let acts = if let [fused] = &self.gate_up[..] {
            let both = pool.take(2 * self.inner);
            pool.give_all([gate, up]);
            fused.backward(pool, &mut input, dropout, true);
            vec![both]
        } else {
            self.gate_up.iter().for_each(|linear| linear.backward(pool, &mut input, dropout, true));
            vec![gate, up]
        };
        pool.give_all(acts);
        extra.into_iter().flatten().for_each(|extra| extra.give(pool));
        input.give(pool);
        dh
    }
}

/// A mixture of experts with its router.
#[derive(Debug, Clone)]
pub(super) struct Moe {
    pub(super) count: u64,
    pub(super) per_token: u64,
    pub(super) hidden: u64,
    pub(super) expert: Mlp,
    pub(super) shared: Option<(Mlp, Linear)>,
    router: Linear,
}

#[derive(Debug)]
pub(super) struct MoeSaved {
    experts: Vec<(MlpSaved, Option<Extra>)>,
    shared: Option<(MlpSaved, Option<Extra>, Option<Extra>)>,
    router: Option<Extra>,
}

impl MoeSaved {
    /// Applies `own` to activations of the experts' pool and `main` to the others, in the engine's order.
    pub(super) fn map(
        self,
        own: &mut impl FnMut(Activation) -> Activation,
        main: &mut impl FnMut(Activation) -> Activation,
    ) -> Self {
        let experts =
            self.experts.into_iter().map(|(saved, extra)| (saved.map(own), extra.map(|extra| extra.map(own))));
        Self {
            experts: experts.collect(),
            shared: self.shared.map(|(saved, down, gate)| {
                (saved.map(main), down.map(|extra| extra.map(main)), gate.map(|extra| extra.map(main)))
            }),
            router: self.router.map(|extra| extra.map(main)),
        }
    }

    pub(super) fn give(self, pool: &mut Pool, own: &mut Pool) {
        for (saved, extra) in self.experts {
            saved.give(own);
            if let Some(extra) = extra {
                extra.give(own);
            }
        }
        if let Some((saved, down, gate)) = self.shared {
            saved.give(pool);
            [down, gate].into_iter().flatten().for_each(|extra| extra.give(pool));
        }
        if let Some(extra) = self.router {
            extra.give(pool);
        }
    }
}

impl Moe {
    /// Tokens that an expert sees if `tokens` are spread evenly, and how many experts see any.
    pub(super) fn use_of(&self, tokens: u64) -> (u64, u64) {
        let pairs = tokens * self.per_token;
        (pairs.div_ceil(self.count).max(1), self.count.min(pairs))
    }

    /// Panels of an expert's buffers, a power of two (`ops::panel::Pool::stepped`).
    pub(super) fn panels(&self, tokens: u64) -> u64 {
        self.use_of(tokens).0.div_ceil(LANES).next_power_of_two()
    }

    fn one(mlp: &Mlp, pool: &mut Pool, dropout: bool) -> (Activation, MlpSaved, Option<Extra>) {
        let saved = mlp.forward(pool, dropout);
        let middle = pool.take(mlp.inner);
        let (y, extra) = mlp.down.forward(pool, dropout);
        pool.give(middle);
        (y, saved, extra)
    }

    pub(super) fn forward(
        &self,
        pool: &mut Pool,
        own: &mut Pool,
        tokens: u64,
        dropout: bool,
    ) -> (Activation, MoeSaved) {
        let (logits, router) = self.router.forward(pool, dropout);
        pool.give(logits);
        let out = pool.take(self.hidden);
        let shared = self.shared.as_ref().map(|(mlp, to_gate)| {
            let (y, saved, down) = Self::one(mlp, pool, dropout);
            let (gate, extra) = to_gate.forward(pool, dropout);
            pool.give_all([gate, y]);
            (saved, down, extra)
        });
        let mut experts = Vec::new();
        for _ in 0..self.use_of(tokens).1 {
            let x = own.take(self.hidden);
            let (y, saved, extra) = Self::one(&self.expert, own, dropout);
            own.give_all([x, y]);
            experts.push((saved, extra));
        }
        (out, MoeSaved { experts, shared, router })
    }

    fn one_backward(
        mlp: &Mlp,
        pool: &mut Pool,
        saved: MlpSaved,
        extra: Option<Extra>,
        hidden: u64,
        dropout: bool,
    ) -> Activation {
        let d_middle = mlp.backward_down(pool, None, dropout);
        let dh = mlp.backward_gate_up(pool, saved, hidden, dropout);
        pool.give(d_middle);
        if let Some(extra) = extra {
            extra.give(pool);
        }
        dh
    }

    pub(super) fn backward(&self, pool: &mut Pool, own: &mut Pool, saved: MoeSaved, dropout: bool) -> Activation {
        let dh = pool.take(self.hidden);
        for (saved, extra) in saved.experts {
            let (dy, x) = (own.take(self.hidden), own.take(self.hidden));
            let dx = Self::one_backward(&self.expert, own, saved, extra, self.hidden, dropout);
            own.give_all([dy, x, dx]);
        }
        if let (Some((mlp, to_gate)), Some((saved, down, gate))) = (&self.shared, saved.shared) {
            let dy = pool.take(self.hidden);
            let dx = Self::one_backward(mlp, pool, saved, down, self.hidden, dropout);
            let d_gate = pool.take(1);
            let mut input = Input::default();
            to_gate.backward(pool, &mut input, dropout, true);
            input.give(pool);
            pool.give_all([dy, dx, d_gate]);
            if let Some(extra) = gate {
                extra.give(pool);
            }
        }
        let d_logits = pool.take(self.count);
        let mut input = Input::default();
        self.router.backward(pool, &mut input, dropout, true);
        input.give(pool);
        pool.give(d_logits);
        if let Some(extra) = saved.router {
            extra.give(pool);
        }
        dh
    }
}

/// Makes a block's parts from the architecture, by the modules' names.
pub(super) struct Modules<'a> {
    arch: &'a Arch,
    trained: &'a Trained,
    linears: BTreeMap<String, LinearSpec>,
}

impl<'a> Modules<'a> {
    pub(super) fn new(arch: &'a Arch, trained: &'a Trained) -> Self {
        let linears = arch.linear_modules().into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        Self { arch, trained, linears }
    }

    fn sized(&self, module: &str, out: usize, inputs: usize, trained: bool, bias: bool) -> Linear {
        let adapter = self.trained.adapters.get(module).cloned();
        let trains = adapter.is_some() || trained || bias;
        let shape = Shape { out: out as u64, inputs: inputs as u64, trained, dropout: false };
        Linear { shape, adapter, trains }
    }

    fn trains(&self, tensor: &str) -> bool {
        self.trained.tensors.contains(tensor)
    }

    /// The linear module of that name; of no features where the architecture has none.
    pub(super) fn linear(&self, name: &str) -> Linear {
        let (out, inputs) = self.linears.get(name).map_or((0, 0), |spec| (spec.out_features, spec.in_features));
        let (weight, bias) = (self.trains(&format!("{name}.weight")), self.trains(&format!("{name}.bias")));
        self.sized(name, out, inputs, weight, bias)
    }

    /// The dense MLP below `prefix`.
    pub(super) fn mlp(&self, prefix: &str) -> Mlp {
        let linear = |name: &str| self.linear(&format!("{prefix}.{name}"));
        let gate_up =
            if self.arch.fused { vec![linear("gate_up_proj")] } else { vec![linear("gate_proj"), linear("up_proj")] };
        let down = linear("down_proj");
        Mlp { gate_up, inner: down.shape.inputs, down }
    }

    /// The experts of a block, if it has them.
    pub(super) fn moe(&self, layer: usize) -> Option<Moe> {
        let experts = self.arch.experts_of(layer)?;
        let (prefix, hidden) = (format!("model.layers.{layer}"), self.arch.hidden_size);
        let [gate, up, down] = experts.names(0).map(|name| self.trains(&format!("{prefix}.{name}")));
        let module = |name: &str| format!("{prefix}.mlp.experts.{name}");
        let gate_up = self.sized(&module("gate_up_proj"), 2 * experts.width, hidden, gate || up, false);
        let down = self.sized(&module("down_proj"), hidden, experts.width, down, false);
        let shared = experts.shared.map(|_| {
            let linear = |name: &str| self.linear(&format!("{prefix}.mlp.{name}"));
            let gate_up = vec![linear("shared_expert.gate_proj"), linear("shared_expert.up_proj")];
            let down = linear("shared_expert.down_proj");
            (Mlp { gate_up, inner: down.shape.inputs, down }, linear("shared_expert_gate"))
        });
        Some(Moe {
            count: experts.count as u64,
            per_token: experts.per_token as u64,
            hidden: hidden as u64,
            expert: Mlp { gate_up: vec![gate_up], down, inner: experts.width as u64 },
            shared,
            router: self.sized(
                &format!("{prefix}.mlp.gate"),
                experts.count,
                hidden,
                self.trains(&format!("{prefix}.{}", experts.router())),
                false,
            ),
        })
    }
}

impl Moe {
    /// Whether anything in it is trained.
    pub(super) fn trains(&self) -> bool {
        let mlp = |mlp: &Mlp| mlp.gate_up.iter().chain([&mlp.down]).any(|linear| linear.trains);
        let shared = self.shared.as_ref().is_some_and(|(shared, gate)| mlp(shared) || gate.trains);
        self.router.trains || mlp(&self.expert) || shared
    }
}

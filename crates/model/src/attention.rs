//! A block's attention: q, k and v (three modules or one), norms on q and k, rotary positions, attention, and o. An
//! attention may take its keys and values from an earlier one.
use super::grads::Grads;
use super::latent::{self, Latent};
use super::linear::{self, Input, Linear};
use super::norm::Norm;
use super::pass::{BlockRows, Pass, Rows};
use super::projections::Projections;
use super::weight::{View, Weight};
use tunesmith_device::Device;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::attention::{self, Heads, Scores};
use tunesmith_ops::elementwise;
use tunesmith_ops::feature_repeat;
use tunesmith_ops::floats::Floats;
use tunesmith_ops::gated_mlp::{self, Gate};

/// Self-attention as the part of a branch: projections to q, k and v, norms on them, rotary embedding, and the output
/// projection.
#[derive(Debug)]
pub struct Attention {
    pub qkv: Qkv,
    /// The norm on q, and over how many groups of features.
    pub q_norm: Option<(Norm, usize)>,
    /// The norm on k, and over how many groups of features.
    pub k_norm: Option<(Norm, usize)>,
    /// The norm on v, whose gain is one, and over how many groups of features.
    pub v_norm: Option<(Norm, usize)>,
    /// Whether these norms follow the rotary embedding.
    pub norms_after_rope: bool,
    /// The gate whose sigmoid multiplies the mixed values, the output of softmax times values, before `o`.
    pub gate: OutputGate,
    /// Attention sinks: a logit of each query head that joins the softmax's denominator only.
    pub sinks: Option<Weight>,
    pub o: Linear,
    pub heads: Heads,
    /// Scale, cap and window of the scores.
    pub how: Scores,
    /// Which rotary table turns q and k.
    pub rope: Option<usize>,
    /// Which rotary table turns the second half of each head of q and k; [`Attention::rope`] then turns the first half
    /// only.
    pub second_rope: Option<usize>,
    /// Its number among the model's attentions, from 0: where caches hold its keys and values.
    pub layer: usize,
    /// Whether later attentions take its keys and values.
    pub shares: bool,
}

/// Where queries, keys and values come from.
#[derive(Debug)]
pub enum Qkv {
    /// The attention's own projections.
    Own(Projections<3>),
    /// The attention's own projections to queries and keys. The keys before their norm are the values too.
    KeysAsValues(Projections<2>),
    /// A projection to queries. Keys and values are those of the earlier attention of this number.
    Shared(Projections<1>, usize),
    /// Projections from latents: multi-head latent attention.
    Latent(Box<Latent>),
}

/// Where the gate on the mixed values comes from.
#[derive(Debug)]
pub enum OutputGate {
    /// There is no gate.
    None,
    /// The projection to queries gives it too: each head has its query, then its gate.
    Beside,
    /// A projection of its own.
    Own(Projections<1>),
    /// A projection of its own to one number for each head, which gates all features of the head.
    Heads(Projections<1>),
}

impl OutputGate {
    const fn own(&self) -> Option<&Projections<1>> {
        match self {
            Self::Own(projection) | Self::Heads(projection) => Some(projection),
            Self::None | Self::Beside => None,
        }
    }
}

/// What forward keeps for backward; sums and roots of sums stay in f32.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    q: T,
    /// Keys and values, unless [`super::shared_kv::SharedKeyValues`] holds them.
    kv: Option<[T; 2]>,
    /// What the norm on q needs: its input and `rstd`.
    q_raw: Option<(T, Activation)>,
    k_raw: Option<(T, Activation)>,
    /// Input and `rstd` of the norm on v; without the input where the norm on k keeps the same one.
    v_raw: Option<(Option<T>, Activation)>,
    /// The mixed values.
    mixed: T,
    /// The gate, before its sigmoid.
    gate: Option<T>,
    /// What the gate's own projection keeps.
    gate_extra: Vec<Option<linear::Saved<T>>>,
    lse: Activation,
    extra: Vec<Option<linear::Saved<T>>>,
    latent: Option<Box<latent::Saved<T>>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let raw = |raw: Option<(T, Activation)>| raw.map(|(input, rstd)| (f(input), rstd));
        let of_modules =
            |all: Vec<Option<linear::Saved<T>>>| all.into_iter().map(|it| it.map(|it| it.map(f))).collect();
        Saved {
            q: f(self.q),
            kv: self.kv.map(|kv| kv.map(f)),
            q_raw: raw(self.q_raw),
            k_raw: raw(self.k_raw),
            v_raw: self.v_raw.map(|(input, rstd)| (input.map(f), rstd)),
            mixed: f(self.mixed),
            gate: self.gate.map(f),
            gate_extra: of_modules(self.gate_extra),
            lse: self.lse,
            extra: of_modules(self.extra),
            latent: self.latent.map(|latent| Box::new((*latent).map(f))),
        }
    }
}

/// What a norm on queries or keys needs in backward: its input and `rstd`.
type Raw = Option<(Activation, Activation)>;

/// The gradients of the projections' outputs, for [`Attention::backward_projections`].
#[derive(Debug)]
pub enum Projected {
    /// Of queries, keys and values.
    Own([Activation; 3]),
    /// Of queries, and of keys that are values too.
    QueryAndKeys([Activation; 2]),
    /// Of queries alone.
    Query(Activation),
    /// Of queries; of values and the part of keys that does not turn; and of the part of keys that turns.
    Latent([Activation; 3], Box<latent::Saved>),
}

/// The gradient of a gate that has a projection of its own, and what that needs.
#[derive(Debug)]
pub struct OfGate(Activation, Vec<Option<linear::Saved>>);

/// Applies a norm to `x` in place. Returns its input and `rstd`, which backward needs.
fn normed(norm: Option<&(Norm, usize)>, pass: &Pass<'_>, x: &mut Activation) -> Option<(Activation, Activation)> {
    let (norm, groups) = norm?;
    let (new, rstd) = norm.forward(pass, x, *groups);
    Some((std::mem::replace(x, new), rstd))
}

/// From the gradient of a norm's output to that of its input.
fn norm_backward(
    norm: Option<&(Norm, usize)>,
    pass: &Pass<'_>,
    raw: Option<&(Activation, Activation)>,
    d: Activation,
    grads: &mut Grads<'_>,
) -> Activation {
    let (Some((norm, _)), Some((raw, rstd))) = (norm, raw) else { return d };
    let mut d_raw = d.like();
    norm.backward(pass, raw, rstd, &d, Some((&mut d_raw, false)), grads);
    d_raw
}

impl Attention {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let qkv: Vec<&mut Weight> = match &mut self.qkv {
            Qkv::Own(projections) => projections.linears_mut().flat_map(Linear::weights_mut).collect(),
            Qkv::KeysAsValues(projections) => projections.linears_mut().flat_map(Linear::weights_mut).collect(),
            Qkv::Shared(projections, _) => projections.linears_mut().flat_map(Linear::weights_mut).collect(),
            Qkv::Latent(latent) => latent.weights_mut(),
        };
        let norms = self.q_norm.iter_mut().chain(&mut self.k_norm).flat_map(|(norm, _)| norm.weights_mut());
        let gate = match &mut self.gate {
            OutputGate::Own(projection) | OutputGate::Heads(projection) => Some(projection),
            OutputGate::None | OutputGate::Beside => None,
        };
        let gate = gate.into_iter().flat_map(Projections::linears_mut);
        let linears = gate.chain([&mut self.o]).flat_map(Linear::weights_mut);
        qkv.into_iter().chain(linears).chain(norms).chain(&mut self.sinks).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let qkv: Vec<&Linear> = match &self.qkv {
            Qkv::Own(projections) => projections.linears().collect(),
            Qkv::KeysAsValues(projections) => projections.linears().collect(),
            Qkv::Shared(projections, _) => projections.linears().collect(),
            Qkv::Latent(latent) => latent.linears().collect(),
        };
        qkv.into_iter().chain(self.gate.own().into_iter().flat_map(Projections::linears)).chain([&self.o])
    }

    /// Whether a norm on q or k is trained, or the sinks.
    pub fn trains_norms(&self) -> bool {
        let sinks = self.sinks.as_ref().is_some_and(Weight::trains);
        let latents = matches!(&self.qkv, Qkv::Latent(latent) if latent.trains_norms());
        sinks || latents || self.q_norm.iter().chain(&self.k_norm).any(|(norm, _)| norm.trains())
    }

    /// The number of the attention that computes its keys and values.
    pub const fn kv_layer(&self) -> usize {
        match &self.qkv {
            Qkv::Own(_) | Qkv::KeysAsValues(_) | Qkv::Latent(_) => self.layer,
            Qkv::Shared(_, layer) => *layer,
        }
    }

    /// The first feature of a query head that the rotary embedding turns.
    fn turns_from(&self) -> usize {
        match &self.qkv {
            Qkv::Latent(latent) => latent.heads.nope,
            Qkv::Own(_) | Qkv::KeysAsValues(_) | Qkv::Shared(..) => 0,
        }
    }

    /// Norm and rotary embedding of queries or keys, in their place; returns what the norm's backward needs.
    fn turn(&self, norm: Option<&(Norm, usize)>, pass: &Pass<'_>, x: &mut Activation, rows: &Rows) -> Raw {
        let before = if self.norms_after_rope { None } else { normed(norm, pass, x) };
        if let Some(rope) = self.rope {
            rows.ropes[rope].forward(x, self.heads.head_dim, self.turns_from());
        }
        if let Some(rope) = self.second_rope {
            rows.ropes[rope].forward(x, self.heads.head_dim, self.heads.head_dim / 2);
        }
        if self.norms_after_rope { normed(norm, pass, x) } else { before }
    }

    /// From the gradient of [`Attention::turn`]'s result to that of its input.
    fn turn_backward(
        &self,
        norm: Option<&(Norm, usize)>,
        pass: &Pass<'_>,
        raw: &Raw,
        mut d: Activation,
        rows: &Rows,
        grads: &mut Grads<'_>,
    ) -> Activation {
        if self.norms_after_rope {
            d = norm_backward(norm, pass, raw.as_ref(), d, grads);
        }
        if let Some(rope) = self.rope {
            rows.ropes[rope].backward(&mut d, self.heads.head_dim, self.turns_from());
        }
        if let Some(rope) = self.second_rope {
            rows.ropes[rope].backward(&mut d, self.heads.head_dim, self.heads.head_dim / 2);
        }
        if self.norms_after_rope { d } else { norm_backward(norm, pass, raw.as_ref(), d, grads) }
    }

    /// What `o` takes, if that is not [`Saved::mixed`] itself.
    fn gated(saved: &Saved) -> Option<Activation> {
        saved.gate.as_ref().map(|gate| gated_mlp::forward(Gate::Sigmoid, gate, &saved.mixed))
    }

    /// Calls `last` with `o` and its input: the mixed values, gated where there is a gate.
    pub fn output<T>(&self, saved: &Saved, last: impl FnOnce(&Linear, &Activation) -> T) -> T {
        let gated = Self::gated(saved);
        last(&self.o, gated.as_ref().unwrap_or(&saved.mixed))
    }

    /// From the gradient of `o`'s output to those of the mixed values and of their gate.
    pub fn backward_output(
        &self,
        pass: &Pass<'_>,
        saved: &mut Saved,
        extra: Option<&linear::Saved>,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> (Activation, Option<Activation>) {
        let gated = Self::gated(saved);
        let input = gated.as_ref().unwrap_or(&saved.mixed);
        let mut d_input = input.like();
        self.o.backward(pass, &Input::new(input), extra, dy, Some((&mut d_input, false)), grads);
        let Some(mut gate) = saved.gate.take() else { return (d_input, None) };
        drop(gated);
        let mut d_mixed = saved.mixed.copy();
        gated_mlp::backward(Gate::Sigmoid, &mut gate, &mut d_mixed, &d_input);
        (d_mixed, Some(gate))
    }

    /// Whether [`Attention::forward_vector`] can compute it.
    pub fn takes_vectors(&self, pass: &Pass<'_>, rows: BlockRows<'_>) -> bool {
        let Qkv::Own(projections) = &self.qkv else { return false };
        let plain = matches!(self.gate, OutputGate::None)
            && self.v_norm.is_none()
            && self.second_rope.is_none()
            && !self.shares;
        let norms = self.q_norm.iter().chain(&self.k_norm).all(|(norm, _)| norm.bias.is_none());
        plain
            && norms
            && rows.outputs.query_factors.is_none()
            && projections.takes_vectors(pass)
            && self.o.takes_vectors(pass)
    }

    /// The mixed values of one token as a vector `[query heads * v_head_dim, 1]`, for its vector `h [hidden, 1]`
    /// ([`Activation::to_vector`]). `mix` computes the attention: it gets the vectors of queries, keys and values, and
    /// the sinks.
    ///
    /// # Panics
    /// Unless [`Attention::takes_vectors`].
    pub fn forward_vector(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
        mix: impl FnOnce(&Activation, &Activation, &Activation, Option<Floats<'_>>) -> Activation,
    ) -> Activation {
        let Qkv::Own(projections) = &self.qkv else { unreachable!("it takes no vectors") };
        let sinks = self.sinks.as_ref().map(|sinks| sinks.view(pass.values));
        let [mut q, mut k, v] = projections.forward_vector(pass, h);
        for (x, norm, rows) in [(&mut q, &self.q_norm, rows.outputs), (&mut k, &self.k_norm, rows.all)] {
            let normed = |x: &mut Activation| {
                let new = norm.as_ref().and_then(|(norm, groups)| norm.of_vector(pass, x, *groups));
                if let Some(new) = new {
                    *x = new;
                }
            };
            if !self.norms_after_rope {
                normed(x);
            }
            if let Some(rope) = self.rope {
                rows.ropes[rope].turn_vector(x, self.heads.head_dim, 0);
            }
            if self.norms_after_rope {
                normed(x);
            }
        }
        mix(&q, &k, &v, sinks.as_ref().map(View::vector))
    }

    /// The latent attention, if a KV cache may hold its latents in place of keys and values. That is so on the CPU
    /// where one projection makes keys and values from the latents (with `LoRA`, but without a bias and without an
    /// adapter of another kind), and where norms on q, k or v, a window, a cap, sinks, and a gate are absent.
    pub fn cached_latents(&self, device: Device) -> Option<&Latent> {
        let Qkv::Latent(latent) = &self.qkv else { return None };
        let norms = self.q_norm.is_some() || self.k_norm.is_some() || self.v_norm.is_some();
        let scores = self.how.softcap.is_some() || self.how.window.is_some() || self.sinks.is_some();
        let gated = !matches!(self.gate, OutputGate::None);
        let plain = !(norms || scores || gated || self.shares);
        (plain && device == Device::Cpu && latent.absorbs()).then_some(latent)
    }

    /// As [`Attention::forward_by`], for [`Attention::cached_latents`]. The result is for inference only: it has
    /// nothing for a backward pass. `mix` gets the queries, turned and scaled, and what [`Latent::compress`] gives for
    /// keys and values.
    pub fn forward_latents(
        &self,
        latent: &Latent,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
        mix: impl FnOnce(&Activation, &Activation, &Activation) -> Activation,
    ) -> Saved {
        let BlockRows { all, outputs: rows, .. } = rows;
        let rope = self.rope.map(|rope| &all.ropes[rope]);
        let [mut q, normed, k_rot] = latent.compress(pass, h, rows.picked.as_deref(), rope);
        self.turn(None, pass, &mut q, rows);
        if let Some(factors) = &rows.query_factors {
            elementwise::scale_tokens(&mut q, factors);
        }
        let mixed = mix(&q, &normed, &k_rot);
        let lse = q.pool().act(0, 0);
        let (gate_extra, extra) = (Vec::new(), Vec::new());
        let (kv, gate, latent) = (None, None, None);
        Saved { q, kv, q_raw: None, k_raw: None, v_raw: None, mixed, gate, gate_extra, lse, extra, latent }
    }

    /// The mixed values `[rows, query heads * v_head_dim]` of `h [tokens, hidden]`, and what backward needs.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> Saved {
        let spans = rows.outputs.spans(self.how.window);
        self.forward_by(pass, h, rows, |q, k, v, sinks| attention::forward(q, k, v, sinks, spans, self.heads, self.how))
    }

    /// As [`Attention::forward`], with `mix` in the place of attention over the batch: from queries, keys, values and sinks to
    /// the mixed values and their log-sum-exp.
    pub fn forward_by(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
        mix: impl FnOnce(&Activation, &Activation, &Activation, Option<Floats<'_>>) -> (Activation, Activation),
    ) -> Saved {
        let BlockRows { all, outputs: rows, shared, .. } = rows;
        let picked = rows.picked.as_deref();
        let sinks = self.sinks.as_ref().map(|sinks| sinks.view(pass.values));
        let sinks = sinks.as_ref().map(View::vector);
        let mut latent = None;
        let (mut q, own, extra) = match &self.qkv {
            Qkv::Own(projections) => {
                let ([q, k, v], extra) = projections.forward(pass, h, picked);
                (q, Some([k, v]), extra)
            }
            Qkv::KeysAsValues(projections) => {
                let ([q, k], extra) = projections.forward(pass, h, picked);
                let v = k.copy();
                (q, Some([k, v]), extra)
            }
            Qkv::Shared(projections, _) => {
                let ([q], extra) = projections.forward(pass, h, picked);
                (q, None, extra)
            }
            Qkv::Latent(latents) => {
                let ([q, k, v], extra, saved) =
                    latents.forward(pass, h, picked, self.rope.map(|rope| &all.ropes[rope]));
                latent = Some(Box::new(saved));
                (q, Some([k, v]), extra)
            }
        };
        let (gate, gate_extra) = match &self.gate {
            OutputGate::None => (None, Vec::new()),
            OutputGate::Beside => {
                let [query, gate] = q.split_halves(self.heads.head_dim);
                q = query;
                (Some(gate), Vec::new())
            }
            OutputGate::Own(projection) => {
                let ([gate], extra) = projection.forward(pass, h, picked);
                (Some(gate), extra)
            }
            OutputGate::Heads(projection) => {
                let ([gate], extra) = projection.forward(pass, h, picked);
                (Some(feature_repeat::forward(&gate, self.heads.v_head_dim)), extra)
            }
        };
        let q_raw = self.turn(self.q_norm.as_ref(), pass, &mut q, rows);
        if let Some(factors) = &rows.query_factors {
            elementwise::scale_tokens(&mut q, factors);
        }
        let Some([mut k, mut v]) = own else {
            let found = shared.get(self.kv_layer());
            let (mixed, lse) = mix(&q, &found[0], &found[1], sinks);
            return Saved { q, kv: None, q_raw, k_raw: None, v_raw: None, mixed, gate, gate_extra, lse, extra, latent };
        };
        // Keys of latents have turned before they were copied to all heads.
        let k_raw = if latent.is_some() { None } else { self.turn(self.k_norm.as_ref(), pass, &mut k, all) };
        let v_raw = normed(self.v_norm.as_ref(), pass, &mut v);
        let keeps_v = !matches!(self.qkv, Qkv::KeysAsValues(_)) || self.norms_after_rope || k_raw.is_none();
        let v_raw = v_raw.map(|(input, rstd)| (keeps_v.then_some(input), rstd));
        if self.shares {
            let found = shared.put(self.layer, k, v);
            let (mixed, lse) = mix(&q, &found[0], &found[1], sinks);
            return Saved { q, kv: None, q_raw, k_raw, v_raw, mixed, gate, gate_extra, lse, extra, latent };
        }
        let (mixed, lse) = mix(&q, &k, &v, sinks);
        Saved { q, kv: Some([k, v]), q_raw, k_raw, v_raw, mixed, gate, gate_extra, lse, extra, latent }
    }

    /// From the gradients of the mixed values and of their gate to those of q, k and v as the projections gave them.
    pub fn backward_mix(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        (d_mixed, d_gate): (Activation, Option<Activation>),
        rows: BlockRows<'_>,
        grads: &mut Grads<'_>,
    ) -> (Projected, Option<OfGate>, Vec<Option<linear::Saved>>) {
        let Saved { q, kv, q_raw, k_raw, v_raw, mixed, gate_extra, lse, extra, latent, .. } = saved;
        let shared = match (&kv, self.shares) {
            (Some(_), _) => None,
            (None, true) => Some(rows.shared.take(self.layer)),
            (None, false) => Some(rows.shared.get(self.kv_layer())),
        };
        let (mut dq, mut dk, mut dv) = {
            let [k, v] = kv.as_ref().or(shared.as_deref()).expect("keys and values are with it or shared");
            let sinks = self.sinks.as_ref().map(|sinks| sinks.view(pass.values));
            let sinks = sinks.as_ref().map(View::vector);
            let forward = attention::Saved { q: &q, k, v, sinks, o: &mixed, lse: &lse };
            let d_sinks = self.sinks.as_ref().and_then(Weight::trained).map(|range| grads.at(range));
            attention::backward(forward, &d_mixed, rows.outputs.spans(self.how.window), self.heads, self.how, d_sinks)
        };
        drop((d_mixed, mixed, lse, q, kv, shared));
        if let Some(factors) = &rows.outputs.query_factors {
            elementwise::scale_tokens(&mut dq, factors);
        }
        dq = self.turn_backward(self.q_norm.as_ref(), pass, &q_raw, dq, rows.outputs, grads);
        let of_gate = match d_gate {
            Some(d_gate) if self.gate.own().is_some() => Some(OfGate(d_gate, gate_extra)),
            Some(d_gate) => {
                dq = Activation::join_halves([&dq, &d_gate], self.heads.head_dim);
                None
            }
            None => None,
        };
        if let (Qkv::Latent(latents), Some(saved)) = (&self.qkv, latent) {
            let [d_kv, d_k_rot] = latents.backward_heads([dk, dv], self.rope.map(|rope| &rows.all.ropes[rope]));
            return (Projected::Latent([dq, d_kv, d_k_rot], saved), of_gate, extra);
        }
        if let Qkv::Shared(..) = &self.qkv {
            rows.shared.add_gradients(self.kv_layer(), [dk, dv]);
            return (Projected::Query(dq), of_gate, extra);
        }
        if let Some([others_dk, others_dv]) = rows.shared.take_gradients(self.layer) {
            elementwise::add(&mut dk, &others_dk);
            elementwise::add(&mut dv, &others_dv);
        }
        if let (Some((norm, _)), Some((input, rstd))) = (&self.v_norm, &v_raw) {
            let input = input.as_ref().or(k_raw.as_ref().map(|(input, _)| input)).expect("the norm's input is kept");
            let mut d_raw = dv.like();
            norm.backward(pass, input, rstd, &dv, Some((&mut d_raw, false)), grads);
            dv = d_raw;
        }
        dk = self.turn_backward(self.k_norm.as_ref(), pass, &k_raw, dk, rows.all, grads);
        if let Qkv::KeysAsValues(_) = &self.qkv {
            elementwise::add(&mut dk, &dv);
            return (Projected::QueryAndKeys([dq, dk]), of_gate, extra);
        }
        (Projected::Own([dq, dk, dv]), of_gate, extra)
    }

    /// From the gradients of q, k, v and the gate to that of `h [tokens, hidden]`, or none if `want_dh` is false.
    ///
    /// # Panics
    /// If `projected` is of another kind than [`Attention::qkv`].
    pub fn backward_projections(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        (projected, gate): (Projected, Option<OfGate>),
        extra: &[Option<linear::Saved>],
        rows: &Rows,
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let picked = rows.picked.as_deref();
        let mut dh = match (&self.qkv, projected) {
            (Qkv::Own(projections), Projected::Own(all)) => {
                projections.backward(pass, h, extra, all, picked, want_dh, grads)
            }
            (Qkv::KeysAsValues(projections), Projected::QueryAndKeys(both)) => {
                projections.backward(pass, h, extra, both, picked, want_dh, grads)
            }
            (Qkv::Shared(projections, _), Projected::Query(query)) => {
                projections.backward(pass, h, extra, [query], picked, want_dh, grads)
            }
            (Qkv::Latent(latents), Projected::Latent(gradients, saved)) => {
                latents.backward(pass, h, (*saved, extra), gradients, picked, want_dh, grads)
            }
            _ => unreachable!("an attention's gradients are of its own projections"),
        };
        if let (Some(projection), Some(OfGate(mut d_gate, extra))) = (self.gate.own(), gate) {
            if let OutputGate::Heads(_) = self.gate {
                d_gate = feature_repeat::backward(&d_gate, self.heads.v_head_dim);
            }
            let of_gate = projection.backward(pass, h, &extra, [d_gate], picked, want_dh, grads);
            if let (Some(dh), Some(of_gate)) = (&mut dh, of_gate) {
                elementwise::add(dh, &of_gate);
            }
        }
        dh
    }
}

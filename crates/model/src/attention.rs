//! A block's attention: q, k and v (three modules or one), norms on q and k, rotary positions, attention, and o. An
//! attention may take its keys and values from an earlier one.
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::norm::Norm;
use super::pass::{BlockRows, Pass, Rows};
use super::projections::Projections;
use super::weight::{View, Weight};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::attention::{self, Heads, Scores};
use tunesmith_ops::elementwise;
use tunesmith_ops::floats::Floats;
use tunesmith_ops::gated_mlp::{self, Gate};

#[derive(Debug)]
pub struct Attention {
    pub qkv: Qkv,
    /// The norm on q, and over how many groups of features.
    pub q_norm: Option<(Norm, usize)>,
    /// The same for k.
    pub k_norm: Option<(Norm, usize)>,
    /// Whether these norms follow the rotary embedding.
    pub norms_after_rope: bool,
    /// Whether the first projection has a gate beside each head's query.
    pub gated: bool,
    /// A logit of each query head that joins the softmax's denominator only.
    pub sinks: Option<Weight>,
    pub o: Linear,
    pub heads: Heads,
    /// Scale, cap and window of the scores.
    pub how: Scores,
    /// Which rotary table turns q and k.
    pub rope: Option<usize>,
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
    /// A projection to queries, and the keys and values of the attention of that number, which comes earlier.
    Shared(Projections<1>, usize),
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
    /// The mixed values.
    mixed: T,
    /// What multiplies them, once it went through a sigmoid.
    gate: Option<T>,
    lse: Activation,
    extra: Vec<Option<linear::Saved<T>>>,
}

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let raw = |raw: Option<(T, Activation)>| raw.map(|(input, rstd)| (f(input), rstd));
        Saved {
            q: f(self.q),
            kv: self.kv.map(|kv| kv.map(f)),
            q_raw: raw(self.q_raw),
            k_raw: raw(self.k_raw),
            mixed: f(self.mixed),
            gate: self.gate.map(f),
            lse: self.lse,
            extra: self.extra.into_iter().map(|extra| extra.map(|extra| extra.map(f))).collect(),
        }
    }
}

/// What a norm on queries or keys needs in backward: its input and `rstd`.
type Raw = Option<(Activation, Activation)>;

/// The gradients of what the projections gave.
#[derive(Debug)]
pub enum Projected {
    /// Of queries, keys and values.
    Own([Activation; 3]),
    /// Of queries alone.
    Query(Activation),
}

/// `x` normed in its place; returns what backward needs.
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
        let qkv: Vec<&mut Linear> = match &mut self.qkv {
            Qkv::Own(projections) => projections.linears_mut().collect(),
            Qkv::Shared(projections, _) => projections.linears_mut().collect(),
        };
        let norms = self.q_norm.iter_mut().chain(&mut self.k_norm).flat_map(|(norm, _)| norm.weights_mut());
        let linears = qkv.into_iter().chain([&mut self.o]).flat_map(Linear::weights_mut);
        linears.chain(norms).chain(&mut self.sinks).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let qkv: Vec<&Linear> = match &self.qkv {
            Qkv::Own(projections) => projections.linears().collect(),
            Qkv::Shared(projections, _) => projections.linears().collect(),
        };
        qkv.into_iter().chain([&self.o])
    }

    /// Whether a norm on q or k is trained, or the sinks.
    pub fn trains_norms(&self) -> bool {
        let sinks = self.sinks.as_ref().is_some_and(Weight::trains);
        sinks || self.q_norm.iter().chain(&self.k_norm).any(|(norm, _)| norm.trains())
    }

    /// The number of the attention that computes its keys and values.
    pub const fn kv_layer(&self) -> usize {
        match &self.qkv {
            Qkv::Own(_) => self.layer,
            Qkv::Shared(_, layer) => *layer,
        }
    }

    /// Norm and rotary embedding of queries or keys, in their place; returns what the norm's backward needs.
    fn turn(&self, norm: Option<&(Norm, usize)>, pass: &Pass<'_>, x: &mut Activation, rows: &Rows) -> Raw {
        let before = if self.norms_after_rope { None } else { normed(norm, pass, x) };
        if let Some(rope) = self.rope {
            rows.ropes[rope].forward(x, self.heads.head_dim, 0);
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
            rows.ropes[rope].backward(&mut d, self.heads.head_dim, 0);
        }
        if self.norms_after_rope { d } else { norm_backward(norm, pass, raw.as_ref(), d, grads) }
    }

    /// What `o` takes, if that is not [`Saved::mixed`] itself.
    fn gated(saved: &Saved) -> Option<Activation> {
        saved.gate.as_ref().map(|gate| gated_mlp::forward(Gate::Sigmoid, gate, &saved.mixed))
    }

    /// The output of `o` on what was mixed, as `last` computes it.
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
        let (mut q, own, extra) = match &self.qkv {
            Qkv::Own(projections) => {
                let ([q, k, v], extra) = projections.forward(pass, h, picked);
                (q, Some([k, v]), extra)
            }
            Qkv::Shared(projections, _) => {
                let ([q], extra) = projections.forward(pass, h, picked);
                (q, None, extra)
            }
        };
        let gate = if self.gated {
            let [query, gate] = q.split_halves(self.heads.head_dim);
            q = query;
            Some(gate)
        } else {
            None
        };
        let q_raw = self.turn(self.q_norm.as_ref(), pass, &mut q, rows);
        if let Some(factors) = &rows.query_factors {
            elementwise::scale_tokens(&mut q, factors);
        }
        let Some([mut k, v]) = own else {
            let found = shared.get(self.kv_layer());
            let (mixed, lse) = mix(&q, &found[0], &found[1], sinks);
            return Saved { q, kv: None, q_raw, k_raw: None, mixed, gate, lse, extra };
        };
        let k_raw = self.turn(self.k_norm.as_ref(), pass, &mut k, all);
        if self.shares {
            let found = shared.put(self.layer, k, v);
            let (mixed, lse) = mix(&q, &found[0], &found[1], sinks);
            return Saved { q, kv: None, q_raw, k_raw, mixed, gate, lse, extra };
        }
        let (mixed, lse) = mix(&q, &k, &v, sinks);
        Saved { q, kv: Some([k, v]), q_raw, k_raw, mixed, gate, lse, extra }
    }

    /// From the gradients of the mixed values and of their gate to those of q, k and v as the projections gave them.
    pub fn backward_mix(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        (d_mixed, d_gate): (Activation, Option<Activation>),
        rows: BlockRows<'_>,
        grads: &mut Grads<'_>,
    ) -> (Projected, Vec<Option<linear::Saved>>) {
        let Saved { q, kv, q_raw, k_raw, mixed, lse, extra, .. } = saved;
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
        if let Some(d_gate) = d_gate {
            dq = Activation::join_halves([&dq, &d_gate], self.heads.head_dim);
        }
        let Qkv::Own(_) = &self.qkv else {
            rows.shared.add_gradients(self.kv_layer(), [dk, dv]);
            return (Projected::Query(dq), extra);
        };
        if let Some([others_dk, others_dv]) = rows.shared.take_gradients(self.layer) {
            elementwise::add(&mut dk, &others_dk);
            elementwise::add(&mut dv, &others_dv);
        }
        dk = self.turn_backward(self.k_norm.as_ref(), pass, &k_raw, dk, rows.all, grads);
        (Projected::Own([dq, dk, dv]), extra)
    }

    /// From the gradients of q, k and v to that of `h [tokens, hidden]`, or none if `want_dh` is false.
    ///
    /// # Panics
    /// If the gradients are another attention's.
    pub fn backward_projections(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        projected: Projected,
        extra: &[Option<linear::Saved>],
        rows: &Rows,
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let picked = rows.picked.as_deref();
        match (&self.qkv, projected) {
            (Qkv::Own(projections), Projected::Own(all)) => {
                projections.backward(pass, h, extra, all, picked, want_dh, grads)
            }
            (Qkv::Shared(projections, _), Projected::Query(query)) => {
                projections.backward(pass, h, extra, [query], picked, want_dh, grads)
            }
            _ => unreachable!("an attention's gradients are of its own projections"),
        }
    }
}

//! A block's attention: q, k and v (three modules or one), norms on q and k, rotary positions, attention, and o.
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::norm::Norm;
use super::pass::{BlockRows, Pass, Rows};
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::attention::{self, Heads, Scores};

/// The projections to queries, keys and values.
#[derive(Debug)]
pub enum Qkv {
    Apart(Box<[Linear; 3]>),
    /// One, whose outputs lie side by side. Phi-3.
    Fused(Box<Linear>),
}

#[derive(Debug)]
pub struct Attention {
    /// To queries, keys and values.
    pub qkv: Qkv,
    /// Norms on q and k, and over how many groups of features each.
    pub qk_norm: Option<[(Norm, usize); 2]>,
    pub o: Linear,
    pub heads: Heads,
    /// Scale, cap and window of the scores.
    pub how: Scores,
    /// Which rotary table turns q and k.
    pub rope: Option<usize>,
    /// Its number among the model's attentions, from 0: where caches hold its keys and values.
    pub layer: usize,
}

/// What forward keeps for backward; sums and roots of sums stay in f32.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    q: T,
    k: T,
    v: T,
    /// What a norm on q or k needs: its input and `rstd`.
    raw: Option<[(T, Activation); 2]>,
    /// The mixed values, which `o` takes.
    pub mixed: T,
    lse: Activation,
    extra: [Option<linear::Saved<T>>; 3],
}

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved {
            q: f(self.q),
            k: f(self.k),
            v: f(self.v),
            raw: self.raw.map(|raw| raw.map(|(input, rstd)| (f(input), rstd))),
            mixed: f(self.mixed),
            lse: self.lse,
            extra: self.extra.map(|extra| extra.map(|extra| extra.map(f))),
        }
    }
}

impl Attention {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let qkv = match &mut self.qkv {
            Qkv::Apart(linears) => &mut linears[..],
            Qkv::Fused(linear) => std::slice::from_mut(&mut **linear),
        };
        let norms = self.qk_norm.iter_mut().flatten().map(|(norm, _)| &mut norm.weight);
        qkv.iter_mut().chain([&mut self.o]).flat_map(Linear::weights_mut).chain(norms).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let qkv = match &self.qkv {
            Qkv::Apart(linears) => &linears[..],
            Qkv::Fused(linear) => std::slice::from_ref(&**linear),
        };
        qkv.iter().chain([&self.o])
    }

    /// Whether a norm on q or k is trained.
    pub fn trains_norms(&self) -> bool {
        self.qk_norm.iter().flatten().any(|(norm, _)| norm.weight.trained().is_some())
    }

    /// Where q, k and v lie in the fused module's output.
    fn columns(&self) -> [std::ops::Range<usize>; 3] {
        let (query, key) = (self.heads.query * self.heads.head_dim, self.heads.kv * self.heads.head_dim);
        [0..query, query..query + key, query + key..query + key + self.heads.kv * self.heads.v_head_dim]
    }

    /// The mixed values `[rows, query heads * v_head_dim]` of `h [tokens, hidden]`, which [`Saved::mixed`] holds.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> Saved {
        let spans = &rows.outputs.spans;
        self.forward_by(pass, h, rows, |q, k, v| attention::forward(q, k, v, None, spans, self.heads, self.how))
    }

    /// As [`Attention::forward`], with `mix` in the place of attention over the batch: from queries, keys and values to
    /// the mixed values and their log-sum-exp.
    pub fn forward_by(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
        mix: impl FnOnce(&Activation, &Activation, &Activation) -> (Activation, Activation),
    ) -> Saved {
        let BlockRows { all, outputs: rows } = rows;
        let ([mut q, mut k, v], extra) = match &self.qkv {
            Qkv::Apart(linears) => {
                let [to_q, to_k, to_v] = &**linears;
                let (k, k_extra) = to_k.forward(pass, h, None);
                let (v, v_extra) = to_v.forward(pass, h, None);
                let picked = rows.picked.as_ref().map(|picked| h.gather(picked));
                let (q, q_extra) = to_q.forward(pass, picked.as_ref().unwrap_or(h), None);
                ([q, k, v], [q_extra, k_extra, v_extra])
            }
            Qkv::Fused(linear) => {
                let (y, extra) = linear.forward(pass, h, None);
                let [q, k, v] = self.columns().map(|columns| y.columns(columns));
                let q = rows.picked.as_ref().map_or_else(|| None, |picked| Some(q.gather(picked))).unwrap_or(q);
                ([q, k, v], [extra, None, None])
            }
        };
        let raw = self.qk_norm.as_ref().map(|[(q_norm, q_groups), (k_norm, k_groups)]| {
            let (q_new, q_rstd) = q_norm.forward(pass, &q, *q_groups);
            let (k_new, k_rstd) = k_norm.forward(pass, &k, *k_groups);
            [(std::mem::replace(&mut q, q_new), q_rstd), (std::mem::replace(&mut k, k_new), k_rstd)]
        });
        if let Some(rope) = self.rope {
            rows.ropes[rope].forward(&mut q, self.heads.head_dim, 0);
            all.ropes[rope].forward(&mut k, self.heads.head_dim, 0);
        }
        let (mixed, lse) = mix(&q, &k, &v);
        Saved { q, k, v, raw, mixed, lse, extra }
    }

    /// From `d_mixed`, the gradient of the mixed values, to that of q, k and v as the projections gave them.
    pub fn backward_mix(
        &self,
        pass: &Pass<'_>,
        saved: Saved,
        d_mixed: Activation,
        rows: BlockRows<'_>,
        grads: &mut Grads<'_>,
    ) -> ([Activation; 3], [Option<linear::Saved>; 3]) {
        let Saved { q, k, v, raw, mixed, lse, extra } = saved;
        let forward = attention::Saved { q: &q, k: &k, v: &v, sinks: None, o: &mixed, lse: &lse };
        let (mut dq, mut dk, dv) =
            attention::backward(forward, &d_mixed, &rows.outputs.spans, self.heads, self.how, None);
        drop((d_mixed, mixed, lse, q, k, v));
        if let Some(rope) = self.rope {
            rows.outputs.ropes[rope].backward(&mut dq, self.heads.head_dim, 0);
            rows.all.ropes[rope].backward(&mut dk, self.heads.head_dim, 0);
        }
        if let (Some([(q_norm, _), (k_norm, _)]), Some([(q_raw, q_rstd), (k_raw, k_rstd)])) = (&self.qk_norm, &raw) {
            let (mut dq_raw, mut dk_raw) = (dq.like(), dk.like());
            q_norm.backward(pass, q_raw, q_rstd, &dq, Some((&mut dq_raw, false)), grads);
            k_norm.backward(pass, k_raw, k_rstd, &dk, Some((&mut dk_raw, false)), grads);
            (dq, dk) = (dq_raw, dk_raw);
        }
        ([dq, dk, dv], extra)
    }

    /// From the gradients of q, k and v to that of `h [tokens, hidden]`, or none if `want_dh` is false.
    pub fn backward_projections(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        [dq, dk, dv]: [Activation; 3],
        extra: &[Option<linear::Saved>; 3],
        rows: &Rows,
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let [q_extra, k_extra, v_extra] = extra;
        match &self.qkv {
            Qkv::Apart(linears) => {
                let [to_q, to_k, to_v] = &**linears;
                let mut dh = if let Some(picked) = &rows.picked {
                    let h = h.gather(picked);
                    let mut dh = h.like();
                    let to = want_dh.then_some((&mut dh, false));
                    to_q.backward(pass, &Input::new(&h), q_extra.as_ref(), &dq, to, grads);
                    want_dh.then(|| dh.scatter(picked, dk.tokens()))
                } else {
                    let mut dh = want_dh.then(|| h.like());
                    let to = dh.as_mut().map(|dh| (dh, false));
                    to_q.backward(pass, &Input::new(h), q_extra.as_ref(), &dq, to, grads);
                    dh
                };
                let input = Input::new(h);
                to_k.backward(pass, &input, k_extra.as_ref(), &dk, dh.as_mut().map(|dh| (dh, true)), grads);
                to_v.backward(pass, &input, v_extra.as_ref(), &dv, dh.as_mut().map(|dh| (dh, true)), grads);
                dh
            }
            Qkv::Fused(linear) => {
                let dq = match &rows.picked {
                    Some(picked) => dq.scatter(picked, dk.tokens()),
                    None => dq,
                };
                let dy = Activation::side_by_side(&[&dq, &dk, &dv]);
                drop((dq, dk, dv));
                let mut dh = want_dh.then(|| h.like());
                let to = dh.as_mut().map(|dh| (dh, false));
                linear.backward(pass, &Input::new(h), q_extra.as_ref(), &dy, to, grads);
                dh
            }
        }
    }
}

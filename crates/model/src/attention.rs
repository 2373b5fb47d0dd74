//! A block's attention: q, k and v (three modules or one), norms on q and k, rotary positions, attention, and o.
use super::grads::Grads;
use super::linear::{self, Linear};
use super::norm::Norm;
use super::pass::{BlockRows, Pass, Rows};
use super::projections::Projections;
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::attention::{self, Heads, Scores};

#[derive(Debug)]
pub struct Attention {
    /// To queries, keys and values.
    pub qkv: Projections<3>,
    /// Norms on q and k, and over how many groups of features each.
    pub qk_norm: Option<[(Norm, usize); 2]>,
    pub o: Linear,
    pub heads: Heads,
    /// Scale, cap and window of the scores.
    pub how: Scores,
    /// Which rotary table turns q and k.
    pub rope: Option<usize>,
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
    extra: Vec<Option<linear::Saved<T>>>,
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
            extra: self.extra.into_iter().map(|extra| extra.map(|extra| extra.map(f))).collect(),
        }
    }
}

impl Attention {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let norms = self.qk_norm.iter_mut().flatten().map(|(norm, _)| &mut norm.weight);
        self.qkv.linears_mut().chain([&mut self.o]).flat_map(Linear::weights_mut).chain(norms).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.qkv.linears().chain([&self.o])
    }

    /// Whether a norm on q or k is trained.
    pub fn trains_norms(&self) -> bool {
        self.qk_norm.iter().flatten().any(|(norm, _)| norm.weight.trained().is_some())
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
        let ([mut q, mut k, v], extra) = self.qkv.forward(pass, h, rows.picked.as_deref());
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
    ) -> ([Activation; 3], Vec<Option<linear::Saved>>) {
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
        projected: [Activation; 3],
        extra: &[Option<linear::Saved>],
        rows: &Rows,
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        self.qkv.backward(pass, h, extra, projected, rows.picked.as_deref(), want_dh, grads)
    }
}

//! One decoder block: `x2 = x + O(attention(norm(x)))`, `y = x2 + D(silu(G h) * U h)` with `h = norm(x2)`.
//! Llama, Qwen2 (biases on q, k, v) and Qwen3 (norms on each head of q and k) are this block.
use super::linear::{Input, Linear, Low};
use super::pass::{Pass, Rows};
use super::weight::Weight;
use crate::ops::attention::{self, Heads};
use crate::ops::panel::Act;
use crate::ops::{gated_mlp, norm};

/// An `RMSNorm`'s weight and epsilon.
#[derive(Debug)]
pub struct Norm {
    /// `[features]`, or `[head_dim]` for the norms on heads.
    pub weight: Weight,
    /// Added to the mean square.
    pub eps: f32,
}

impl Norm {
    /// `(h, rstd)` of `x [tokens, groups * features]`.
    pub fn forward(&self, pass: &Pass<'_>, x: &Act, groups: usize) -> (Act, Act) {
        let rstd = norm::stats(x, groups, self.eps);
        (self.again(pass, x, &rstd), rstd)
    }

    /// `h` from a kept `rstd`.
    pub fn again(&self, pass: &Pass<'_>, x: &Act, rstd: &Act) -> Act {
        norm::apply(x, rstd, &self.weight.view(pass.values))
    }

    /// Adds the weight's gradient to `grads` if it is trained, and the input's to `dx` (replacing it unless `add`).
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        (x, rstd): (&Act, &Act),
        dh: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut [f32],
    ) {
        if let Some(range) = self.weight.trained() {
            norm::backward_weight(x, rstd, dh, &mut grads[range.clone()]);
        }
        if let Some((dx, add)) = dx {
            norm::backward(x, rstd, &self.weight.view(pass.values), dh, dx, add);
        }
    }
}

/// The block's weights.
#[derive(Debug)]
pub struct Block {
    /// Before attention.
    pub input_norm: Norm,
    /// Query projection.
    pub q: Linear,
    /// Key projection.
    pub k: Linear,
    /// Value projection.
    pub v: Linear,
    /// Output projection.
    pub o: Linear,
    /// Norms on each head of q and k.
    pub qk_norm: Option<(Norm, Norm)>,
    /// Before the MLP.
    pub post_norm: Norm,
    /// Gate projection.
    pub gate: Linear,
    /// Up projection.
    pub up: Linear,
    /// Down projection.
    pub down: Linear,
    /// Head counts and width.
    pub heads: Heads,
}

/// What a head norm needs in backward: its input and `rstd`.
type Raw = (Act, Act);

/// What forward keeps for backward, beside the block's input.
#[derive(Debug)]
pub struct Saved {
    rstd1: Act,
    q: Act,
    k: Act,
    v: Act,
    raw: Option<(Raw, Raw)>,
    o: Act,
    lse: Act,
    x2: Act,
    rstd2: Act,
    gate: Act,
    up: Act,
    low: [Low; 7],
}

impl Block {
    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let norm = |norm: &Norm| norm.weight.trained().is_some();
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down].iter().any(|linear| linear.trains())
            || norm(&self.input_norm)
            || norm(&self.post_norm)
            || self.qk_norm.as_ref().is_some_and(|(q, k)| norm(q) || norm(k))
    }

    fn scale(&self) -> f32 {
        1.0 / (self.heads.dim as f32).sqrt()
    }

    /// `[tokens, hidden]` to `[rows, hidden]`, where the rows are all tokens unless `rows` picks some.
    /// `all` holds the rotary table of every token.
    pub fn forward(&self, pass: &Pass<'_>, x: &Act, all: &Rows, rows: &Rows) -> (Act, Saved) {
        // Attention.
        let (h, rstd1) = self.input_norm.forward(pass, x, 1);
        let (mut k, k_low) = self.k.forward(pass, &h, None);
        let (v, v_low) = self.v.forward(pass, &h, None);
        let picked = rows.picked.as_ref().map(|picked| (h.gather(picked), x.gather(picked)));
        let (h, x) = picked.as_ref().map_or((&h, x), |(h, x)| (h, x));
        let (mut q, q_low) = self.q.forward(pass, h, None);
        let raw = self.qk_norm.as_ref().map(|(q_norm, k_norm)| {
            let (q_new, q_rstd) = q_norm.forward(pass, &q, self.heads.query);
            let (k_new, k_rstd) = k_norm.forward(pass, &k, self.heads.kv);
            ((std::mem::replace(&mut q, q_new), q_rstd), (std::mem::replace(&mut k, k_new), k_rstd))
        });
        rows.rope.forward(&mut q);
        all.rope.forward(&mut k);
        let (o, lse) = attention::forward(&q, &k, &v, &rows.spans, self.heads, self.scale());
        let (x2, o_low) = self.o.forward(pass, &o, Some(x));
        // MLP.
        let (h, rstd2) = self.post_norm.forward(pass, &x2, 1);
        let (gate, gate_low) = self.gate.forward(pass, &h, None);
        let (up, up_low) = self.up.forward(pass, &h, None);
        drop(h);
        let (y, down_low) = self.down.forward(pass, &gated_mlp::forward(&gate, &up), Some(&x2));
        let low = [q_low, k_low, v_low, o_low, gate_low, up_low, down_low];
        (y, Saved { rstd1, q, k, v, raw, o, lse, x2, rstd2, gate, up, low })
    }

    /// From `dy [rows, hidden]` to the gradient of `x [tokens, hidden]`, or none if `want_dx` is false. Adds to `grads`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Act,
        saved: Saved,
        dy: Act,
        (all, rows): (&Rows, &Rows),
        want_dx: bool,
        grads: &mut [f32],
    ) -> Option<Act> {
        let Saved { rstd1, q, k, v, raw, o, lse, x2, rstd2, mut gate, mut up, low } = saved;
        let [q_low, k_low, v_low, o_low, gate_low, up_low, down_low] = &low;
        let like = |other: &Act| other.pool().act(other.tokens(), other.features());
        // MLP.
        let mut dx2 = dy;
        {
            let act = gated_mlp::forward(&gate, &up);
            let mut d_act = like(&act);
            self.down.backward(pass, &Input::new(&act), down_low.as_ref(), &dx2, Some((&mut d_act, false)), grads);
            drop(act);
            gated_mlp::backward(&mut gate, &mut up, &d_act);
        }
        {
            let h = self.post_norm.again(pass, &x2, &rstd2);
            let (input, mut dh) = (Input::new(&h), like(&h));
            self.gate.backward(pass, &input, gate_low.as_ref(), &gate, Some((&mut dh, false)), grads);
            self.up.backward(pass, &input, up_low.as_ref(), &up, Some((&mut dh, true)), grads);
            drop((gate, up));
            self.post_norm.backward(pass, (&x2, &rstd2), &dh, Some((&mut dx2, true)), grads);
        }
        // Attention.
        let mut d_o = like(&o);
        self.o.backward(pass, &Input::new(&o), o_low.as_ref(), &dx2, Some((&mut d_o, false)), grads);
        let (mut dq, mut dk, dv) =
            attention::backward((&q, &k, &v), (&o, &lse), &d_o, &rows.spans, self.heads, self.scale());
        drop((d_o, o, q, k, v));
        rows.rope.backward(&mut dq);
        all.rope.backward(&mut dk);
        if let (Some((q_norm, k_norm)), Some(((q_raw, q_rstd), (k_raw, k_rstd)))) = (&self.qk_norm, &raw) {
            let (mut dq_raw, mut dk_raw) = (like(&dq), like(&dk));
            q_norm.backward(pass, (q_raw, q_rstd), &dq, Some((&mut dq_raw, false)), grads);
            k_norm.backward(pass, (k_raw, k_rstd), &dk, Some((&mut dk_raw, false)), grads);
            (dq, dk) = (dq_raw, dk_raw);
        }
        let want_dh = want_dx || self.input_norm.weight.trained().is_some();
        let h = self.input_norm.again(pass, x, &rstd1);
        let mut dh = if let Some(picked) = &rows.picked {
            let h = h.gather(picked);
            let mut dh = like(&h);
            self.q.backward(pass, &Input::new(&h), q_low.as_ref(), &dq, want_dh.then_some((&mut dh, false)), grads);
            want_dh.then(|| dh.scatter(picked, x.tokens()))
        } else {
            let mut dh = want_dh.then(|| like(&h));
            let to = dh.as_mut().map(|dh| (dh, false));
            self.q.backward(pass, &Input::new(&h), q_low.as_ref(), &dq, to, grads);
            dh
        };
        let input = Input::new(&h);
        self.k.backward(pass, &input, k_low.as_ref(), &dk, dh.as_mut().map(|dh| (dh, true)), grads);
        self.v.backward(pass, &input, v_low.as_ref(), &dv, dh.as_mut().map(|dh| (dh, true)), grads);
        let dh = dh?;
        let mut dx = want_dx.then(|| match &rows.picked {
            Some(picked) => dx2.scatter(picked, x.tokens()),
            None => dx2,
        });
        self.input_norm.backward(pass, (x, &rstd1), &dh, dx.as_mut().map(|dx| (dx, true)), grads);
        dx
    }
}

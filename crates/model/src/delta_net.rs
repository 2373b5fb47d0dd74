//! Linear attention by the gated delta rule (Qwen3.5, Qwen3-Next, OLMo Hybrid): a convolution with SiLU over q, k and v, the rule, a
//! norm on each head, a gate, and an output projection.
use super::grads::Grads;
use super::linear::{self, Linear};
use super::norm::Norm;
use super::pass::Pass;
use super::projections::{Outputs, Projections};
use super::weight::Weight;
use std::ops::Range;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::causal_conv1d::{self, Conv};
use tunesmith_ops::elementwise;
use tunesmith_ops::gated_delta_rule::{self, Gradients, Heads, Inputs};
use tunesmith_ops::gated_mlp::{self, Gate};

/// The gated delta rule as the part of a branch.
#[derive(Debug)]
pub struct DeltaNet {
    pub in_proj: InProj,
    /// The weight of the convolution, `[features of q, k and v, 1, kernel]`.
    pub conv: Weight,
    /// `A_log`, `[value heads]`: the logarithm of the decay is `-exp(A_log) softplus(a + dt_bias)`.
    pub a_log: Weight,
    /// `dt_bias`, `[value heads]`: added to `a` before its softplus.
    pub dt_bias: Weight,
    /// The norm on each head of the rule's output.
    pub norm: Norm,
    pub out_proj: Linear,
    pub heads: Heads,
    /// The largest beta of the rule: 1, or 2 in OLMo Hybrid.
    pub beta_max: f32,
    pub kernel: usize,
    /// Its number among the model's recurrent mixers, from 0: where caches hold its state.
    pub number: usize,
}

/// The projections of the mixer's input, as the families arrange them.
#[derive(Debug)]
pub enum InProj {
    /// One module to q, k and v side by side, and one each to z, b and a (Qwen3.5).
    Joined(Projections<4>),
    /// A module each to q, k, v, z, b and a (OLMo Hybrid).
    Apart(Projections<6>),
    /// One module to q, k, v and z, and one to b and a, with a group of rows for each head of keys (Qwen3-Next).
    Grouped(Projections<2>),
}

/// Widths in a group of the rows of `in_proj_qkvz`, and of `in_proj_ba`.
fn groups(heads: Heads) -> ([usize; 4], usize) {
    let values = heads.value / heads.key;
    let value = values * heads.value_dim;
    ([heads.key_dim, heads.key_dim, value, value], values)
}

impl InProj {
    fn linears(&self) -> Box<dyn Iterator<Item = &Linear> + '_> {
        match self {
            Self::Joined(projections) => Box::new(projections.linears()),
            Self::Apart(projections) => Box::new(projections.linears()),
            Self::Grouped(projections) => Box::new(projections.linears()),
        }
    }

    fn linears_mut(&mut self) -> Box<dyn Iterator<Item = &mut Linear> + '_> {
        match self {
            Self::Joined(projections) => Box::new(projections.linears_mut()),
            Self::Apart(projections) => Box::new(projections.linears_mut()),
            Self::Grouped(projections) => Box::new(projections.linears_mut()),
        }
    }

    /// q, k and v side by side, z, b and a of `h`, and what the modules need in backward.
    fn forward(&self, pass: &Pass<'_>, h: &Activation, heads: Heads) -> Outputs<4> {
        match self {
            Self::Joined(projections) => projections.forward(pass, h, None),
            Self::Apart(projections) => {
                let ([q, k, v, z, b, a], extra) = projections.forward(pass, h, None);
                ([Activation::side_by_side(&[&q, &k, &v]), z, b, a], extra)
            }
            Self::Grouped(projections) => {
                let ([qkvz, ba], extra) = projections.forward(pass, h, None);
                let (widths, values) = groups(heads);
                let [q, k, v, z] = qkvz.split_parts(widths);
                let [b, a] = ba.split_halves(values);
                ([Activation::side_by_side(&[&q, &k, &v]), z, b, a], extra)
            }
        }
    }

    /// From the gradients of [`InProj::forward`]'s outputs to that of `h`, or none if `want_dh` is false.
    fn backward(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        extra: &[Option<linear::Saved>],
        d: [Activation; 4],
        heads: Heads,
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        match self {
            Self::Joined(projections) => projections.backward(pass, h, extra, d, None, want_dh, grads),
            Self::Apart(projections) => {
                let [qkv, z, b, a] = d;
                let keys = heads.keys();
                let [q, k, v] = [0..keys, keys..2 * keys, 2 * keys..qkv.features()].map(|part| qkv.columns(part));
                drop(qkv);
                projections.backward(pass, h, extra, [q, k, v, z, b, a], None, want_dh, grads)
            }
            Self::Grouped(projections) => {
                let [qkv, z, b, a] = d;
                let (widths, values) = groups(heads);
                let keys = heads.key * heads.key_dim;
                let [q, k, v] = [0..keys, keys..2 * keys, 2 * keys..qkv.features()].map(|part| qkv.columns(part));
                let d = [Activation::join_parts([&q, &k, &v, &z], widths), Activation::join_halves([&b, &a], values)];
                drop((q, k, v, qkv, z, b, a));
                projections.backward(pass, h, extra, d, None, want_dh, grads)
            }
        }
    }
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// q, k and v before the convolution, and z, b and a.
    projected: [T; 4],
    /// The rule's output.
    o: T,
    /// The `rstd` of the norm on it.
    rstd: Activation,
    extra: Vec<Option<linear::Saved<T>>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let extra = self.extra.into_iter().map(|extra| extra.map(|extra| extra.map(f))).collect();
        Saved { projected: self.projected.map(f), o: f(self.o), rstd: self.rstd, extra }
    }
}

impl DeltaNet {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let linears = self.in_proj.linears_mut().chain([&mut self.out_proj]).flat_map(Linear::weights_mut);
        let own = [&mut self.conv, &mut self.a_log, &mut self.dt_bias];
        linears.chain(own).chain(self.norm.weights_mut()).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.in_proj.linears().chain([&self.out_proj])
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let own = [&self.conv, &self.a_log, &self.dt_bias].into_iter().any(Weight::trains);
        own || self.norm.trains() || self.linears().any(Linear::trains)
    }

    /// Computes the rule over the sequences of a batch, and keeps what backward needs.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation, sequences: &[Range<usize>]) -> Saved {
        let convolve = |conv: Conv<'_>, x: &Activation| causal_conv1d::forward(conv, x, sequences);
        self.forward_by(pass, h, convolve, |inputs| gated_delta_rule::forward(inputs, self.heads, sequences, None))
    }

    /// As [`DeltaNet::forward`], with `convolve` and `rule` in place of those over a batch: decoding continues from
    /// states.
    pub fn forward_by(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        convolve: impl FnOnce(Conv<'_>, &Activation) -> Activation,
        rule: impl FnOnce(Inputs<'_>) -> Activation,
    ) -> Saved {
        let (projected, extra) = self.in_proj.forward(pass, h, self.heads);
        let [raw, _, b, a] = &projected;
        let conv = self.conv.view(pass.values);
        let qkv = convolve(Conv { weight: conv.vector(), bias: None, silu: true }, raw);
        let (a_log, dt_bias) = (self.a_log.view(pass.values), self.dt_bias.view(pass.values));
        let o =
            rule(Inputs { qkv: &qkv, b, a, a_log: a_log.vector(), dt_bias: dt_bias.vector(), beta_max: self.beta_max });
        drop(qkv);
        let rstd = self.norm.stats(&o, self.heads.value);
        Saved { projected, o, rstd, extra }
    }

    /// The input of `out_proj`: SiLU of z times the normed output of the rule.
    pub fn middle(&self, pass: &Pass<'_>, saved: &Saved) -> Activation {
        let normed = self.norm.again(pass, &saved.o, &saved.rstd);
        gated_mlp::forward(Gate::Silu, &saved.projected[1], &normed)
    }

    /// From `d_middle`, the gradient of what `out_proj` takes, to that of `h`, or none if `want_dh` is false.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        saved: Saved,
        d_middle: &Activation,
        sequences: &[Range<usize>],
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let Saved { projected: [raw, mut z, b, a], o, rstd, extra } = saved;
        let mut normed = self.norm.again(pass, &o, &rstd);
        gated_mlp::backward(Gate::Silu, &mut z, &mut normed, d_middle);
        let mut d_o = o.like();
        self.norm.backward(pass, &o, &rstd, &normed, Some((&mut d_o, false)), grads);
        drop((normed, o, rstd));
        let conv = self.conv.view(pass.values);
        let conv = Conv { weight: conv.vector(), bias: None, silu: true };
        let qkv = causal_conv1d::forward(conv, &raw, sequences);
        let (a_log, dt_bias) = (self.a_log.view(pass.values), self.dt_bias.view(pass.values));
        let (a_log, dt_bias, beta_max) = (a_log.vector(), dt_bias.vector(), self.beta_max);
        let inputs = Inputs { qkv: &qkv, b: &b, a: &a, a_log, dt_bias, beta_max };
        let d = gated_delta_rule::backward(inputs, self.heads, sequences, &d_o);
        drop((qkv, d_o, b, a));
        let Gradients { qkv: d_qkv, b: d_b, a: d_a, a_log: d_a_log } = d;
        for (weight, by_token) in [(&self.a_log, &d_a_log), (&self.dt_bias, &d_a)] {
            if let Some(range) = weight.trained() {
                elementwise::add_bias_backward(by_token, grads.at(range));
            }
        }
        let d_weight = self.conv.trained().map(|range| grads.at(range));
        let (d_raw, dz) = causal_conv1d::backward(conv, &raw, d_qkv, sequences, d_weight);
        drop((raw, dz));
        self.in_proj.backward(pass, h, &extra, [d_raw, z, d_b, d_a], self.heads, want_dh, grads)
    }
}

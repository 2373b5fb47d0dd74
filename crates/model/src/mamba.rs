//! Mamba 2 as a mixer (Granite 4, Nemotron-H): a convolution with SiLU over x, B and C, a selective state space, a gate and then a
//! norm on its output, and an output projection.
use super::grads::Grads;
use super::linear::{self, Linear};
use super::norm::Norm;
use super::pass::Pass;
use super::projections::Projections;
use super::weight::{View, Weight};
use std::ops::Range;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::causal_conv1d::{self, Conv};
use tunesmith_ops::elementwise;
use tunesmith_ops::gated_mlp::{self, Gate};
use tunesmith_ops::mamba2::{self, Gradients, Heads, Inputs};

/// Mamba 2 as the part of a branch.
#[derive(Debug)]
pub struct Mamba {
    /// `in_proj`: to z, to x, B and C side by side, and to dt.
    pub in_proj: Projections<3>,
    /// The weight of the convolution, `[features of x, B and C, 1, kernel]`.
    pub conv: Weight,
    /// The convolution's bias, `[features of x, B and C]`.
    pub conv_bias: Option<Weight>,
    /// `A_log`, `[heads]`: over a time step `t` a state is multiplied by `exp(-exp(A_log) t)`.
    pub a_log: Weight,
    /// `D`, `[heads]`: the output has `D x` beside what comes from the state.
    pub d: Weight,
    /// `dt_bias`, `[heads]`: added to dt before its softplus.
    pub dt_bias: Weight,
    /// The norm on the gated output, over a group of heads at a time, with a weight for each feature.
    pub norm: Norm,
    pub out_proj: Linear,
    pub heads: Heads,
    /// The smallest and the largest time step.
    pub limits: [f32; 2],
    pub kernel: usize,
    /// Its number among the model's recurrent mixers, from 0: where caches hold its state.
    pub number: usize,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// z; x, B and C before the convolution; and dt.
    projected: [T; 3],
    /// The state space's output.
    y: T,
    /// The `rstd` of the norm on the gated output.
    rstd: Activation,
    extra: Vec<Option<linear::Saved<T>>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let extra = self.extra.into_iter().map(|extra| extra.map(|extra| extra.map(f))).collect();
        Saved { projected: self.projected.map(f), y: f(self.y), rstd: self.rstd, extra }
    }
}

/// The values of the parameters that belong to heads and channels.
struct Views<'a> {
    conv: View<'a>,
    conv_bias: Option<View<'a>>,
    a_log: View<'a>,
    d: View<'a>,
    dt_bias: View<'a>,
    limits: [f32; 2],
}

impl Views<'_> {
    fn conv(&self) -> Conv<'_> {
        Conv { weight: self.conv.vector(), bias: self.conv_bias.as_ref().map(View::vector), silu: true }
    }

    fn inputs<'a>(&'a self, xbc: &'a Activation, dt: &'a Activation) -> Inputs<'a> {
        let [a_log, d, dt_bias] = [&self.a_log, &self.d, &self.dt_bias].map(View::vector);
        Inputs { xbc, dt, a_log, d, dt_bias, limits: self.limits }
    }
}

impl Mamba {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let linears = self.in_proj.linears_mut().chain([&mut self.out_proj]).flat_map(Linear::weights_mut);
        let own = [&mut self.conv, &mut self.a_log, &mut self.d, &mut self.dt_bias];
        linears.chain(own).chain(&mut self.conv_bias).chain(self.norm.weights_mut()).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.in_proj.linears().chain([&self.out_proj])
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let own = [&self.conv, &self.a_log, &self.d, &self.dt_bias].into_iter().chain(&self.conv_bias);
        own.into_iter().any(Weight::trains) || self.norm.trains() || self.linears().any(Linear::trains)
    }

    fn views<'a>(&'a self, pass: &Pass<'a>) -> Views<'a> {
        let view = |weight: &'a Weight| weight.view(pass.values);
        Views {
            conv: view(&self.conv),
            conv_bias: self.conv_bias.as_ref().map(view),
            a_log: view(&self.a_log),
            d: view(&self.d),
            dt_bias: view(&self.dt_bias),
            limits: self.limits,
        }
    }

    /// Computes the state space over the sequences of a batch, and keeps what backward needs.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation, sequences: &[Range<usize>]) -> Saved {
        let convolve = |conv: Conv<'_>, x: &Activation| causal_conv1d::forward(conv, x, sequences);
        self.forward_by(pass, h, convolve, |inputs| mamba2::forward(inputs, self.heads, sequences, None))
    }

    /// As [`Mamba::forward`], with `convolve` and `scan` in place of those over a batch: decoding continues from
    /// states.
    pub fn forward_by(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        convolve: impl FnOnce(Conv<'_>, &Activation) -> Activation,
        scan: impl FnOnce(Inputs<'_>) -> Activation,
    ) -> Saved {
        let (projected, extra) = self.in_proj.forward(pass, h, None);
        let [z, raw, dt] = &projected;
        let views = self.views(pass);
        let xbc = convolve(views.conv(), raw);
        let y = scan(views.inputs(&xbc, dt));
        drop(xbc);
        let rstd = self.norm.stats(&gated_mlp::forward(Gate::Silu, z, &y), self.heads.groups);
        Saved { projected, y, rstd, extra }
    }

    /// The input of `out_proj`: the norm of SiLU of z times the state space's output.
    pub fn middle(&self, pass: &Pass<'_>, saved: &Saved) -> Activation {
        let gated = gated_mlp::forward(Gate::Silu, &saved.projected[0], &saved.y);
        self.norm.again(pass, &gated, &saved.rstd)
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
        let Saved { projected: [mut z, raw, dt], mut y, rstd, extra } = saved;
        let gated = gated_mlp::forward(Gate::Silu, &z, &y);
        let mut d_gated = gated.like();
        self.norm.backward(pass, &gated, &rstd, d_middle, Some((&mut d_gated, false)), grads);
        drop((gated, rstd));
        gated_mlp::backward(Gate::Silu, &mut z, &mut y, &d_gated);
        drop(d_gated);
        let views = self.views(pass);
        let xbc = causal_conv1d::forward(views.conv(), &raw, sequences);
        let d = mamba2::backward(views.inputs(&xbc, &dt), self.heads, sequences, &y);
        drop((xbc, y, dt));
        let Gradients { xbc: d_xbc, dt: d_dt, a_log: d_a_log, d: d_d } = d;
        for (weight, by_token) in [(&self.a_log, &d_a_log), (&self.d, &d_d), (&self.dt_bias, &d_dt)] {
            if let Some(range) = weight.trained() {
                elementwise::add_bias_backward(by_token, grads.at(range));
            }
        }
        drop((d_a_log, d_d));
        let d_weight = self.conv.trained().map(|range| grads.at(range));
        let (d_raw, dz) = causal_conv1d::backward(views.conv(), &raw, d_xbc, sequences, d_weight);
        if let Some(range) = self.conv_bias.as_ref().and_then(Weight::trained) {
            elementwise::add_bias_backward(&dz, grads.at(range));
        }
        drop((raw, dz));
        self.in_proj.backward(pass, h, &extra, [z, d_raw, d_dt], None, want_dh, grads)
    }
}

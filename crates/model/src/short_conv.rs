//! A convolution over a few tokens between two gates: `out(C * conv(B * x))`, `[B, C, x] = in_proj(h)`. LFM2.
use super::grads::Grads;
use super::linear::{self, Linear};
use super::pass::Pass;
use super::projections::Projections;
use super::weight::{View, Weight};
use std::ops::Range;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::causal_conv1d::{self, Conv};
use tunesmith_ops::elementwise;
use tunesmith_ops::gated_mlp::{self, Gate};

/// A gated short convolution as the part of a branch.
#[derive(Debug)]
pub struct ShortConv {
    pub in_proj: Projections<3>,
    /// The convolution's weight, `[hidden, 1, kernel]`.
    pub weight: Weight,
    /// The convolution's bias, `[hidden]`.
    pub bias: Option<Weight>,
    pub out_proj: Linear,
    pub kernel: usize,
    /// Its number among the model's recurrent mixers, from 0: where caches hold its last tokens.
    pub number: usize,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// B, C and x.
    gates: [T; 3],
    extra: Vec<Option<linear::Saved<T>>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let extra = self.extra.into_iter().map(|extra| extra.map(|extra| extra.map(f))).collect();
        Saved { gates: self.gates.map(f), extra }
    }
}

impl ShortConv {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let linears = self.in_proj.linears_mut().chain([&mut self.out_proj]).flat_map(Linear::weights_mut);
        linears.chain([&mut self.weight]).chain(&mut self.bias).collect()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.in_proj.linears().chain([&self.out_proj])
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let own = std::iter::once(&self.weight).chain(&self.bias).any(Weight::trains);
        own || self.linears().any(Linear::trains)
    }

    fn views<'a>(&'a self, pass: &Pass<'a>) -> (View<'a>, Option<View<'a>>) {
        (self.weight.view(pass.values), self.bias.as_ref().map(|bias| bias.view(pass.values)))
    }

    /// Computes the convolution over the sequences of a batch. Returns what backward needs, and the input of
    /// `out_proj`.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation, sequences: &[Range<usize>]) -> (Saved, Activation) {
        self.forward_by(pass, h, |conv, x| causal_conv1d::forward(conv, x, sequences))
    }

    /// As [`ShortConv::forward`], with `convolve` in place of that over a batch: decoding continues from the last
    /// inputs.
    pub fn forward_by(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        convolve: impl FnOnce(Conv<'_>, &Activation) -> Activation,
    ) -> (Saved, Activation) {
        let (gates, extra) = self.in_proj.forward(pass, h, None);
        let saved = Saved { gates, extra };
        let middle = self.middle_by(pass, &saved, convolve);
        (saved, middle)
    }

    /// The input of `out_proj`, over the sequences of a batch.
    pub fn middle(&self, pass: &Pass<'_>, saved: &Saved, sequences: &[Range<usize>]) -> Activation {
        self.middle_by(pass, saved, |conv, x| causal_conv1d::forward(conv, x, sequences))
    }

    fn middle_by(
        &self,
        pass: &Pass<'_>,
        saved: &Saved,
        convolve: impl FnOnce(Conv<'_>, &Activation) -> Activation,
    ) -> Activation {
        let [b, c, x] = &saved.gates;
        let (weight, bias) = self.views(pass);
        let conv = Conv { weight: weight.vector(), bias: bias.as_ref().map(View::vector), silu: false };
        let convolved = convolve(conv, &gated_mlp::forward(Gate::Identity, b, x));
        gated_mlp::forward(Gate::Identity, c, &convolved)
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
        let Saved { gates: [mut b, mut c, mut x], extra } = saved;
        let (weight, bias) = self.views(pass);
        let conv = Conv { weight: weight.vector(), bias: bias.as_ref().map(View::vector), silu: false };
        let gated = gated_mlp::forward(Gate::Identity, &b, &x);
        let mut convolved = causal_conv1d::forward(conv, &gated, sequences);
        gated_mlp::backward(Gate::Identity, &mut c, &mut convolved, d_middle);
        let d_weight = self.weight.trained().map(|range| grads.at(range));
        let (d_gated, dz) = causal_conv1d::backward(conv, &gated, convolved, sequences, d_weight);
        if let Some(range) = self.bias.as_ref().and_then(Weight::trained) {
            elementwise::add_bias_backward(&dz, grads.at(range));
        }
        drop((gated, dz));
        gated_mlp::backward(Gate::Identity, &mut b, &mut x, &d_gated);
        drop(d_gated);
        self.in_proj.backward(pass, h, &extra, [b, c, x], None, want_dh, grads)
    }
}

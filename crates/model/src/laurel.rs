//! The learned augmented residual (Laurel) beside an attention: a low-rank product of what the attention takes,
//! `h + norm(R L h)`. Menghani et al., "LAUREL: Learned Augmented Residual Layer", 2024,
//! <https://arxiv.org/abs/2411.07501>; Gemma 3n. The stream after the attention and this branch are added and divided
//! by the square root of 2.
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::norm::Norm;
use super::pass::Pass;
use super::weight::Weight;
use std::f32::consts::FRAC_1_SQRT_2;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;

/// The low-rank branch beside an attention.
#[derive(Debug)]
pub struct Laurel {
    /// From `hidden` to the rank.
    pub left: Linear,
    /// From the rank back to `hidden`.
    pub right: Linear,
    /// The norm on what `right` gives.
    pub norm: Norm,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// What `left` gives, and what it keeps.
    low: T,
    left: Option<linear::Saved<T>>,
    /// What `right` gives, and what it keeps.
    raw: T,
    right: Option<linear::Saved<T>>,
    rstd: Activation,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let Self { low, left, raw, right, rstd } = self;
        let extra = |extra: Option<linear::Saved<T>>| extra.map(|extra| extra.map(f));
        Saved { low: f(low), left: extra(left), raw: f(raw), right: extra(right), rstd }
    }
}

impl Laurel {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        self.left.weights_mut().chain(self.right.weights_mut()).chain(self.norm.weights_mut())
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.left.trains() || self.right.trains() || self.norm.trains()
    }

    /// Turns the stream after the attention, `y [rows, hidden]`, into the stream after both. `h`, of the same shape, is
    /// the input of the attention.
    pub fn join(&self, pass: &Pass<'_>, h: &Activation, y: &mut Activation) -> Saved {
        let (low, left) = self.left.forward(pass, h, None);
        let (raw, right) = self.right.forward(pass, &low, None);
        let (normed, rstd) = self.norm.forward(pass, &raw, 1);
        elementwise::add(y, &normed);
        elementwise::add(y, h);
        elementwise::scale(y, FRAC_1_SQRT_2);
        Saved { low, left, raw, right, rstd }
    }

    /// Turns `dy`, the gradient of the stream after both, into that of the stream after the attention. Returns the
    /// gradient of `h`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        saved: Saved,
        dy: &mut Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let Saved { low, left, raw, right, rstd } = saved;
        elementwise::scale(dy, FRAC_1_SQRT_2);
        let mut d_raw = raw.like();
        self.norm.backward(pass, &raw, &rstd, dy, Some((&mut d_raw, false)), grads);
        drop(raw);
        let d_low = self.right.backward_through(pass, low, right.as_ref(), &d_raw, grads);
        drop(d_raw);
        let mut dh = dy.copy();
        self.left.backward(pass, &Input::new(h), left.as_ref(), &d_low, Some((&mut dh, true)), grads);
        dh
    }
}

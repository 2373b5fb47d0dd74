//! A plain MLP: a linear module, an activation function, a linear module. Encoders, connectors, and blocks
//! of GPT-2 and Nemotron-H have it, and experts of the latter.
use super::grads::Grads;
use super::linear::{self, Call, Few, Input, Linear};
use super::pass::Pass;
use super::weight::Weight;
use tunesmith_config::vision::Pointwise;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::pointwise::{self, Function};

/// `fc2(function(fc1(h)))`.
#[derive(Debug)]
pub struct PlainMlp {
    pub fc1: Linear,
    pub fc2: Linear,
    /// The activation between the two modules.
    pub function: Function,
}

/// What forward keeps for backward: the input of the activation function.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    inner: T,
    extra: Option<linear::Saved<T>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved { inner: f(self.inner), extra: self.extra.map(|extra| extra.map(f)) }
    }
}

impl PlainMlp {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        [&mut self.fc1, &mut self.fc2].into_iter().flat_map(Linear::weights_mut)
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        [&self.fc1, &self.fc2].into_iter()
    }

    /// The input of `fc2` for `h [rows, hidden]`, `[rows, intermediate]`, and what backward needs.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation) -> (Activation, Saved) {
        let (inner, extra) = self.fc1.forward(pass, h, None);
        (pointwise::forward(self.function, &inner), Saved { inner, extra })
    }

    /// Computes several whole MLPs together, each on its own `x [rows, hidden]`. Returns for each the output
    /// `[rows, hidden]`, what it keeps, and what its `fc2` keeps.
    pub fn forward_grouped(
        pass: &Pass<'_>,
        each: &[(&Self, &Activation)],
    ) -> Few<(Activation, Saved, Option<linear::Saved>)> {
        let calls: Few<_> = each.iter().map(|&(mlp, x)| Call { linear: &mlp.fc1, x, residual: None }).collect();
        let inner = linear::forward_grouped(pass, &calls).into_iter();
        let saved: Few<Saved> = inner.map(|(inner, extra)| Saved { inner, extra }).collect();
        let middles: Few<Activation> = each.iter().zip(&saved).map(|((mlp, _), saved)| mlp.middle(saved)).collect();
        let calls = each.iter().zip(&middles).map(|((mlp, _), x)| Call { linear: &mlp.fc2, x, residual: None });
        let outputs = linear::forward_grouped(pass, &calls.collect::<Few<_>>()).into_iter();
        outputs.zip(saved).map(|((y, extra), saved)| (y, saved, extra)).collect()
    }

    /// The input of `fc2`, from what was kept.
    pub fn middle(&self, saved: &Saved) -> Activation {
        pointwise::forward(self.function, &saved.inner)
    }

    /// From the gradient of what `fc2` takes to that of `h [rows, hidden]`, or none if `want_dh` is false.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        h: &Activation,
        saved: Saved,
        d_middle: &Activation,
        want_dh: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let Saved { mut inner, extra } = saved;
        pointwise::backward(self.function, &mut inner, d_middle);
        let mut dh = want_dh.then(|| h.like());
        self.fc1.backward(pass, &Input::new(h), extra.as_ref(), &inner, dh.as_mut().map(|dh| (dh, false)), grads);
        dh
    }
}

/// The operation for an activation function of the configuration.
pub const fn function_of(function: Pointwise) -> Function {
    match function {
        Pointwise::Gelu => Function::Gelu,
        Pointwise::GeluTanh => Function::GeluTanh,
        Pointwise::QuickGelu => Function::QuickGelu,
        Pointwise::Silu => Function::Silu,
        Pointwise::Relu => Function::Relu,
        Pointwise::Relu2 => Function::Relu2,
    }
}

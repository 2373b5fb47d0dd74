//! A linear module: base x adapter in one type. What an adapter computes is its kind's ([`super::adapters`]); the base gets
//! `dW = dy x^T` only where it is trained.
use super::grads::Grads;
use super::pass::Pass;
use super::weight::{View, Weight};
use std::cell::OnceCell;
use std::fmt::Debug;
use tunesmith_ops::elementwise;
use tunesmith_ops::gemm::{Init, Matrix, Target, Term, Transposed, matmul, outer};
use tunesmith_ops::panel::Act;

/// `y = W x (+ bias) (+ adapter)`, `W [out_features, in_features]`.
#[derive(Debug)]
pub struct Linear {
    pub weight: Weight,
    pub bias: Option<Weight>,
    pub out_features: usize,
    pub in_features: usize,
    pub adapter: Option<Box<dyn Formula>>,
}

/// A linear module in a pass: what a formula of an adapter computes with.
#[derive(Debug, Clone, Copy)]
pub struct Base<'a> {
    pub linear: &'a Linear,
    pub pass: &'a Pass<'a>,
}

/// A linear module's input, with its transposed copy made once for all modules that need it.
#[derive(Debug)]
pub struct Input<'a> {
    /// The input `[tokens, in_features]`.
    pub x: &'a Act,
    transposed: OnceCell<Transposed>,
}

impl<'a> Input<'a> {
    pub const fn new(x: &'a Act) -> Self {
        Self { x, transposed: OnceCell::new() }
    }

    /// The transposed copy, made on the first call.
    pub fn transposed(&self) -> &Transposed {
        self.transposed.get_or_init(|| Transposed::new(self.x))
    }
}

/// An adapter at work on a linear module.
pub trait Formula: Debug + Send + Sync {
    /// The output of the module `[tokens, out_features]` for `x [tokens, in_features]`, plus `residual` of that shape if given;
    /// and what [`Formula::backward`] needs again.
    fn forward(&self, base: Base<'_>, x: &Act, residual: Option<&Act>) -> (Act, Option<Saved>);

    /// Adds the gradients of what is trained to `grads`, and that of the input to `dx`, replacing what it holds unless told to
    /// add.
    fn backward(
        &self,
        base: Base<'_>,
        input: &Input<'_>,
        saved: Option<&Saved>,
        dy: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut Grads<'_>,
    );
}

/// What an adapter keeps from forward for backward.
#[derive(Debug)]
pub struct Saved<T = Act> {
    /// Activations, in an order of its own.
    pub acts: Vec<T>,
    /// Numbers of the module, likewise.
    pub numbers: Vec<Vec<f32>>,
}

impl From<Act> for Saved {
    fn from(act: Act) -> Self {
        Self { acts: vec![act], numbers: Vec::new() }
    }
}

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved { acts: self.acts.into_iter().map(f).collect(), numbers: self.numbers }
    }
}

impl Linear {
    /// What it computes with, beside adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        std::iter::once(&mut self.weight).chain(&mut self.bias)
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.adapter.is_some()
            || self.weight.trained().is_some()
            || self.bias.as_ref().is_some_and(|bias| bias.trained().is_some())
    }

    /// `[tokens, out_features]`, plus `residual` of that shape if given.
    pub fn forward(&self, pass: &Pass<'_>, x: &Act, residual: Option<&Act>) -> (Act, Option<Saved>) {
        let base = Base { linear: self, pass };
        match &self.adapter {
            Some(adapter) => adapter.forward(base, x, residual),
            None => (base.forward(x, residual), None),
        }
    }

    /// Adds the gradients of what is trained to `grads`, and that of the input to `dx`, replacing what it holds
    /// unless `add`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        input: &Input<'_>,
        saved: Option<&Saved>,
        dy: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut Grads<'_>,
    ) {
        let base = Base { linear: self, pass };
        match &self.adapter {
            Some(adapter) => adapter.backward(base, input, saved, dy, dx, grads),
            None => base.backward(input, dy, dx, grads),
        }
    }
}

impl<'a> Base<'a> {
    /// The weight as it is stored.
    pub fn weight(&self) -> View<'a> {
        self.linear.weight.view(self.pass.values)
    }

    /// An activation for the output `[tokens, out_features]`.
    pub fn output(&self, x: &Act) -> Act {
        x.pool().blank(x.tokens(), self.linear.out_features)
    }

    /// The sum of `terms`, the bias and `residual`.
    pub fn sum(&self, y: &mut Act, residual: Option<&Act>, terms: &[Term<'_>]) {
        let bias = self.linear.bias.as_ref().map(|bias| bias.view(self.pass.values));
        let init = match (residual, bias.as_ref()) {
            (Some(residual), _) => Init::Add(residual),
            (None, Some(bias)) => Init::Bias(bias.vector()),
            (None, None) => Init::Zero,
        };
        if terms.is_empty() {
            fill(y, init);
        } else {
            matmul(y, init, terms);
        }
        if let (Some(_), Some(bias)) = (residual, bias) {
            elementwise::add_bias(y, bias.vector());
        }
    }

    /// The base alone, plus `residual`.
    pub fn forward(&self, x: &Act, residual: Option<&Act>) -> Act {
        let (mut y, weight) = (self.output(x), self.weight());
        self.sum(&mut y, residual, &[Term { matrix: Matrix::rows(weight.store(), self.linear.in_features), x }]);
        y
    }

    /// As [`Linear::backward`], of the base alone.
    pub fn backward(&self, input: &Input<'_>, dy: &Act, dx: Option<(&mut Act, bool)>, grads: &mut Grads<'_>) {
        self.gradients(input, dy, grads);
        let Some((dx, add)) = dx else { return };
        let weight = self.weight();
        let base = Term { matrix: Matrix::transposed(weight.store(), self.linear.in_features), x: dy };
        matmul(dx, if add { Init::Out } else { Init::Zero }, &[base]);
    }

    /// Adds the gradients of the base's weight and bias, where they are trained.
    pub fn gradients(&self, input: &Input<'_>, dy: &Act, grads: &mut Grads<'_>) {
        if let Some(range) = self.linear.weight.trained() {
            outer(Target::Rows(grads.at(range)), dy, input.transposed());
        }
        if let Some(range) = self.linear.bias.as_ref().and_then(Weight::trained) {
            elementwise::add_bias_backward(dy, grads.at(range));
        }
    }
}

/// What a product of `out` that starts so begins with.
fn fill(out: &mut Act, init: Init<'_>) {
    match init {
        Init::Out => {}
        Init::Add(other) => elementwise::assign(out, other),
        Init::Zero => out.zero(),
        Init::Bias(bias) => {
            out.zero();
            elementwise::add_bias(out, bias);
        }
    }
}

//! Linear modules: the base and its adapter in one type. What an adapter computes is up to its kind
//! ([`super::adapters`]). The base gets `dW = dy x^T` only if it is trained.
//!
//! Modules whose outputs do not depend on each other, such as q, k and v, are computed together: their products are one
//! parallel job ([`matmul_grouped`]), and so is the gradient of an input that they share.
use super::grads::Grads;
use super::pass::Pass;
use super::weight::{View, Weight};
use smallvec::SmallVec;
use std::cell::OnceCell;
use std::fmt::Debug;
use tunesmith_device::FloatBuffer;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::dropout::Dropout;
use tunesmith_ops::elementwise;
use tunesmith_ops::gemm::{Init, Matrix, Product, Target, Term, Transposed, matmul, matmul_grouped};
use tunesmith_ops::gemm::{matvec, matvec_grouped, outer};

/// A list with an entry for each of a few modules that are computed together. Up to four entries need no heap memory.
pub type Few<T> = SmallVec<[T; 4]>;

/// `y = W x (+ bias) (+ adapter)`, `W [out_features, in_features]`.
#[derive(Debug)]
pub struct Linear {
    pub weight: Weight,
    pub bias: Option<Weight>,
    pub out_features: usize,
    pub in_features: usize,
    pub adapter: Option<Box<dyn Formula>>,
}

/// A linear module in a pass: what the formula of an adapter computes with.
#[derive(Debug, Clone, Copy)]
pub struct Base<'a> {
    pub linear: &'a Linear,
    pub pass: &'a Pass<'a>,
}

/// The input of one or more linear modules in backward. Its transposed copy is made once for all of them.
#[derive(Debug)]
pub struct Input<'a> {
    /// The input `[tokens, in_features]`.
    pub x: &'a Activation,
    transposed: OnceCell<Transposed>,
}

impl<'a> Input<'a> {
    pub const fn new(x: &'a Activation) -> Self {
        Self { x, transposed: OnceCell::new() }
    }

    /// The transposed copy, made on the first call.
    pub fn transposed(&self) -> &Transposed {
        self.transposed.get_or_init(|| Transposed::new(self.x))
    }
}

/// A module and its input, to be computed together with others.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    pub linear: &'a Linear,
    /// The input `[tokens, in_features]`.
    pub x: &'a Activation,
    /// Added to the output: `[tokens, out_features]`.
    pub residual: Option<&'a Activation>,
}

/// A module in backward, to be computed together with others that share its input.
#[derive(Debug, Clone, Copy)]
pub struct BackwardCall<'a> {
    pub linear: &'a Linear,
    pub saved: Option<&'a Saved>,
    /// The gradient of its output `[tokens, out_features]`.
    pub dy: &'a Activation,
}

/// What LoRA adds to a module's output: `B (s A x)`.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a> {
    /// A `[rank, in_features]`.
    pub a: Matrix<'a>,
    /// B `[out_features, rank]`.
    pub b: Matrix<'a>,
    pub rank: usize,
    /// The factor s of `B (s A x)`.
    pub scale: f32,
    /// The dropout that x goes through before A.
    pub dropout: Option<Dropout<'a>>,
}

/// The computation of an adapter on a linear module, forward and backward.
pub trait Formula: Debug + Send + Sync {
    /// The low-rank product that the adapter adds to the base's output, for `tokens` tokens of input. Modules that have
    /// one are computed together. `None` if the output is anything else, which [`Formula::forward`] then computes.
    fn low_rank<'a>(&self, _base: Base<'a>, _tokens: usize) -> Option<LowRank<'a>> {
        None
    }

    /// Whether anything of the adapter or of the module is trained.
    fn trains(&self) -> bool {
        true
    }

    /// Whether [`Formula::low_rank`] is all that the adapter computes, with A and B stored row by row.
    fn is_low_rank(&self) -> bool {
        false
    }

    /// The output of the module `[tokens, out_features]` for `x [tokens, in_features]`, plus `residual` of that shape
    /// if given; and what [`Formula::backward`] needs of it. By default it is the base's output plus
    /// [`Formula::low_rank`].
    fn forward(&self, base: Base<'_>, x: &Activation, residual: Option<&Activation>) -> (Activation, Option<Saved>) {
        sums(base.pass, &[(Call { linear: base.linear, x, residual }, self.low_rank(base, x.tokens()))]).swap_remove(0)
    }

    /// Adds the gradients of what is trained to `grads`. Writes the gradient of the input to `dx`, or adds it to what
    /// `dx` holds if its flag is true.
    fn backward(
        &self,
        base: Base<'_>,
        input: &Input<'_>,
        saved: Option<&Saved>,
        dy: &Activation,
        dx: Option<(&mut Activation, bool)>,
        grads: &mut Grads<'_>,
    );
}

/// What an adapter keeps from forward for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// Activations, in an order that the adapter chooses.
    pub acts: Vec<T>,
    /// Vectors that belong to the module and not to tokens, in an order that the adapter chooses.
    pub numbers: Vec<FloatBuffer>,
}

impl From<Activation> for Saved {
    fn from(act: Activation) -> Self {
        Self { acts: vec![act], numbers: Vec::new() }
    }
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved { acts: self.acts.into_iter().map(f).collect(), numbers: self.numbers }
    }
}

impl Linear {
    /// The weight and the bias of the base, without the weights of adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        std::iter::once(&mut self.weight).chain(&mut self.bias)
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.adapter.as_ref().is_some_and(|adapter| adapter.trains())
            || self.weight.trained().is_some()
            || self.bias.as_ref().is_some_and(|bias| bias.trained().is_some())
    }

    /// `[tokens, out_features]`, plus `residual` of that shape if given.
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        residual: Option<&Activation>,
    ) -> (Activation, Option<Saved>) {
        forward_grouped(pass, &[Call { linear: self, x, residual }]).swap_remove(0)
    }

    /// Whether it can multiply vectors: it belongs to a model for inference on the CPU, and has no adapter.
    pub fn takes_vectors(&self, pass: &Pass<'_>) -> bool {
        self.adapter.is_none() && matches!(self.weight.view(pass.values), View::Interleaved(_))
    }

    /// As [`Linear::forward`] for one token, `[1, out_features]`, whose input is a vector `x [in_features, 1]`
    /// ([`Activation::to_vector`]).
    pub fn forward_one(&self, pass: &Pass<'_>, x: &Activation, residual: Option<&Activation>) -> Activation {
        let base = Base { linear: self, pass };
        let (weight, bias) = (base.weight(), base.bias());
        let mut y = x.pool().blank(1, self.out_features);
        matvec(&mut y, start(residual, bias.as_ref()), Matrix::rows(weight.store(), self.in_features), x);
        if let (Some(_), Some(bias)) = (residual, &bias) {
            elementwise::add_bias(&mut y, bias.vector());
        }
        y
    }

    /// Adds the gradients of what is trained to `grads`. Writes the gradient of the input to `dx`, or adds it to what
    /// `dx` holds if its flag is true.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        input: &Input<'_>,
        saved: Option<&Saved>,
        dy: &Activation,
        dx: Option<(&mut Activation, bool)>,
        grads: &mut Grads<'_>,
    ) {
        backward_grouped(pass, input, &[BackwardCall { linear: self, saved, dy }], dx, grads);
    }

    /// As [`Linear::backward`], but returns the gradient of `x` as a new activation, and frees `x`.
    pub fn backward_through(
        &self,
        pass: &Pass<'_>,
        x: Activation,
        saved: Option<&Saved>,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let mut dx = x.like();
        self.backward(pass, &Input::new(&x), saved, dy, Some((&mut dx, false)), grads);
        drop(x);
        dx
    }
}

/// The outputs of modules that do not depend on each other, each as [`Linear::forward`] gives it alone. Those without an
/// adapter and those with LoRA are one parallel job.
pub fn forward_grouped(pass: &Pass<'_>, calls: &[Call<'_>]) -> Few<(Activation, Option<Saved>)> {
    let updates = calls.iter().map(|call| match &call.linear.adapter {
        None => Some(None),
        Some(adapter) => adapter.low_rank(Base { linear: call.linear, pass }, call.x.tokens()).map(Some),
    });
    let updates: Few<_> = updates.collect();
    let together: Few<_> = calls.iter().zip(&updates).filter_map(|(call, update)| Some((*call, (*update)?))).collect();
    let mut summed = sums(pass, &together).into_iter();
    let one = |(call, update): (&Call<'_>, &Option<_>)| match &call.linear.adapter {
        Some(adapter) if update.is_none() => adapter.forward(Base { linear: call.linear, pass }, call.x, call.residual),
        _ => summed.next().expect("one of the sums"),
    };
    calls.iter().zip(&updates).map(one).collect()
}

/// `W x + b` of each module for a vector `x [in_features, 1]` ([`Activation::to_vector`]): vectors `[out_features, 1]`.
/// Only for modules with [`Linear::takes_vectors`].
pub fn forward_vector(pass: &Pass<'_>, linears: &[Linear], x: &Activation) -> Few<Activation> {
    let bases: Few<Base<'_>> = linears.iter().map(|linear| Base { linear, pass }).collect();
    let weights: Few<View<'_>> = bases.iter().map(Base::weight).collect();
    let biases: Few<Option<View<'_>>> = bases.iter().map(Base::bias).collect();
    let products = linears.iter().zip(&weights).zip(&biases).map(|((linear, weight), bias)| {
        (linear.out_features, start(None, bias.as_ref()), Matrix::rows(weight.store(), linear.in_features))
    });
    matvec_grouped(&products.collect::<Few<_>>(), x)
}

/// `W x + b + B (s A x) + residual` of each module. All `s A x` are computed first, and then all sums.
fn sums(pass: &Pass<'_>, calls: &[(Call<'_>, Option<LowRank<'_>>)]) -> Few<(Activation, Option<Saved>)> {
    let bases: Few<Base<'_>> = calls.iter().map(|(call, _)| Base { linear: call.linear, pass }).collect();
    let mut outputs: Few<Activation> = bases.iter().zip(calls).map(|(base, (call, _))| base.output(call.x)).collect();
    let updates: Few<_> = calls.iter().filter_map(|(call, update)| Some(((*update)?, call.x))).collect();
    let mut lows = drop_and_project(&updates).into_iter();
    let lows: Few<Option<Activation>> = calls.iter().map(|(_, update)| update.and_then(|_| lows.next())).collect();
    let weights: Few<View<'_>> = bases.iter().map(Base::weight).collect();
    let terms = |at: usize| {
        let (Call { linear, x, .. }, update) = calls[at];
        let whole = Term { matrix: Matrix::rows(weights[at].store(), linear.in_features), x };
        let low = update.zip(lows[at].as_ref()).map(|(update, x)| Term { matrix: update.b, x });
        std::iter::once(whole).chain(low).collect()
    };
    let terms: Few<Few<Term<'_>>> = (0..calls.len()).map(terms).collect();
    let each = bases.iter().zip(&mut outputs).zip(&terms).zip(calls);
    let mut each: Few<Sum<'_>> =
        each.map(|(((&base, y), terms), (call, _))| Sum { base, y, residual: call.residual, terms }).collect();
    add_up(&mut each);
    drop(each);
    drop(terms);
    outputs.into_iter().zip(lows).map(|(y, low)| (y, low.map(Saved::from))).collect()
}

/// `s A x` of each update, `[tokens, rank]`. The inputs have not been through dropout yet.
fn drop_and_project(updates: &[(LowRank<'_>, &Activation)]) -> Few<Activation> {
    if updates.iter().all(|(update, _)| update.dropout.is_none()) {
        return project(updates);
    }
    // An input after dropout is as large as before: one at a time.
    let one = |&(update, x): &(LowRank<'_>, &Activation)| {
        let dropped = update.dropout.map(|dropout| dropout.apply(x));
        project(&[(update, dropped.as_ref().unwrap_or(x))]).swap_remove(0)
    };
    updates.iter().map(one).collect()
}

/// `s A x` of each update, `[tokens, rank]`. The inputs have been through dropout.
pub fn project(updates: &[(LowRank<'_>, &Activation)]) -> Few<Activation> {
    let mut lows: Few<Activation> = updates.iter().map(|(update, x)| x.pool().blank(x.tokens(), update.rank)).collect();
    let terms: Few<[Term<'_>; 1]> = updates.iter().map(|&(update, x)| [Term { matrix: update.a, x }]).collect();
    let products = lows.iter_mut().zip(&terms);
    let mut products: Few<_> = products.map(|(out, terms)| Product { out, init: Init::Zero, terms }).collect();
    matmul_grouped(&mut products);
    drop(products);
    for (low, (update, _)) in lows.iter_mut().zip(updates) {
        elementwise::scale(low, update.scale);
    }
    lows
}

/// An output that is summed.
struct Sum<'a> {
    base: Base<'a>,
    y: &'a mut Activation,
    residual: Option<&'a Activation>,
    /// At least one.
    terms: &'a [Term<'a>],
}

/// The sum of the terms, the bias and the residual of each.
fn add_up(sums: &mut [Sum<'_>]) {
    let biases: Few<Option<View<'_>>> = sums.iter().map(|sum| sum.base.bias()).collect();
    let products = sums.iter_mut().zip(&biases).map(|(Sum { y, residual, terms, .. }, bias)| Product {
        out: y,
        init: start(*residual, bias.as_ref()),
        terms,
    });
    let mut products: Few<Product<'_>> = products.collect();
    matmul_grouped(&mut products);
    drop(products);
    for (sum, bias) in sums.iter_mut().zip(&biases) {
        if let (Some(_), Some(bias)) = (sum.residual, bias) {
            elementwise::add_bias(sum.y, bias.vector());
        }
    }
}

/// What a sum starts from: the residual or the bias. If there are both, the bias is added afterwards.
fn start<'a>(residual: Option<&'a Activation>, bias: Option<&'a View<'_>>) -> Init<'a> {
    match (residual, bias) {
        (Some(residual), _) => Init::Add(residual),
        (None, Some(bias)) => Init::Bias(bias.vector()),
        (None, None) => Init::Zero,
    }
}

/// As [`Linear::backward`], for modules that share `input`, one after the other. The gradient of the input is the sum
/// over them in that order.
pub fn backward_grouped(
    pass: &Pass<'_>,
    input: &Input<'_>,
    calls: &[BackwardCall<'_>],
    mut dx: Option<(&mut Activation, bool)>,
    grads: &mut Grads<'_>,
) {
    // Modules without an adapter whose part of the input's gradient is still to be computed.
    let mut pending: Few<(Base<'_>, &Activation)> = Few::new();
    for &BackwardCall { linear, saved, dy } in calls {
        let base = Base { linear, pass };
        let Some(adapter) = &linear.adapter else {
            base.gradients(input, dy, grads);
            pending.push((base, dy));
            continue;
        };
        // An adapter's own intermediate results are as long as the tokens: they are not kept for a later product.
        input_gradient(&mut dx, &mut pending);
        adapter.backward(base, input, saved, dy, dx.as_mut().map(|(dx, add)| (&mut **dx, *add)), grads);
        if let Some((_, add)) = &mut dx {
            *add = true;
        }
    }
    input_gradient(&mut dx, &mut pending);
}

/// Takes all modules out of `modules`, and writes the sum of their `W^T dy` to `dx`, or adds it if its flag is true.
/// The flag is true afterwards, so that later ones are added.
fn input_gradient(dx: &mut Option<(&mut Activation, bool)>, modules: &mut Few<(Base<'_>, &Activation)>) {
    let modules = std::mem::take(modules);
    let (Some((dx, add)), false) = (dx, modules.is_empty()) else { return };
    let weights: Few<View<'_>> = modules.iter().map(|(base, _)| base.weight()).collect();
    let terms = weights
        .iter()
        .zip(&modules)
        .map(|(weight, &(base, x))| Term { matrix: Matrix::transposed(weight.store(), base.linear.in_features), x });
    let terms: Few<Term<'_>> = terms.collect();
    matmul(dx, if *add { Init::Out } else { Init::Zero }, &terms);
    *add = true;
}

impl<'a> Base<'a> {
    /// The weight as it is stored.
    pub fn weight(&self) -> View<'a> {
        self.linear.weight.view(self.pass.values)
    }

    /// An activation for the output `[tokens, out_features]`.
    pub fn output(&self, x: &Activation) -> Activation {
        x.pool().blank(x.tokens(), self.linear.out_features)
    }

    /// The bias as it is stored.
    fn bias(&self) -> Option<View<'a>> {
        self.linear.bias.as_ref().map(|bias| bias.view(self.pass.values))
    }

    /// The sum of `terms`, the bias and `residual`.
    pub fn sum(&self, y: &mut Activation, residual: Option<&Activation>, terms: &[Term<'_>]) {
        if !terms.is_empty() {
            return add_up(&mut [Sum { base: *self, y, residual, terms }]);
        }
        match residual {
            Some(residual) => elementwise::assign(y, residual),
            None => y.zero(),
        }
        if let Some(bias) = self.bias() {
            elementwise::add_bias(y, bias.vector());
        }
    }

    /// The output of the base without an adapter, plus `residual` if given.
    pub fn forward(&self, x: &Activation, residual: Option<&Activation>) -> Activation {
        let (mut y, weight) = (self.output(x), self.weight());
        self.sum(&mut y, residual, &[Term { matrix: Matrix::rows(weight.store(), self.linear.in_features), x }]);
        y
    }

    /// As [`Linear::backward`], for the base without an adapter.
    pub fn backward(
        &self,
        input: &Input<'_>,
        dy: &Activation,
        mut dx: Option<(&mut Activation, bool)>,
        grads: &mut Grads<'_>,
    ) {
        self.gradients(input, dy, grads);
        input_gradient(&mut dx, &mut Few::from_iter([(*self, dy)]));
    }

    /// Adds the gradients of the base's weight and bias, where they are trained.
    pub fn gradients(&self, input: &Input<'_>, dy: &Activation, grads: &mut Grads<'_>) {
        if let Some(range) = self.linear.weight.trained() {
            outer(Target::Rows(grads.at(range)), dy, input.transposed());
        }
        if let Some(range) = self.linear.bias.as_ref().and_then(Weight::trained) {
            elementwise::add_bias_backward(dy, grads.at(range));
        }
    }
}

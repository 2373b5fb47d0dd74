//! An expert of a mixture: an MLP with a gate, or one without (Nemotron-H).
use super::grads::Grads;
use super::linear::{self, Few, Input, Linear};
use super::mlp::{self, Mlp};
use super::pass::Pass;
use super::plain_mlp::{self, PlainMlp};
use super::weight::Weight;
use tunesmith_ops::activation::Activation;

/// One expert of a mixture of experts.
#[derive(Debug)]
pub enum Expert {
    Gated(Mlp),
    Plain(PlainMlp),
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    inner: Inner<T>,
    /// What the last projection keeps.
    down: Option<linear::Saved<T>>,
}

/// What the modules before the last projection keep.
#[derive(Debug)]
enum Inner<T> {
    Gated(mlp::Saved<T>),
    Plain(plain_mlp::Saved<T>),
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let inner = match self.inner {
            Inner::Gated(saved) => Inner::Gated(saved.map(f)),
            Inner::Plain(saved) => Inner::Plain(saved.map(f)),
        };
        Saved { inner, down: self.down.map(|extra| extra.map(f)) }
    }
}

impl Expert {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        match self {
            Self::Gated(mlp) => mlp.weights_mut().collect(),
            Self::Plain(mlp) => mlp.weights_mut().collect(),
        }
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let (gated, plain) = match self {
            Self::Gated(mlp) => (Some(mlp), None),
            Self::Plain(mlp) => (None, Some(mlp)),
        };
        gated.into_iter().flat_map(Mlp::linears).chain(plain.into_iter().flat_map(PlainMlp::linears))
    }

    /// The projection from its hidden layer to its output.
    pub const fn down(&self) -> &Linear {
        match self {
            Self::Gated(mlp) => &mlp.down,
            Self::Plain(mlp) => &mlp.fc2,
        }
    }

    /// Computes several experts of one kind together, each on its own `x [rows, features]`. Returns for each its
    /// output, of the same shape, and what it keeps.
    pub fn forward_grouped(pass: &Pass<'_>, each: &[(&Self, &Activation)]) -> Vec<(Activation, Saved)> {
        let gated = each.iter().filter_map(|&(expert, x)| match expert {
            Self::Gated(mlp) => Some((mlp, x)),
            Self::Plain(_) => None,
        });
        let gated: Few<(&Mlp, &Activation)> = gated.collect();
        if !gated.is_empty() {
            let computed = Mlp::forward_grouped(pass, &gated).into_iter();
            return computed.map(|(y, saved, down)| (y, Saved { inner: Inner::Gated(saved), down })).collect();
        }
        let plain = each.iter().filter_map(|&(expert, x)| match expert {
            Self::Plain(mlp) => Some((mlp, x)),
            Self::Gated(_) => None,
        });
        let computed = PlainMlp::forward_grouped(pass, &plain.collect::<Few<_>>()).into_iter();
        computed.map(|(y, saved, down)| (y, Saved { inner: Inner::Plain(saved), down })).collect()
    }

    /// The gradient of `x`. `dy` is the gradient of the expert's own output: what multiplies that output (routing
    /// weights, or a gate) is already in it. `factors` is called with the gradient of the last projection's input and
    /// with that input, from which the gradient of these factors follows.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        saved: Saved,
        dy: &Activation,
        factors: impl FnOnce(&Activation, &Activation),
        grads: &mut Grads<'_>,
    ) -> Activation {
        let Saved { inner, down } = saved;
        let middle = match (self, &inner) {
            (Self::Gated(mlp), Inner::Gated(saved)) => mlp.middle(saved),
            (Self::Plain(mlp), Inner::Plain(saved)) => mlp.middle(saved),
            _ => unreachable!("an expert keeps its own kind"),
        };
        let mut d_middle = middle.like();
        self.down().backward(pass, &Input::new(&middle), down.as_ref(), dy, Some((&mut d_middle, false)), grads);
        factors(&d_middle, &middle);
        drop(middle);
        match (self, inner) {
            (Self::Gated(mlp), Inner::Gated(mut saved)) => {
                mlp.backward_middle(&mut saved, &d_middle);
                mlp.backward_gate_up(pass, x, saved, grads)
            }
            (Self::Plain(mlp), Inner::Plain(saved)) => {
                mlp.backward(pass, x, saved, &d_middle, true, grads).expect("the gradient was asked for")
            }
            _ => unreachable!("an expert keeps its own kind"),
        }
    }
}

//! A block's gated MLP: gate and up (two modules or one), the activation, and down.
use super::grads::Grads;
use super::linear::{self, Call, Few, Input, Linear};
use super::pass::Pass;
use super::projections::Projections;
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::gated_mlp::{self, Gate};
use tunesmith_ops::gaussian_topk;

/// `down(act(gate(h)) * up(h))`.
#[derive(Debug)]
pub struct Mlp {
    pub gate_up: Projections<2>,
    pub down: Linear,
    /// The activation function of the gate.
    pub gate: Gate,
    /// The gate first becomes `max(gate - (mean + cut * deviation), 0)`, with the mean and the deviation of a token's
    /// features (Gemma 3n).
    pub cut: Option<f32>,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    gate: T,
    up: T,
    extra: Vec<Option<linear::Saved<T>>>,
}

impl<T> Saved<T> {
    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let extra = self.extra.into_iter().map(|extra| extra.map(|extra| extra.map(f))).collect();
        Saved { gate: f(self.gate), up: f(self.up), extra }
    }
}

impl Mlp {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        self.gate_up.linears_mut().chain([&mut self.down]).flat_map(Linear::weights_mut)
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.gate_up.linears().chain([&self.down])
    }

    /// The outputs of gate and up for `h [rows, hidden]`, which backward needs too.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation) -> Saved {
        let ([gate, up], extra) = self.gate_up.forward(pass, h, None);
        Saved { gate, up, extra }
    }

    /// Computes several whole MLPs together, each on its own `x [rows, hidden]`. Returns for each the output
    /// `[rows, hidden]`, what it keeps, and what its `down` keeps.
    pub fn forward_grouped(
        pass: &Pass<'_>,
        each: &[(&Self, &Activation)],
    ) -> Few<(Activation, Saved, Option<linear::Saved>)> {
        let projections: Few<_> = each.iter().map(|&(mlp, x)| (&mlp.gate_up, x)).collect();
        let projected = Projections::forward_grouped(pass, &projections).into_iter();
        let saved: Few<Saved> = projected.map(|([gate, up], extra)| Saved { gate, up, extra }).collect();
        let middles: Few<Activation> = each.iter().zip(&saved).map(|((mlp, _), saved)| mlp.middle(saved)).collect();
        let calls = each.iter().zip(&middles).map(|((mlp, _), x)| Call { linear: &mlp.down, x, residual: None });
        let outputs = linear::forward_grouped(pass, &calls.collect::<Few<_>>()).into_iter();
        outputs.zip(saved).map(|((y, down_extra), saved)| (y, saved, down_extra)).collect()
    }

    /// The input of `down`: `[rows, intermediate]`.
    pub fn middle(&self, saved: &Saved) -> Activation {
        let cut = self.cut.map(|cut| gaussian_topk::forward(&saved.gate, cut));
        gated_mlp::forward(self.gate, cut.as_ref().unwrap_or(&saved.gate), &saved.up)
    }

    /// Whether it can compute with vectors ([`Linear::takes_vectors`]).
    pub fn takes_vectors(&self, pass: &Pass<'_>) -> bool {
        self.cut.is_none() && self.gate_up.takes_vectors(pass) && self.down.takes_vectors(pass)
    }

    /// The input of `down` as a vector `[intermediate, 1]`, for a vector `h [hidden, 1]`.
    pub fn middle_of_vector(&self, pass: &Pass<'_>, h: &Activation) -> Activation {
        let [gate, up] = self.gate_up.forward_vector(pass, h);
        gated_mlp::forward(self.gate, &gate, &up)
    }

    /// Turns gate and up in `saved` into their gradients, given `dy`, the gradient of `down`'s output. `middle` is the
    /// input of `down`, where it was kept.
    pub fn backward_down(
        &self,
        pass: &Pass<'_>,
        saved: &mut Saved,
        middle: Option<Activation>,
        down_extra: Option<&linear::Saved>,
        dy: &Activation,
        grads: &mut Grads<'_>,
    ) {
        let middle = middle.unwrap_or_else(|| self.middle(saved));
        let mut d_middle = middle.like();
        self.down.backward(pass, &Input::new(&middle), down_extra, dy, Some((&mut d_middle, false)), grads);
        drop(middle);
        self.backward_middle(saved, &d_middle);
    }

    /// Turns gate and up in `saved` into their gradients, given that of the input of `down`.
    pub fn backward_middle(&self, saved: &mut Saved, d_middle: &Activation) {
        let Some(cut) = self.cut else {
            return gated_mlp::backward(self.gate, &mut saved.gate, &mut saved.up, d_middle);
        };
        let mut kept = gaussian_topk::forward(&saved.gate, cut);
        gated_mlp::backward(self.gate, &mut kept, &mut saved.up, d_middle);
        gaussian_topk::backward(&saved.gate, cut, &mut kept);
        saved.gate = kept;
    }

    /// From the gradients of gate and up to that of `h`.
    pub fn backward_gate_up(&self, pass: &Pass<'_>, h: &Activation, saved: Saved, grads: &mut Grads<'_>) -> Activation {
        let Saved { gate, up, extra } = saved;
        self.gate_up.backward(pass, h, &extra, [gate, up], None, true, grads).expect("the gradient was asked for")
    }
}

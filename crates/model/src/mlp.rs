//! A block's gated MLP: gate and up (two modules or one), the activation, and down.
use super::grads::Grads;
use super::linear::{self, Input, Linear};
use super::pass::Pass;
use super::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::gated_mlp::{self, Gate};

/// The projections to gate and up.
#[derive(Debug)]
pub enum GateUp {
    Apart(Box<[Linear; 2]>),
    /// One, whose outputs lie side by side. Phi-3.
    Fused(Box<Linear>),
}

#[derive(Debug)]
pub struct Mlp {
    pub gate_up: GateUp,
    pub down: Linear,
    /// What the gate goes through.
    pub gate: Gate,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    gate: T,
    up: T,
    extra: [Option<linear::Saved<T>>; 2],
}

impl<T> Saved<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        Saved { gate: f(self.gate), up: f(self.up), extra: self.extra.map(|extra| extra.map(|extra| extra.map(f))) }
    }
}

impl Mlp {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        let gate_up = match &mut self.gate_up {
            GateUp::Apart(linears) => &mut linears[..],
            GateUp::Fused(linear) => std::slice::from_mut(&mut **linear),
        };
        gate_up.iter_mut().chain([&mut self.down]).flat_map(Linear::weights_mut)
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let gate_up = match &self.gate_up {
            GateUp::Apart(linears) => &linears[..],
            GateUp::Fused(linear) => std::slice::from_ref(&**linear),
        };
        gate_up.iter().chain([&self.down])
    }

    /// Gate and up of `h [rows, hidden]`.
    pub fn forward(&self, pass: &Pass<'_>, h: &Activation) -> Saved {
        match &self.gate_up {
            GateUp::Apart(linears) => {
                let [to_gate, to_up] = &**linears;
                let (gate, gate_extra) = to_gate.forward(pass, h, None);
                let (up, up_extra) = to_up.forward(pass, h, None);
                Saved { gate, up, extra: [gate_extra, up_extra] }
            }
            GateUp::Fused(linear) => {
                let (y, extra) = linear.forward(pass, h, None);
                let inner = y.features() / 2;
                Saved { gate: y.columns(0..inner), up: y.columns(inner..2 * inner), extra: [extra, None] }
            }
        }
    }

    /// What `down` takes: `[rows, intermediate]`.
    pub fn middle(&self, saved: &Saved) -> Activation {
        gated_mlp::forward(self.gate, &saved.gate, &saved.up)
    }

    /// From `dy`, the gradient of `down`'s output, to those of gate and up, in their place. `middle` is what `down` took,
    /// where it was kept.
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

    /// From the gradient of what `down` takes to those of gate and up, in their place.
    pub fn backward_middle(&self, saved: &mut Saved, d_middle: &Activation) {
        gated_mlp::backward(self.gate, &mut saved.gate, &mut saved.up, d_middle);
    }

    /// From the gradients of gate and up to that of `h`.
    pub fn backward_gate_up(&self, pass: &Pass<'_>, h: &Activation, saved: Saved, grads: &mut Grads<'_>) -> Activation {
        let Saved { gate, up, extra: [gate_extra, up_extra] } = saved;
        let (input, mut dh) = (Input::new(h), h.like());
        match &self.gate_up {
            GateUp::Apart(linears) => {
                let [to_gate, to_up] = &**linears;
                to_gate.backward(pass, &input, gate_extra.as_ref(), &gate, Some((&mut dh, false)), grads);
                to_up.backward(pass, &input, up_extra.as_ref(), &up, Some((&mut dh, true)), grads);
            }
            GateUp::Fused(linear) => {
                let dy = Activation::side_by_side(&[&gate, &up]);
                drop((gate, up));
                linear.backward(pass, &input, gate_extra.as_ref(), &dy, Some((&mut dh, false)), grads);
            }
        }
        dh
    }
}

//! The gated delta rule on the CPU: computes the gates, and runs the shared recurrence with them.
use super::{Gradients, Heads, Inputs, NORM_EPS};
use crate::activation::{Activation, LANES};
use crate::recurrence::State;
use crate::recurrence::cpu::{self, Gate, Memory, Scan, Sums};
use std::ops::Range;
use tunesmith_cpu_slice::CpuSlice as _;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The decay's logarithm `g` of a head at a token, and its derivative with respect to `a`.
fn decay(inputs: &Inputs<'_>, head: usize, token: usize) -> [f32; 2] {
    let rate = -inputs.a_log.cpu_slice()[head].exp();
    let x = inputs.a.at(token, head) + inputs.dt_bias.cpu_slice()[head];
    // As in PyTorch, softplus is the identity above 20.
    if x > 20.0 { [rate * x, rate] } else { [rate * x.exp().ln_1p(), rate * sigmoid(x)] }
}

/// Calls `work` with the rule as a [`Scan`].
fn with_scan<R>(inputs: Inputs<'_>, heads: Heads, work: impl FnOnce(&Scan<'_>) -> R) -> R {
    let gate = |head, token| Gate {
        scale: inputs.beta_max * sigmoid(inputs.b.at(token, head)),
        g: decay(&inputs, head, token)[0],
    };
    work(&Scan {
        shape: heads.state(),
        groups: heads.key,
        act: inputs.qkv,
        queries: 0,
        keys: heads.keys(),
        values: 2 * heads.keys(),
        norm_eps: Some(NORM_EPS),
        corrects: true,
        through: None,
        gate: &gate,
    })
}

pub(super) fn forward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    states: Option<&mut [&mut State]>,
    out: &mut Activation,
) {
    with_scan(inputs, heads, |scan| cpu::forward(scan, sequences, states, out));
}

/// The temporary memory of the backward pass, in addition to its results.
pub(super) fn memory(inputs: Inputs<'_>, heads: Heads) -> Memory {
    Memory::new(inputs.qkv.pool(), inputs.qkv.tokens(), heads.state(), heads.key)
}

pub(super) fn backward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    dy: &Activation,
    d: &mut Gradients,
) {
    let mut memory = memory(inputs, heads);
    let [d_b, d_a, d_rate] = [&mut d.b, &mut d.a, &mut d.a_log].map(Activation::shared);
    let write = |head: usize, token: usize, sums: Sums| {
        let [g, slope] = decay(&inputs, head, token);
        let share = sigmoid(inputs.b.at(token, head));
        let place = (token / LANES * heads.value + head) * LANES + token % LANES;
        // SAFETY: the place of this token and head in activations of `[tokens, heads.value]`; each is written once.
        unsafe {
            *d_b.get().add(place) = sums.scale * (1.0 - share);
            *d_a.get().add(place) = sums.g * slope;
            *d_rate.get().add(place) = sums.g * g;
        }
    };
    with_scan(inputs, heads, |scan| cpu::backward(scan, sequences, dy, &mut memory, &mut d.qkv, &write));
}

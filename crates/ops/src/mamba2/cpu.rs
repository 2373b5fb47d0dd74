//! Mamba 2 on the CPU, as the shared recurrence: C is its query, B its key, x its value, and the time steps are its
//! gates.
use super::{Gradients, Heads, Inputs};
use crate::activation::{Activation, LANES};
use crate::recurrence::State;
use crate::recurrence::cpu::{self, Gate, Memory, Scan, Sums};
use std::ops::Range;
use tunesmith_cpu_slice::CpuSlice as _;

/// The time step, and the derivative of its logarithm with respect to `dt`: 0 where the limits cut it.
fn step(inputs: &Inputs<'_>, head: usize, token: usize) -> [f32; 2] {
    let (x, [low, high]) = (inputs.dt.at(token, head) + inputs.dt_bias.cpu_slice()[head], inputs.limits);
    // As in PyTorch, softplus is the identity above 20.
    let (step, slope) = if x > 20.0 { (x, 1.0) } else { (x.exp().ln_1p(), 1.0 / (1.0 + (-x).exp())) };
    let inside = (low..=high).contains(&step) && step > 0.0;
    [step.max(low).min(high), if inside { slope / step } else { 0.0 }]
}

fn rate(inputs: &Inputs<'_>, head: usize) -> f32 {
    -inputs.a_log.cpu_slice()[head].exp()
}

/// Calls `work` with Mamba 2 as a [`Scan`].
fn with_scan<R>(inputs: Inputs<'_>, heads: Heads, work: impl FnOnce(&Scan<'_>) -> R) -> R {
    let gate = |head, token| {
        let [scale, _] = step(&inputs, head, token);
        Gate { scale, g: rate(&inputs, head) * scale }
    };
    work(&Scan {
        shape: heads.state(),
        groups: heads.groups,
        act: inputs.xbc,
        queries: heads.values() + heads.groups * heads.state,
        keys: heads.values(),
        values: 0,
        norm_eps: None,
        corrects: false,
        through: Some(inputs.d.cpu_slice()),
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
    Memory::new(inputs.xbc.pool(), inputs.xbc.tokens(), heads.state(), heads.groups)
}

pub(super) fn backward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    dy: &Activation,
    d: &mut Gradients,
) {
    let mut memory = memory(inputs, heads);
    let [d_dt, d_rate, d_d] = [&mut d.dt, &mut d.a_log, &mut d.d].map(Activation::shared);
    let write = |head: usize, token: usize, sums: Sums| {
        let [step, slope] = step(&inputs, head, token);
        let place = (token / LANES * heads.count + head) * LANES + token % LANES;
        let d_g = sums.g * rate(&inputs, head) * step;
        // SAFETY: the place of this token and head in activations of `[tokens, heads.count]`; each is written once.
        unsafe {
            *d_dt.get().add(place) = (sums.scale + d_g) * slope;
            *d_rate.get().add(place) = d_g;
            *d_d.get().add(place) = sums.through;
        }
    };
    with_scan(inputs, heads, |scan| cpu::backward(scan, sequences, dy, &mut memory, &mut d.xbc, &write));
}

//! Mamba 2 on a GPU: its own kernels compute the time steps, around the shared recurrence.
use super::{Gradients, Heads, Inputs};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::recurrence::State;
use crate::recurrence::cuda::Scan;
use std::ops::Range;

static KERNELS: Typed = Typed::new("mamba2", include_str!("mamba2.cu"));

fn sizes(heads: Heads) -> [Arg; 4] {
    [heads.count, heads.groups, heads.dim, heads.state].map(|size| Arg::from(size as u32))
}

/// C and B in float32, and the time steps with the numbers that follow from them.
fn prepared(inputs: &Inputs<'_>, heads: Heads) -> [Activation; 2] {
    let (pool, tokens, device) = (inputs.dt.pool(), inputs.dt.tokens(), inputs.dt.device());
    let mut keys = pool.act_f32(tokens, 2 * heads.groups * heads.state);
    let args = [inputs.xbc.into(), (&mut keys).into()];
    let rows = Grid::rows(tokens * 2 * heads.groups, heads.state);
    cuda::launch(device, KERNELS.same(&[inputs.xbc]), "mamba2_rows", rows, &[&args[..], &sizes(heads)].concat());
    let mut steps = pool.act_f32(tokens, 4 * heads.count);
    let [low, high] = inputs.limits;
    let args = [
        inputs.dt.into(),
        inputs.a_log.into(),
        inputs.dt_bias.into(),
        low.into(),
        high.into(),
        (&mut steps).into(),
        Arg::count(tokens * heads.count),
        (heads.count as u32).into(),
    ];
    let items = Grid::items(tokens * heads.count);
    cuda::launch(device, KERNELS.same(&[inputs.dt]), "mamba2_steps", items, &args);
    [keys, steps]
}

fn scan<'a>(inputs: &Inputs<'a>, heads: Heads, [keys, gates]: &'a [Activation; 2]) -> Scan<'a> {
    let (shape, groups, through) = (heads.state(), heads.groups, Some(inputs.d));
    Scan { shape, groups, act: inputs.xbc, values: 0, keys, gates, corrects: false, through }
}

pub(super) fn forward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    states: Option<&mut [&mut State]>,
    out: &mut Activation,
) {
    scan(&inputs, heads, &prepared(&inputs, heads)).forward(sequences, states, out);
}

pub(super) fn backward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    dy: &Activation,
    d: &mut Gradients,
) {
    let (tokens, device) = (inputs.xbc.tokens(), inputs.xbc.device());
    let prepared = prepared(&inputs, heads);
    let scan = scan(&inputs, heads, &prepared);
    let (parts, slices) = (scan.backward(sequences, dy, &mut d.xbc), scan.slices() as u32);
    let args = [(&parts.keys).into(), (&mut d.xbc).into(), slices.into()];
    let rows = Grid::rows(tokens * 2 * heads.groups, heads.state);
    let source = KERNELS.same(&[&d.xbc]);
    cuda::launch(device, source, "mamba2_rows_backward", rows, &[&args[..], &sizes(heads)].concat());
    let count = tokens * heads.count;
    let args = [
        (&prepared[1]).into(),
        (&parts.gates).into(),
        (&mut d.dt).into(),
        (&mut d.a_log).into(),
        (&mut d.d).into(),
        Arg::count(count),
        slices.into(),
    ];
    let source = KERNELS.same(&[&d.dt]);
    cuda::launch(device, source, "mamba2_steps_backward", Grid::items(count), &args);
}

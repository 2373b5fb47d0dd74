//! The gated delta rule on a GPU: its own kernels compute norms and gates, around the shared recurrence.
use super::{Gradients, Heads, Inputs};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::recurrence::State;
use crate::recurrence::cuda::Scan;
use std::ops::Range;

static KERNELS: Typed = Typed::new("gated_delta_rule", include_str!("gated_delta_rule.cu"));

fn sizes(heads: Heads) -> [Arg; 4] {
    [heads.key, heads.value, heads.key_dim, heads.value_dim].map(|size| Arg::from(size as u32))
}

/// The normalized queries and keys, `q̂` and `k̂`, and the gates.
fn prepared(inputs: &Inputs<'_>, heads: Heads) -> [Activation; 2] {
    let (pool, tokens, device) = (inputs.qkv.pool(), inputs.qkv.tokens(), inputs.qkv.device());
    let mut normed = pool.act_f32(tokens, 2 * heads.keys());
    let args = [inputs.qkv.into(), (&mut normed).into()];
    let rows = Grid::rows(tokens * 2 * heads.key, heads.key_dim);
    cuda::launch(
        device,
        KERNELS.same(&[inputs.qkv]),
        "gated_delta_rule_norm",
        rows,
        &[&args[..], &sizes(heads)].concat(),
    );
    let mut gates = pool.act_f32(tokens, 4 * heads.value);
    let args = [
        inputs.b.into(),
        inputs.a.into(),
        inputs.a_log.into(),
        inputs.dt_bias.into(),
        inputs.beta_max.into(),
        (&mut gates).into(),
        Arg::count(tokens * heads.value),
        (heads.value as u32).into(),
    ];
    let items = Grid::items(tokens * heads.value);
    cuda::launch(device, KERNELS.same(&[inputs.b, inputs.a]), "gated_delta_rule_gates", items, &args);
    [normed, gates]
}

fn scan<'a>(inputs: &Inputs<'a>, heads: Heads, [keys, gates]: &'a [Activation; 2]) -> Scan<'a> {
    let (shape, groups, values) = (heads.state(), heads.key, 2 * heads.keys());
    Scan { shape, groups, act: inputs.qkv, values, keys, gates, corrects: true, through: None }
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
    let (tokens, device) = (inputs.qkv.tokens(), inputs.qkv.device());
    let prepared = prepared(&inputs, heads);
    let scan = scan(&inputs, heads, &prepared);
    let (parts, slices) = (scan.backward(sequences, dy, &mut d.qkv), scan.slices() as u32);
    let args = [inputs.qkv.into(), (&parts.keys).into(), (&mut d.qkv).into(), slices.into()];
    let mut rows = Grid::rows(tokens * 2 * heads.key, heads.key_dim);
    rows.shared = (heads.key_dim * size_of::<f32>()) as u32;
    let source = KERNELS.same(&[inputs.qkv, &d.qkv]);
    cuda::launch(device, source, "gated_delta_rule_norm_backward", rows, &[&args[..], &sizes(heads)].concat());
    let count = tokens * heads.value;
    let args = [
        (&prepared[1]).into(),
        (&parts.gates).into(),
        (&mut d.b).into(),
        (&mut d.a).into(),
        (&mut d.a_log).into(),
        Arg::count(count),
        slices.into(),
    ];
    let source = KERNELS.same(&[&d.b, &d.a]);
    cuda::launch(device, source, "gated_delta_rule_gates_backward", Grid::items(count), &args);
}

//! The rule in a GPU's memory: a block a head, sequence and slice of a state's columns, token by token.
use super::{Gradients, Heads, Inputs};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::recurrence::State;
use std::ops::Range;
use tunesmith_device::{Array, FloatBuffer};

static KERNELS: Typed = Typed::new("gated_delta_rule", include_str!("gated_delta_rule.cu"));

/// Columns of a state in a block, `SLICE` in the kernels.
const SLICE: usize = 64;
/// Tokens between two states that backward keeps, `CHUNK` in the kernels.
const CHUNK: usize = 64;
/// The most sequences that backward works on at a time: each has memory for a chunk's states.
const AT_A_TIME: usize = 2;

fn sizes(heads: Heads) -> [Arg; 4] {
    [heads.key, heads.value, heads.key_dim, heads.value_dim].map(|size| Arg::from(size as u32))
}

const fn slices(heads: Heads) -> usize {
    heads.value_dim.div_ceil(SLICE)
}

/// The starts of the sequences, and the end of the last.
fn ends(inputs: &Inputs<'_>, sequences: &[Range<usize>]) -> Array<u32> {
    let ends: Vec<u32> = std::iter::once(0).chain(sequences.iter().map(|sequence| sequence.end as u32)).collect();
    cuda::upload(inputs.qkv.device(), &ends)
}

/// A block for each head, of these sequences at a time and each slice, with so many floats of shared memory.
fn grid(heads: Heads, sequences: usize, shared: usize) -> Grid {
    let blocks = [heads.value, sequences, slices(heads)].map(|count| count as u32);
    Grid { blocks, threads: SLICE as u32, shared: (shared * size_of::<f32>()) as u32 }
}

/// `q̂` and `k̂`, and the gates.
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

pub(super) fn forward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    states: Option<&mut [&mut State]>,
    out: &mut Activation,
) {
    let device = inputs.qkv.device();
    let [normed, gates] = prepared(&inputs, heads);
    let ends = ends(&inputs, sequences);
    let states = states.map(|states| {
        let addresses: Vec<u64> = states.iter_mut().map(|state| state.floats.view().address()).collect();
        cuda::upload(device, &addresses)
    });
    let args = [
        inputs.qkv.into(),
        (&normed).into(),
        (&gates).into(),
        (&ends).into(),
        states.as_ref().map_or(Arg::NULL, Arg::from),
        (&mut *out).into(),
    ];
    let grid = grid(heads, sequences.len(), heads.key_dim * (SLICE + 2));
    let source = KERNELS.same(&[inputs.qkv, out]);
    cuda::launch(device, source, "gated_delta_rule_forward", grid, &[&args[..], &sizes(heads)].concat());
}

pub(super) fn backward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    dy: &Activation,
    d: &mut Gradients,
) {
    let (pool, tokens, device) = (inputs.qkv.pool(), inputs.qkv.tokens(), inputs.qkv.device());
    let [normed, gates] = prepared(&inputs, heads);
    let (ends, parts) = (ends(&inputs, sequences), heads.value * slices(heads));
    let at_a_time = sequences.len().min(AT_A_TIME);
    let mut checkpoints = FloatBuffer::zeros(device, tokens.div_ceil(CHUNK) * parts * heads.key_dim * SLICE);
    // As much for one sequence: what a pass takes does not depend on how many it has.
    let mut history = FloatBuffer::zeros(device, AT_A_TIME * parts * (CHUNK + 1) * heads.key_dim * SLICE);
    let mut d_keys = pool.act_f32(tokens, parts * 2 * heads.key_dim);
    let mut d_gates = pool.act_f32(tokens, parts * 2);
    let args = [
        inputs.qkv.into(),
        (&normed).into(),
        (&gates).into(),
        (&ends).into(),
        (sequences.len() as u32).into(),
        dy.into(),
        (&mut d.qkv).into(),
        (&mut checkpoints).into(),
        (&mut history).into(),
        (&mut d_keys).into(),
        (&mut d_gates).into(),
    ];
    let of_block = grid(heads, at_a_time, heads.key_dim * (SLICE + 2) + 3 * SLICE);
    let source = KERNELS.same(&[inputs.qkv, dy, &d.qkv]);
    cuda::launch(device, source, "gated_delta_rule_backward", of_block, &[&args[..], &sizes(heads)].concat());
    let args = [inputs.qkv.into(), (&d_keys).into(), (&mut d.qkv).into(), (slices(heads) as u32).into()];
    let mut rows = Grid::rows(tokens * 2 * heads.key, heads.key_dim);
    rows.shared = (heads.key_dim * size_of::<f32>()) as u32;
    cuda::launch(device, source, "gated_delta_rule_norm_backward", rows, &[&args[..], &sizes(heads)].concat());
    let count = tokens * heads.value;
    let args = [
        (&gates).into(),
        (&d_gates).into(),
        inputs.beta_max.into(),
        (&mut d.b).into(),
        (&mut d.a).into(),
        (&mut d.a_log).into(),
        Arg::count(count),
        (slices(heads) as u32).into(),
    ];
    let source = KERNELS.same(&[&d.b, &d.a]);
    cuda::launch(device, source, "gated_delta_rule_gates_backward", Grid::items(count), &args);
}

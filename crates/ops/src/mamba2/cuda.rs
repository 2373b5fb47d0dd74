//! The state space in a GPU's memory: a block a head, sequence and slice of a state's columns, token by token.
use super::{Gradients, Heads, Inputs};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::recurrence::State;
use std::ops::Range;
use tunesmith_device::{Array, FloatBuffer};

static KERNELS: Typed = Typed::new("mamba2", include_str!("mamba2.cu"));

/// Columns of a state in a block, `SLICE` in the kernels.
const SLICE: usize = 64;
/// Tokens between two states that backward keeps, `CHUNK` in the kernels.
const CHUNK: usize = 64;
/// The most sequences that backward works on at a time: each has memory for a chunk's states.
const AT_A_TIME: usize = 2;

fn sizes(heads: Heads) -> [Arg; 4] {
    [heads.count, heads.groups, heads.dim, heads.state].map(|size| Arg::from(size as u32))
}

const fn slices(heads: Heads) -> usize {
    heads.dim.div_ceil(SLICE)
}

/// The starts of the sequences, and the end of the last.
fn ends(inputs: &Inputs<'_>, sequences: &[Range<usize>]) -> Array<u32> {
    let ends: Vec<u32> = std::iter::once(0).chain(sequences.iter().map(|sequence| sequence.end as u32)).collect();
    cuda::upload(inputs.xbc.device(), &ends)
}

/// A block for each head, of these sequences at a time and each slice, with so many floats of shared memory.
fn grid(heads: Heads, sequences: usize, shared: usize) -> Grid {
    let blocks = [heads.count, sequences, slices(heads)].map(|count| count as u32);
    Grid { blocks, threads: SLICE as u32, shared: (shared * size_of::<f32>()) as u32 }
}

/// The time steps and what follows from them.
fn steps(inputs: &Inputs<'_>, heads: Heads) -> Activation {
    let (tokens, device) = (inputs.dt.tokens(), inputs.dt.device());
    let mut steps = inputs.dt.pool().act_f32(tokens, 4 * heads.count);
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
    steps
}

pub(super) fn forward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    states: Option<&mut [&mut State]>,
    out: &mut Activation,
) {
    let device = inputs.xbc.device();
    let (steps, ends) = (steps(&inputs, heads), ends(&inputs, sequences));
    let states = states.map(|states| {
        let addresses: Vec<u64> = states.iter_mut().map(|state| state.floats.view().address()).collect();
        cuda::upload(device, &addresses)
    });
    let args = [
        inputs.xbc.into(),
        (&steps).into(),
        inputs.d.into(),
        (&ends).into(),
        states.as_ref().map_or(Arg::NULL, Arg::from),
        (&mut *out).into(),
    ];
    let grid = grid(heads, sequences.len(), heads.state * (SLICE + 2));
    let source = KERNELS.same(&[inputs.xbc, out]);
    cuda::launch(device, source, "mamba2_forward", grid, &[&args[..], &sizes(heads)].concat());
}

pub(super) fn backward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    dy: &Activation,
    d: &mut Gradients,
) {
    let (pool, tokens, device) = (inputs.xbc.pool(), inputs.xbc.tokens(), inputs.xbc.device());
    let (steps, ends, parts) = (steps(&inputs, heads), ends(&inputs, sequences), heads.count * slices(heads));
    let at_a_time = sequences.len().min(AT_A_TIME);
    let mut checkpoints = FloatBuffer::zeros(device, tokens.div_ceil(CHUNK) * parts * heads.state * SLICE);
    // As much for one sequence: what a pass takes does not depend on how many it has.
    let mut history = FloatBuffer::zeros(device, AT_A_TIME * parts * (CHUNK + 1) * heads.state * SLICE);
    let mut d_rows = pool.act_f32(tokens, parts * 2 * heads.state);
    let mut d_steps = pool.act_f32(tokens, parts * 3);
    let args = [
        inputs.xbc.into(),
        (&steps).into(),
        inputs.d.into(),
        (&ends).into(),
        (sequences.len() as u32).into(),
        dy.into(),
        (&mut d.xbc).into(),
        (&mut checkpoints).into(),
        (&mut history).into(),
        (&mut d_rows).into(),
        (&mut d_steps).into(),
    ];
    let of_block = grid(heads, at_a_time, heads.state * (SLICE + 2) + 2 * SLICE);
    let source = KERNELS.same(&[inputs.xbc, dy, &d.xbc]);
    cuda::launch(device, source, "mamba2_backward", of_block, &[&args[..], &sizes(heads)].concat());
    let args = [(&d_rows).into(), (&mut d.xbc).into(), (slices(heads) as u32).into()];
    let rows = Grid::rows(tokens * 2 * heads.groups, heads.state);
    cuda::launch(device, source, "mamba2_rows_backward", rows, &[&args[..], &sizes(heads)].concat());
    let count = tokens * heads.count;
    let args = [
        (&steps).into(),
        (&d_steps).into(),
        inputs.a_log.into(),
        (&mut d.dt).into(),
        (&mut d.a_log).into(),
        (&mut d.d).into(),
        Arg::count(count),
        (slices(heads) as u32).into(),
        (heads.count as u32).into(),
    ];
    let source = KERNELS.same(&[&d.dt]);
    cuda::launch(device, source, "mamba2_steps_backward", Grid::items(count), &args);
}

//! A task a sequence and head; backward has some heads of a group in a task, which share the gradients of B and C.
mod kernels;
mod rows;

use super::{Gradients, Heads, Inputs};
use crate::activation::{Activation, LANES};
use crate::par::{self, Shared};
use crate::recurrence::{Block, Chunk, Scratch, State, add_rows, chunks, read_block, write_block};
use kernels::{Backward, Forward, Sums, backward_chunk, forward_chunk};
use rows::Steps;
pub(super) use rows::Turned;
use std::ops::Range;
use tunesmith_cpu_slice::CpuSlice as _;

/// About how many tasks backward has of a sequence: few groups are cut into parts, each with gradients of B and C of its own.
const TASKS: usize = 16;

/// Parts of a group's heads in backward.
fn parts(heads: Heads) -> usize {
    (TASKS / heads.groups).clamp(1, heads.group())
}

/// The heads of a task of backward, `part` of `parts` of a group.
fn heads_of(heads: Heads, task: usize) -> Range<usize> {
    let (parts, all) = (parts(heads), heads.group());
    let (group, part) = (task / parts, task % parts);
    group * all + part * all / parts..group * all + (part + 1) * all / parts
}

pub(super) fn forward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    states: Option<&mut [&mut State]>,
    out: &mut Activation,
) {
    let (turned, shape) = (Turned::new(inputs.xbc, heads), heads.state());
    let states: Option<Vec<Shared<f32>>> = states.map(|states| {
        states.iter_mut().map(|state| Shared(state.floats.view_mut().cpu_slice().as_mut_ptr())).collect()
    });
    let (to, stride) = (out.shared(), out.stride());
    par::run(sequences.len() * heads.count, |task| {
        let (sequence, head) = (task / heads.count, task % heads.count);
        let mut scratch = Scratch::new(if states.is_some() { 0 } else { shape.groups() * shape.group_floats() });
        let state = match &states {
            // SAFETY: a state has the floats of all groups of columns of each head, and `head` is below `heads.count`; no other
            // task has this sequence and head.
            Some(states) => unsafe { states[sequence].get().add(shape.place(head, 0)) },
            None => scratch.ptr(),
        };
        for chunk in chunks(&sequences[sequence]) {
            let steps = Steps::of_chunk(&inputs, head, &chunk);
            for group in 0..shape.groups() {
                let columns = shape.columns_of(head, group);
                let (x, mut results) = (read_block(inputs.xbc, &chunk, columns.start, columns.len()), Block::default());
                // SAFETY: `group` is below the number of groups, so that its floats are among those of the head's state.
                let state = unsafe { state.add(shape.place(0, group)) };
                let call = call(&inputs, &turned, heads, head, &chunk, (&steps, &x), (state, 0));
                // SAFETY: `call` has rows of `chunk.len` tokens; the state has a group's floats, and all tokens have the same.
                unsafe { forward_chunk(&call, &mut results) };
                // SAFETY: `out` has a token for each of `xbc` and the features of all heads: those of `columns` at the chunk's
                // tokens are in it, and no other task's.
                unsafe { write_block(&results, &chunk, to.get().add(chunk.panel * stride), columns) };
            }
        }
    });
}

/// What the kernels need of a chunk, with the place of the state before it and how far apart the states behind its tokens are.
fn call<'a>(
    inputs: &Inputs<'_>,
    turned: &Turned,
    heads: Heads,
    head: usize,
    chunk: &Chunk,
    (steps, x): (&'a Steps, &'a Block),
    (state, stride): (*mut f32, usize),
) -> Forward<'a> {
    let [b, c] = turned.at(head / heads.group(), chunk);
    let (d, rows) = (inputs.d.cpu_slice()[head], heads.state().padded());
    Forward { b, c, x, step: &steps.step, decay: &steps.decay, d, tokens: chunk.len, rows, state, stride }
}

/// What backward needs beside its results: memory for the states before each panel, of some columns of one head of each task; the
/// gradients of B and C of each task; and B and C row by row.
pub(super) fn scratch(inputs: Inputs<'_>, heads: Heads) -> (Activation, Activation, Turned) {
    let turned = Turned::new(inputs.xbc, heads);
    let (pool, tokens, tasks) = (inputs.xbc.pool(), inputs.xbc.tokens(), heads.groups * parts(heads));
    let states = pool.act_f32(tokens, tasks * heads.state().group_floats() / LANES);
    (states, pool.act_f32(tokens, tasks * 2 * heads.state), turned)
}

/// The operands of the backward pass.
struct Pass<'a> {
    inputs: Inputs<'a>,
    heads: Heads,
    turned: &'a Turned,
    dy: &'a Activation,
    /// Floats of a panel of the gradients of x, B and C.
    stride: usize,
    d_xbc: Shared<f32>,
    d_dt: Shared<f32>,
    d_rate: Shared<f32>,
    d_d: Shared<f32>,
    checkpoints: Shared<f32>,
    /// The gradients of B and C of each task, `[tokens, tasks][B, C][state]`.
    d_bc: Shared<f32>,
}

pub(super) fn backward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    dy: &Activation,
    d: &mut Gradients,
) {
    let (mut checkpoints, mut d_bc, turned) = scratch(inputs, heads);
    let (stride, shape, tasks) = (d.xbc.stride(), heads.state(), heads.groups * parts(heads));
    d_bc.zero();
    for sum in [&mut d.dt, &mut d.a_log, &mut d.d] {
        sum.zero();
    }
    let pass = Pass {
        inputs,
        heads,
        turned: &turned,
        dy,
        stride,
        d_xbc: d.xbc.shared(),
        d_dt: d.dt.shared(),
        d_rate: d.a_log.shared(),
        d_d: d.d.shared(),
        checkpoints: checkpoints.shared(),
        d_bc: d_bc.shared(),
    };
    par::run(sequences.len() * tasks, |task| {
        let (sequence, task) = (&sequences[task / tasks], task % tasks);
        let mut scratch =
            [(LANES + 1) * shape.group_floats(), shape.group_floats(), 2 * LANES * shape.padded()].map(Scratch::new);
        for head in heads_of(heads, task) {
            for group in 0..shape.groups() {
                pass.columns_backward(sequence, task, head, group, &mut scratch);
            }
        }
    });
    let to = d.xbc.shared();
    par::run(d_bc.panels(), |panel| {
        let from = d_bc.panel(panel);
        for group in 0..heads.groups {
            for feature in 0..2 * heads.state {
                let mut sum = [0.0f32; LANES];
                for task in group * parts(heads)..(group + 1) * parts(heads) {
                    let lanes = &from[(task * 2 * heads.state + feature) * LANES..][..LANES];
                    sum.iter_mut().zip(lanes).for_each(|(sum, value)| *sum += value);
                }
                let (which, row) = (feature / heads.state, feature % heads.state);
                let place = heads.values() + (which * heads.groups + group) * heads.state + row;
                // SAFETY: the feature is one of B or C of a group, so that it is among those of `xbc`; this task alone has the
                // panel.
                unsafe {
                    let place = to.get().add(panel * stride + place * LANES);
                    std::ptr::copy_nonoverlapping(sum.as_ptr(), place, LANES);
                }
            }
        }
    });
}

impl Pass<'_> {
    /// The gradients that some columns of a head add.
    fn columns_backward(
        &self,
        sequence: &Range<usize>,
        task: usize,
        head: usize,
        group: usize,
        scratch: &mut [Scratch; 3],
    ) {
        let Self { inputs, heads, turned, .. } = *self;
        let (shape, tasks) = (heads.state(), heads.groups * parts(heads));
        let (own, rows, columns) = (shape.group_floats(), shape.padded(), shape.columns_of(head, group));
        let [states, d_state, d_rows] = scratch;
        states.zero();
        d_state.zero();
        let read = |act: &Activation, chunk: &Chunk| read_block(act, chunk, columns.start, columns.len());
        // SAFETY: a checkpoint is of a panel and a task, `tasks * own` floats a panel, as `scratch` has them.
        let checkpoint = |chunk: &Chunk| unsafe { self.checkpoints.get().add(chunk.panel * tasks * own + task * own) };
        let mut ignored = Block::default();
        for chunk in chunks(sequence) {
            let (steps, x) = (Steps::of_chunk(&inputs, head, &chunk), read(inputs.xbc, &chunk));
            let state = states.ptr();
            if !chunk.is_first {
                // SAFETY: both have `own` floats. A chunk that is not the first begins with its panel, so that no other sequence
                // has this task's checkpoint there.
                unsafe { std::ptr::copy_nonoverlapping(state, checkpoint(&chunk), own) };
            }
            let call = call(&inputs, turned, heads, head, &chunk, (&steps, &x), (state, 0));
            // SAFETY: as in `forward`.
            unsafe { forward_chunk(&call, &mut ignored) };
        }
        for chunk in chunks(sequence).rev() {
            let (steps, x) = (Steps::of_chunk(&inputs, head, &chunk), read(inputs.xbc, &chunk));
            let (d_out, state) = (read(self.dy, &chunk), states.ptr());
            if chunk.is_first {
                states.zero();
            } else {
                // SAFETY: as where the checkpoint was written.
                unsafe { std::ptr::copy_nonoverlapping(checkpoint(&chunk).cast_const(), state, own) };
            }
            let call = call(&inputs, turned, heads, head, &chunk, (&steps, &x), (state, own));
            // SAFETY: as in `forward`; `states` has room for the state before a chunk and behind each of its tokens.
            unsafe { forward_chunk(&call, &mut ignored) };
            let (mut dx, mut sums, db) = (Block::default(), Sums::default(), d_rows.ptr());
            let dc = db.wrapping_add(LANES * rows);
            let (d_out, d_state) = (&d_out, d_state.ptr());
            // SAFETY: `d_rows` has 16 rows twice, `d_state` the floats of a group.
            unsafe { backward_chunk(&Backward { forward: call, d_out, d_state, db, dc }, &mut dx, &mut sums) };
            let panel = self.d_xbc.get().wrapping_add(chunk.panel * self.stride);
            // SAFETY: the features of this head's values at the tokens of its sequence: no other task's.
            unsafe { write_block(&dx, &chunk, panel, columns.clone()) };
            let panel = self.d_bc.get().wrapping_add(chunk.panel * tasks * 2 * heads.state * LANES);
            // SAFETY: `d_bc` has B and C of each task; no other task has these at the tokens of this sequence.
            unsafe {
                let at = |which: usize| panel.add((2 * task + which) * heads.state * LANES);
                add_rows(db, rows, &chunk, at(0), heads.state);
                add_rows(dc, rows, &chunk, at(1), heads.state);
            }
            for (index, lane) in chunk.lanes().enumerate() {
                let place = chunk.panel * heads.count * LANES + head * LANES + lane;
                let [dt, rate] = steps.chain(index, sums.step[index], sums.g[index]);
                // SAFETY: the place of this token and head in an activation of `[tokens, heads.count]`: no other task's.
                unsafe {
                    *self.d_dt.get().add(place) += dt;
                    *self.d_rate.get().add(place) += rate;
                    *self.d_d.get().add(place) += sums.d[index];
                }
            }
        }
    }
}

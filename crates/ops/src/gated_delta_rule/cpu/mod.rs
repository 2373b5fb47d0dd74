//! A task a sequence and head. A chunk is what a sequence has in one panel of 16 tokens.
mod kernels;
mod rows;

use super::{Gradients, Heads, Inputs};
use crate::activation::{Activation, LANES};
use crate::par::{self, Shared};
use crate::recurrence::{Block, Chunk, Scratch, State, add_rows, chunks, read_block, write_block};
use kernels::{Backward, Forward, backward_chunk, forward_chunk};
pub(super) use rows::Normed;
use rows::{Gate, norm_backward};
use std::ops::Range;
use tunesmith_cpu_slice::CpuSlice as _;

pub(super) fn forward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    states: Option<&mut [&mut State]>,
    out: &mut Activation,
) {
    let (normed, shape) = (Normed::new(inputs.qkv, heads), heads.state());
    let states: Option<Vec<Shared<f32>>> = states.map(|states| {
        states.iter_mut().map(|state| Shared(state.floats.view_mut().cpu_slice().as_mut_ptr())).collect()
    });
    let (to, stride) = (out.shared(), out.stride());
    par::run(sequences.len() * heads.value, |task| {
        let (sequence, head) = (task / heads.value, task % heads.value);
        let mut scratch = Scratch::new(if states.is_some() { 0 } else { shape.groups() * shape.group_floats() });
        let state = match &states {
            // SAFETY: a state has the floats of all groups of each head, and `head` is below `heads.value`; no other task
            // has this sequence and head.
            Some(states) => unsafe { states[sequence].get().add(shape.place(head, 0)) },
            None => scratch.ptr(),
        };
        for chunk in chunks(&sequences[sequence]) {
            let gates = Gate::of_chunk(&inputs, head, &chunk);
            for group in 0..shape.groups() {
                let columns = shape.columns_of(head, group);
                let (mut results, mut miss) = (Block::default(), Block::default());
                let v = read_block(inputs.qkv, &chunk, 2 * heads.keys() + columns.start, columns.len());
                // SAFETY: `group` is below the number of groups, so that its floats are among those of the head's state.
                let state = unsafe { state.add(shape.place(0, group)) };
                let call = part(&normed, heads, head, &chunk, &gates, &v, (state, 0));
                // SAFETY: `part` gives keys of `chunk.len` tokens; the state has a group's floats, and all tokens have the same.
                unsafe { forward_chunk(&call, &mut results, &mut miss) };
                // SAFETY: `out` has a token for each of `qkv` and the features of all heads: those of `columns` at the chunk's
                // tokens are in it, and no other task's.
                unsafe { write_block(&results, &chunk, to.get().add(chunk.panel * stride), columns) };
            }
        }
    });
}

/// What the kernels need of a chunk, with the place of the state before it and how far apart the states behind its tokens are.
fn part<'a>(
    normed: &Normed,
    heads: Heads,
    head: usize,
    chunk: &Chunk,
    gates: &'a Gate,
    v: &'a Block,
    (state, stride): (*mut f32, usize),
) -> Forward<'a> {
    let [q, k] = normed.at(head / heads.group(), chunk);
    let (tokens, keys) = (chunk.len, heads.state().padded());
    Forward { q, k, v, beta: &gates.beta, decay: &gates.decay, tokens, keys, state, stride }
}

/// What backward needs beside its results: memory for the states before each panel, of some columns of one value head of each key
/// head; and `q̂` and `k̂`.
pub(super) fn scratch(inputs: Inputs<'_>, heads: Heads) -> (Activation, Normed) {
    let normed = Normed::new(inputs.qkv, heads);
    let floats = heads.key * heads.state().group_floats();
    (inputs.qkv.pool().act_f32(inputs.qkv.tokens(), floats / LANES), normed)
}

/// The operands of the backward pass.
struct Pass<'a> {
    inputs: Inputs<'a>,
    heads: Heads,
    normed: &'a Normed,
    dy: &'a Activation,
    /// Floats of a panel of the gradients of q, k and v.
    stride: usize,
    d_qkv: Shared<f32>,
    d_b: Shared<f32>,
    d_a: Shared<f32>,
    d_rate: Shared<f32>,
    checkpoints: Shared<f32>,
}

pub(super) fn backward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    dy: &Activation,
    d: &mut Gradients,
) {
    let (mut checkpoints, normed) = scratch(inputs, heads);
    let (stride, shape) = (d.qkv.stride(), heads.state());
    let pass = Pass {
        inputs,
        heads,
        normed: &normed,
        dy,
        stride,
        d_qkv: d.qkv.shared(),
        d_b: d.b.shared(),
        d_a: d.a.shared(),
        d_rate: d.a_log.shared(),
        checkpoints: checkpoints.shared(),
    };
    par::run(sequences.len() * heads.key, |task| {
        let (sequence, key) = (&sequences[task / heads.key], task % heads.key);
        pass.clear(sequence, key);
        let mut scratch =
            [(LANES + 1) * shape.group_floats(), shape.group_floats(), 2 * LANES * shape.padded()].map(Scratch::new);
        for head in key * heads.group()..(key + 1) * heads.group() {
            for group in 0..shape.groups() {
                pass.columns_backward(sequence, head, group, &mut scratch);
            }
        }
        for chunk in chunks(sequence) {
            // SAFETY: as for `clear`: these features at these tokens are this task's.
            unsafe { norm_backward(inputs.qkv, heads, key, &chunk, pass.d_qkv.get().add(chunk.panel * stride)) };
        }
    });
}

impl Pass<'_> {
    /// Sets the gradients to zero that a sequence's tokens have of a key head: those that are sums.
    fn clear(&self, sequence: &Range<usize>, key: usize) {
        let heads = self.heads;
        for chunk in chunks(sequence) {
            let lanes = chunk.lanes();
            let zero = |place: &Shared<f32>, stride: usize, features: Range<usize>| {
                for feature in features {
                    for lane in lanes.clone() {
                        // SAFETY: the place is of a panel, feature and token of the activation, whose panels have `stride`
                        // floats; this task alone has this head at the tokens of this sequence.
                        unsafe { *place.get().add(chunk.panel * stride + feature * LANES + lane) = 0.0 };
                    }
                }
            };
            for first in [0, heads.keys()] {
                let first = first + key * heads.key_dim;
                zero(&self.d_qkv, self.stride, first..first + heads.key_dim);
            }
            for gate in [&self.d_b, &self.d_a, &self.d_rate] {
                zero(gate, heads.value * LANES, key * heads.group()..(key + 1) * heads.group());
            }
        }
    }

    /// The gradients that some columns of a value head add.
    fn columns_backward(&self, sequence: &Range<usize>, head: usize, group: usize, scratch: &mut [Scratch; 3]) {
        let Self { inputs, heads, normed, .. } = *self;
        let (shape, key) = (heads.state(), head / heads.group());
        let (own, keys, columns) = (shape.group_floats(), shape.padded(), shape.columns_of(head, group));
        let [states, d_state, d_keys] = scratch;
        states.zero();
        d_state.zero();
        let value = |chunk: &Chunk| read_block(inputs.qkv, chunk, 2 * heads.keys() + columns.start, columns.len());
        // SAFETY: a checkpoint is of a panel and a key head, `heads.key * own` floats a panel, as `scratch` has them.
        let checkpoint =
            |chunk: &Chunk| unsafe { self.checkpoints.get().add(chunk.panel * heads.key * own + key * own) };
        let (mut ignored, mut miss) = (Block::default(), Block::default());
        for chunk in chunks(sequence) {
            let (gates, v) = (Gate::of_chunk(&inputs, head, &chunk), value(&chunk));
            let state = states.ptr();
            if !chunk.is_first {
                // SAFETY: both have `own` floats. A chunk that is not the first begins with its panel, so that no other task
                // has this key head's checkpoint there.
                unsafe { std::ptr::copy_nonoverlapping(state, checkpoint(&chunk), own) };
            }
            let call = part(normed, heads, head, &chunk, &gates, &v, (state, 0));
            // SAFETY: as in `forward`.
            unsafe { forward_chunk(&call, &mut ignored, &mut miss) };
        }
        for chunk in chunks(sequence).rev() {
            let (gates, v) = (Gate::of_chunk(&inputs, head, &chunk), value(&chunk));
            let d_out = read_block(self.dy, &chunk, columns.start, columns.len());
            let state = states.ptr();
            if chunk.is_first {
                states.zero();
            } else {
                // SAFETY: as where the checkpoint was written.
                unsafe { std::ptr::copy_nonoverlapping(checkpoint(&chunk).cast_const(), state, own) };
            }
            d_keys.zero();
            let call = part(normed, heads, head, &chunk, &gates, &v, (state, own));
            // SAFETY: as in `forward`; `states` has room for the state before a chunk and behind each of its tokens.
            unsafe { forward_chunk(&call, &mut ignored, &mut miss) };
            let (mut dv, mut d_beta, mut d_g) = (Block::default(), [0.0; LANES], [0.0; LANES]);
            let dq = d_keys.ptr();
            let dk = dq.wrapping_add(LANES * keys);
            let (miss, d_out, d_state) = (&miss, &d_out, d_state.ptr());
            let call = Backward { forward: call, miss, d_out, d_state, dq, dk };
            // SAFETY: `d_keys` has 16 rows of keys twice, `d_state` the floats of a group.
            unsafe { backward_chunk(&call, &mut dv, &mut d_beta, &mut d_g) };
            let panel = self.d_qkv.get().wrapping_add(chunk.panel * self.stride);
            // SAFETY: the features of this head's values, and of the key head of this task, at the tokens of its sequence: no
            // other task's.
            unsafe {
                let first = 2 * heads.keys();
                write_block(&dv, &chunk, panel, first + columns.start..first + columns.end);
                let at = |which: usize| panel.add((which * heads.keys() + key * heads.key_dim) * LANES);
                add_rows(dq, keys, &chunk, at(0), heads.key_dim);
                add_rows(dk, keys, &chunk, at(1), heads.key_dim);
            }
            for (index, lane) in chunk.lanes().enumerate() {
                let place = chunk.panel * heads.value * LANES + head * LANES + lane;
                let [b, a, rate] = gates.chain(index, d_beta[index], d_g[index]);
                // SAFETY: the place of this token and head in an activation of `[tokens, heads.value]`: no other task's.
                unsafe {
                    *self.d_b.get().add(place) += b;
                    *self.d_a.get().add(place) += a;
                    *self.d_rate.get().add(place) += rate;
                }
            }
        }
    }
}

//! The recurrence over the tokens of a chunk, for 32 columns of one head's state, and its reverse.
use crate::activation::LANES;
use crate::recurrence::{Block, COLUMNS, sums_of};
use crate::simd::{Simd, dispatch};

/// A chunk of at most 16 tokens.
pub(super) struct Forward<'a> {
    /// B and C, `[tokens][rows]`.
    pub(super) b: *const f32,
    pub(super) c: *const f32,
    pub(super) x: &'a Block,
    /// The time step and `exp(g)` of each token.
    pub(super) step: &'a [f32; LANES],
    pub(super) decay: &'a [f32; LANES],
    /// `D` of the head.
    pub(super) d: f32,
    pub(super) tokens: usize,
    /// The width of B, filled up with zeros to a multiple of 16.
    pub(super) rows: usize,
    /// `[rows][32]` before the first token; that behind token `t` is `stride` floats times `t + 1` further on.
    pub(super) state: *mut f32,
    pub(super) stride: usize,
}

/// Writes states and the outputs.
///
/// # Safety
/// The features of `S`; the arrays are as large as [`Forward`] says.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(chunk: &Forward<'_>, out: &mut Block) {
    for (token, out) in out.iter_mut().enumerate().take(chunk.tokens) {
        // SAFETY: `token` is below `tokens`, rows are below `rows`, a multiple of 16; a row of a state has two vectors.
        unsafe {
            let (b, c) = (chunk.b.add(token * chunk.rows), chunk.c.add(token * chunk.rows));
            let (from, to) =
                (chunk.state.add(token * chunk.stride).cast_const(), chunk.state.add((token + 1) * chunk.stride));
            let (decay, step) = (S::splat(chunk.decay[token]), S::splat(chunk.step[token]));
            let x = [0, LANES].map(|half| S::load(chunk.x[token].as_ptr().add(half)));
            let u = x.map(|x| S::mul(step, x));
            // Four sums of each vector: one waits for itself.
            let mut sums = [[S::splat(0.0); 2]; 4];
            for row in (0..chunk.rows).step_by(4) {
                for (part, sum) in sums.iter_mut().enumerate() {
                    let at = (row + part) * COLUMNS;
                    let (write, read) = (S::splat(*b.add(row + part)), S::splat(*c.add(row + part)));
                    for (half, sum) in sum.iter_mut().enumerate() {
                        let kept = S::mul(decay, S::load(from.add(at + half * LANES)));
                        let state = S::fma(write, u[half], kept);
                        S::store(to.add(at + half * LANES), state);
                        *sum = S::fma(read, state, *sum);
                    }
                }
            }
            for half in 0..2 {
                let sum = S::add(S::add(sums[0][half], sums[1][half]), S::add(sums[2][half], sums[3][half]));
                S::store(out.as_mut_ptr().add(half * LANES), S::fma(S::splat(chunk.d), x[half], sum));
            }
        }
    }
}

dispatch! {
    pub(super) fn forward_chunk = forward_kernel(chunk: &Forward<'_>, out: &mut Block);
}

/// The reverse of a chunk.
pub(super) struct Backward<'a> {
    /// As forward was called, with the states of all its tokens.
    pub(super) forward: Forward<'a>,
    pub(super) d_out: &'a Block,
    /// `[rows][32]`: of the state behind the chunk, then of that before it.
    pub(super) d_state: *mut f32,
    /// `[tokens][rows]`, written.
    pub(super) db: *mut f32,
    pub(super) dc: *mut f32,
}

/// What a token adds to the gradients of a head's numbers.
#[derive(Default)]
pub(super) struct Sums {
    /// To that of the time step, without what its decay adds.
    pub(super) step: [f32; LANES],
    /// To that of `g`.
    pub(super) g: [f32; LANES],
    /// To that of `D`.
    pub(super) d: [f32; LANES],
}

/// Writes the gradients of `x`, and those of a head's numbers.
///
/// # Safety
/// The features of `S`; the arrays are as large as [`Backward`] says.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(chunk: &Backward<'_>, dx: &mut Block, sums: &mut Sums) {
    let of = &chunk.forward;
    for token in (0..of.tokens).rev() {
        // SAFETY: `token` is below `tokens`, rows are below `rows`, a multiple of 16; a row of a state has two vectors.
        unsafe {
            let (b, c) = (of.b.add(token * of.rows), of.c.add(token * of.rows));
            let before = of.state.add(token * of.stride).cast_const();
            let behind = of.state.add((token + 1) * of.stride).cast_const();
            let none = S::splat(0.0);
            let (decay, step) = (S::splat(of.decay[token]), S::splat(of.step[token]));
            let x = [0, LANES].map(|half| S::load(of.x[token].as_ptr().add(half)));
            let d_out = [0, LANES].map(|half| S::load(chunk.d_out[token].as_ptr().add(half)));
            let u = x.map(|x| S::mul(step, x));
            let (mut du, mut change) = ([[none; 2]; 2], [none; 2]);
            let (mut b_parts, mut c_parts) = ([none; LANES], [none; LANES]);
            for first in (0..of.rows).step_by(LANES) {
                for row in 0..LANES {
                    let (write, read) = (S::splat(*b.add(first + row)), S::splat(*c.add(first + row)));
                    let (mut to_b, mut to_c) = (none, none);
                    for half in 0..2 {
                        let at = (first + row) * COLUMNS + half * LANES;
                        let place = chunk.d_state.add(at);
                        let ds = S::fma(read, d_out[half], S::load(place));
                        to_c = S::fma(S::load(behind.add(at)), d_out[half], to_c);
                        to_b = S::fma(ds, u[half], to_b);
                        du[row % 2][half] = S::fma(write, ds, du[row % 2][half]);
                        let kept = S::mul(decay, S::load(before.add(at)));
                        change[half] = S::fma(ds, kept, change[half]);
                        S::store(place, S::mul(decay, ds));
                    }
                    (b_parts[row], c_parts[row]) = (to_b, to_c);
                }
                S::store(chunk.db.add(token * of.rows + first), sums_of::<S>(&b_parts));
                S::store(chunk.dc.add(token * of.rows + first), sums_of::<S>(&c_parts));
            }
            let du = [0, 1].map(|half| S::add(du[0][half], du[1][half]));
            for half in 0..2 {
                let through = S::mul(S::splat(of.d), d_out[half]);
                S::store(dx[token].as_mut_ptr().add(half * LANES), S::fma(step, du[half], through));
            }
            let mut lanes = [0.0f32; LANES];
            let mut total = |vector: S::V| {
                S::store(lanes.as_mut_ptr(), vector);
                lanes.iter().sum::<f32>()
            };
            sums.step[token] = total(S::fma(du[0], x[0], S::mul(du[1], x[1])));
            sums.g[token] = total(S::add(change[0], change[1]));
            sums.d[token] = total(S::fma(d_out[0], x[0], S::mul(d_out[1], x[1])));
        }
    }
}

dispatch! {
    pub(super) fn backward_chunk = backward_kernel(chunk: &Backward<'_>, dx: &mut Block, sums: &mut Sums);
}

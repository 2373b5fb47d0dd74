//! The recurrence over the tokens of a chunk, for 32 columns of one head's state, and its reverse.
//!
//! Columns of a state do not depend on each other: 32 of them, `[keys][32]`, stay in the nearest cache while a chunk's tokens
//! pass. `keys` is the width of keys filled up with zeros to a multiple of 16.
use crate::activation::LANES;
use crate::recurrence::{Block, COLUMNS, sums_of};
use crate::simd::{Simd, dispatch};

/// A chunk of at most 16 tokens.
pub(super) struct Forward<'a> {
    /// `q̂` and `k̂`, `[tokens][keys]`.
    pub(super) q: *const f32,
    pub(super) k: *const f32,
    pub(super) v: &'a Block,
    /// `beta` and `exp(g)` of each token.
    pub(super) beta: &'a [f32; LANES],
    pub(super) decay: &'a [f32; LANES],
    pub(super) tokens: usize,
    pub(super) keys: usize,
    /// `[keys][32]` before the first token; that behind token `t` is `stride` floats times `t + 1` further on.
    pub(super) state: *mut f32,
    pub(super) stride: usize,
}

/// Writes states, the outputs, and `miss = v - T' k̂` of each token.
///
/// # Safety
/// The features of `S`; the arrays are as large as [`Forward`] says.
#[inline(always)]
unsafe fn forward_kernel<S: Simd>(chunk: &Forward<'_>, out: &mut Block, miss: &mut Block) {
    let zero = [[0.0f32; LANES]; 1];
    for token in 0..chunk.tokens {
        // SAFETY: `token` is below `tokens`, rows of keys below `keys`, a multiple of 16; a row of a state has two vectors.
        unsafe {
            let (q, k) = (chunk.q.add(token * chunk.keys), chunk.k.add(token * chunk.keys));
            let (from, to) =
                (chunk.state.add(token * chunk.stride).cast_const(), chunk.state.add((token + 1) * chunk.stride));
            let decay = S::splat(chunk.decay[token]);
            let none = S::load(zero[0].as_ptr());
            // Four sums of each vector: one waits for itself.
            let mut sums = [[none; 2]; 4];
            for row in (0..chunk.keys).step_by(4) {
                for (part, sum) in sums.iter_mut().enumerate() {
                    let (key, place) = (S::splat(*k.add(row + part)), from.add((row + part) * COLUMNS));
                    sum[0] = S::fma(key, S::load(place), sum[0]);
                    sum[1] = S::fma(key, S::load(place.add(LANES)), sum[1]);
                }
            }
            let mut u = [none; 2];
            for (half, u) in u.iter_mut().enumerate() {
                let found = S::add(S::add(sums[0][half], sums[1][half]), S::add(sums[2][half], sums[3][half]));
                let value = S::load(chunk.v[token].as_ptr().add(half * LANES));
                let missing = S::sub(value, S::mul(decay, found));
                S::store(miss[token].as_mut_ptr().add(half * LANES), missing);
                *u = S::mul(S::splat(chunk.beta[token]), missing);
            }
            let mut sums = [[none; 2]; 4];
            for row in (0..chunk.keys).step_by(4) {
                for (part, sum) in sums.iter_mut().enumerate() {
                    let at = (row + part) * COLUMNS;
                    let (key, query) = (S::splat(*k.add(row + part)), S::splat(*q.add(row + part)));
                    let low = S::fma(key, u[0], S::mul(decay, S::load(from.add(at))));
                    let high = S::fma(key, u[1], S::mul(decay, S::load(from.add(at + LANES))));
                    S::store(to.add(at), low);
                    S::store(to.add(at + LANES), high);
                    sum[0] = S::fma(query, low, sum[0]);
                    sum[1] = S::fma(query, high, sum[1]);
                }
            }
            let [first, second, third, fourth] = sums;
            let pairs = first.into_iter().zip(second).zip(third).zip(fourth);
            for (half, (((first, second), third), fourth)) in pairs.enumerate() {
                let sum = S::add(S::add(first, second), S::add(third, fourth));
                S::store(out[token].as_mut_ptr().add(half * LANES), sum);
            }
        }
    }
}

dispatch! {
    pub(super) fn forward_chunk = forward_kernel(chunk: &Forward<'_>, out: &mut Block, miss: &mut Block);
}

/// The gradients of a chunk, whose states [`forward_chunk`] left behind each other.
pub(super) struct Backward<'a> {
    pub(super) forward: Forward<'a>,
    pub(super) miss: &'a Block,
    /// Of the outputs.
    pub(super) d_out: &'a Block,
    /// `[keys][32]`: of the state behind the chunk, then of that before it.
    pub(super) d_state: *mut f32,
    /// `[tokens][keys]`, added to.
    pub(super) dq: *mut f32,
    pub(super) dk: *mut f32,
}

/// Writes the gradients of `v`, of `beta` and of `g` of each token.
///
/// # Safety
/// The features of `S`; the arrays are as large as [`Backward`] says.
#[inline(always)]
unsafe fn backward_kernel<S: Simd>(chunk: &Backward<'_>, dv: &mut Block, d_beta: &mut [f32], d_g: &mut [f32]) {
    let (keys, of) = (chunk.forward.keys, &chunk.forward);
    for token in (0..of.tokens).rev() {
        // SAFETY: `token` is below `tokens`, rows of keys below `keys`, a multiple of 16; a row of a state has two vectors.
        unsafe {
            let (q, k) = (of.q.add(token * keys), of.k.add(token * keys));
            let before = of.state.add(token * of.stride).cast_const();
            let behind = of.state.add((token + 1) * of.stride).cast_const();
            let none = S::splat(0.0);
            let d_out = [0, LANES].map(|half| S::load(chunk.d_out[token].as_ptr().add(half)));
            let mut du = [[none; 2]; 2];
            let mut parts = [none; LANES];
            for first in (0..keys).step_by(LANES) {
                for (row, part) in parts.iter_mut().enumerate() {
                    let (key, query) = (S::splat(*k.add(first + row)), S::splat(*q.add(first + row)));
                    let place = chunk.d_state.add((first + row) * COLUMNS);
                    let low = S::fma(query, d_out[0], S::load(place));
                    let high = S::fma(query, d_out[1], S::load(place.add(LANES)));
                    S::store(place, low);
                    S::store(place.add(LANES), high);
                    let du = &mut du[row % 2];
                    du[0] = S::fma(key, low, du[0]);
                    du[1] = S::fma(key, high, du[1]);
                    let state = behind.add((first + row) * COLUMNS);
                    *part = S::fma(S::load(state.add(LANES)), d_out[1], S::mul(S::load(state), d_out[0]));
                }
                let place = chunk.dq.add(token * keys + first);
                S::store(place, S::add(S::load(place), sums_of::<S>(&parts)));
            }
            let du = [0, 1].map(|half| S::add(du[0][half], du[1][half]));
            let (beta, decay) = (S::splat(of.beta[token]), S::splat(of.decay[token]));
            let missing = [0, LANES].map(|half| S::load(chunk.miss[token].as_ptr().add(half)));
            let (c, u) = (du.map(|du| S::mul(beta, du)), missing.map(|missing| S::mul(beta, missing)));
            S::store(dv[token].as_mut_ptr(), c[0]);
            S::store(dv[token].as_mut_ptr().add(LANES), c[1]);
            let mut lanes = [0.0f32; LANES];
            S::store(lanes.as_mut_ptr(), S::fma(du[0], missing[0], S::mul(du[1], missing[1])));
            d_beta[token] = lanes.iter().sum();
            let mut change = [none; 2];
            for first in (0..keys).step_by(LANES) {
                for (row, part) in parts.iter_mut().enumerate() {
                    let (key, at) = (S::splat(*k.add(first + row)), (first + row) * COLUMNS);
                    let mut sum = none;
                    for (half, change) in change.iter_mut().enumerate() {
                        let place = chunk.d_state.add(at + half * LANES);
                        let (ds, kept) = (S::load(place), S::mul(decay, S::load(before.add(at + half * LANES))));
                        sum = S::fma(ds, u[half], sum);
                        sum = S::sub(sum, S::mul(kept, c[half]));
                        let d_kept = S::sub(ds, S::mul(key, c[half]));
                        *change = S::fma(d_kept, kept, *change);
                        S::store(place, S::mul(decay, d_kept));
                    }
                    *part = sum;
                }
                let place = chunk.dk.add(token * keys + first);
                S::store(place, S::add(S::load(place), sums_of::<S>(&parts)));
            }
            S::store(lanes.as_mut_ptr(), S::add(change[0], change[1]));
            d_g[token] = lanes.iter().sum();
        }
    }
}

dispatch! {
    pub(super) fn backward_chunk = backward_kernel(chunk: &Backward<'_>, dv: &mut Block, d_beta: &mut [f32], d_g: &mut [f32]);
}

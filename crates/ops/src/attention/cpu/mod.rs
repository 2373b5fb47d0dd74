//! Attention on the CPU, tiled both ways: no `[tokens, tokens]` matrix ever exists.
//!
//! Forward: strips of 16 or 32 queries walk over blocks of keys with a running maximum (online softmax) and keep the
//! log-sum-exp. Backward: strips of keys walk over blocks of queries, with the probabilities made anew from it
//! (Dao et al., "FlashAttention-2", 2023, algorithms 1 and 2). A task is one key/value head of one sequence.
use crate::activation::LANES;
use crate::gemm::cpu::tile;
use crate::simd::Simd;
use crate::spans::Span;
use std::cell::RefCell;
use tunesmith_device::{Device, memory};

mod backward;
mod decode;
mod forward;
mod realign;

pub(super) use backward::backward;
pub(super) use decode::decode;
pub(super) use forward::forward;

const BLOCK: usize = LANES * LANES;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Lends `floats` floats of this thread's scratch memory, their values undefined, where the memory budget has room for them
/// ([`memory::admit`]).
fn with_scratch<R>(floats: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < floats {
            *scratch = Vec::new();
            *scratch = memory::admit(Device::Cpu, floats * size_of::<f32>(), || vec![0.0; floats]);
        }
        f(&mut scratch[..floats])
    })
}

/// Cuts a scratch into parts.
struct Cutter<'a>(&'a mut [f32]);

impl Cutter<'_> {
    fn take(&mut self, floats: usize) -> *mut f32 {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(floats);
        self.0 = rest;
        part.as_mut_ptr()
    }
}

/// The tasks of a batch, longest first, so that the last ones to finish are short.
fn tasks(spans: &[Span], kv: usize) -> Vec<(usize, usize)> {
    let mut order: Vec<usize> =
        (0..spans.len()).filter(|&s| !spans[s].positions.is_empty() || spans[s].keys > 0).collect();
    order.sort_by_key(|&s| std::cmp::Reverse(spans[s].keys * spans[s].positions.len().max(1)));
    order.into_iter().flat_map(|s| (0..kv).map(move |head| (s, head))).collect()
}

/// `to[panel j][row i] = sum_k matrix[i, k] x[k, panel j]`: matrix rows lie `row` floats apart, columns 16.
///
/// # Safety
/// The features of `S`; `matrix` and `x` are as [`tile`] asks, columns 16 apart; `to` has room for `ROWS` vectors in
/// each of `PANELS` panels, `to_stride` floats apart.
#[inline(always)]
unsafe fn score_tile<S: Simd, const ROWS: usize, const PANELS: usize>(
    depth: usize,
    matrix: *const f32,
    row: usize,
    x: *const f32,
    stride: usize,
    to: *mut f32,
    to_stride: usize,
) {
    // SAFETY: `tile` asks of `matrix` and `x` what this function asks; row and panel of `to` are below ROWS and PANELS.
    unsafe {
        let mut acc = [[S::splat(0.0); PANELS]; ROWS];
        tile::<S, ROWS, PANELS>(depth, matrix, row, LANES, x, stride, &mut acc);
        for (index, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::store(to.add(panel * to_stride + index * LANES), *sum);
            }
        }
    }
}

/// `to[panel j][row i] (+)= sum over blocks b, lanes t of matrix[b][i][t] x[b][t][panel j]`.
///
/// # Safety
/// The features of `S`. In each of `blocks` blocks `matrix` reaches `ROWS` vectors, and `x` 16 vectors in each of
/// `PANELS` panels, `x_stride` apart. `to` holds `ROWS` vectors in each of `PANELS` panels, `to_stride` floats apart,
/// and does not overlap them.
#[inline(always)]
unsafe fn sum_tile<S: Simd, const ROWS: usize, const PANELS: usize>(
    blocks: usize,
    matrix: *const f32,
    matrix_step: usize,
    x: *const f32,
    x_step: usize,
    x_stride: usize,
    to: *mut f32,
    to_stride: usize,
    add: bool,
) {
    // SAFETY: a block below `blocks` has the 16 columns that `tile` is asked for; row and panel of `to` are below ROWS
    // and PANELS.
    unsafe {
        let mut acc = [[S::splat(0.0); PANELS]; ROWS];
        if add {
            for (index, sums) in acc.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(to.add(panel * to_stride + index * LANES));
                }
            }
        }
        for block in 0..blocks {
            let (matrix, x) = (matrix.add(block * matrix_step), x.add(block * x_step));
            tile::<S, ROWS, PANELS>(LANES, matrix, LANES, 1, x, x_stride, &mut acc);
        }
        for (index, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::store(to.add(panel * to_stride + index * LANES), *sum);
            }
        }
    }
}

//! `out[m, n] += sum_t y[t, m] x[t, n]`, rows in parallel.
use super::{pairs, tile, tile_rows, transpose, with_tile};
use crate::activation::{Activation, LANES};
use crate::gemm::Transposed;
use crate::par;
use crate::scratch::with_scratch;
use crate::simd::{PairLanes, Simd, TileLanes, dispatch, dispatch_pairs};

/// Panels whose rows are rounded at once, where products are of pairs: 384 KiB of them.
const ROUNDED_PANELS: usize = 256;
/// The most rows of a task.
const TASK_ROWS: usize = 48;

/// Fills `act`, the copy that [`Transposed`] is, in pairs of tokens or in float32.
pub(in crate::gemm) fn transposed(x: &Activation, act: &mut Activation, in_pairs: bool) {
    let (features, blocks) = (x.features(), x.features().div_ceil(LANES));
    let (to, stride) = (act.shared(), act.stride());
    par::run(x.panels(), |panel| {
        let from = x.panel(panel);
        for block in 0..blocks {
            let count = LANES.min(features - block * LANES);
            // A block is 256 floats, and half as many in pairs.
            let floats = if in_pairs { LANES * LANES / 2 } else { LANES * LANES };
            // SAFETY: `Transposed::new` makes `act` with the panels of `x` and `blocks` blocks of 256 floats in each: a
            // place within.
            let to = unsafe { to.get().add(panel * stride + block * floats) };
            let from = from[block * LANES * LANES..].as_ptr();
            // SAFETY: `count` features of 16 lanes are left in the panel of `x`; the block of `act` is 256 floats, or 128, and
            // no other task has this panel.
            unsafe {
                if in_pairs {
                    let mut block = [0.0f32; LANES * LANES];
                    transpose(from, count, block.as_mut_ptr());
                    pairs::round_block(block.as_ptr(), to);
                } else {
                    transpose(from, count, to);
                }
            }
        }
    });
}

struct OuterJob {
    out: *mut f32,
    row: usize,
    col: usize,
    cols: usize,
    y: *const f32,
    y_stride: usize,
    x: *const f32,
    x_stride: usize,
    panels: usize,
}

// SAFETY: the operands stay borrowed while tasks run; each reads them and writes rows of `out` that no other task has.
unsafe impl Sync for OuterJob {}

/// # Safety
/// The features of `S`; the rows `m..m + ROWS` are some of `y` and `out`, and no other task has them. The blocks
/// `block..block + BLOCKS` are some of `x`. A row of `y` is `lanes` lanes: 16 tokens, or
/// 8 pairs of them.
#[inline(always)]
unsafe fn outer_tile<S: TileLanes, const ROWS: usize, const BLOCKS: usize>(
    job: &OuterJob,
    lanes: usize,
    m: usize,
    block: usize,
) {
    // SAFETY: each turn of the first loop reads `ROWS` rows of 16 tokens of `y` and `BLOCKS` blocks of 256 floats of
    // `x`, of a panel below `panels`. `out` is read and written at columns below `cols` of the rows alone; a whole
    // vector only where 16 columns are left and lie end to end.
    unsafe {
        let mut acc = [[S::broadcast(0.0); BLOCKS]; ROWS];
        for panel in 0..job.panels {
            tile::<S, ROWS, BLOCKS>(
                lanes,
                job.y.wrapping_add(panel * job.y_stride + m * lanes),
                lanes,
                1,
                job.x.add(panel * job.x_stride + block * LANES * lanes),
                LANES * lanes,
                &mut acc,
            );
        }
        for (index, sums) in acc.iter().enumerate() {
            for (offset, sum) in sums.iter().enumerate() {
                let n0 = (block + offset) * LANES;
                let count = LANES.min(job.cols - n0);
                let out = job.out.add((m + index) * job.row + n0 * job.col);
                let mut values = [0.0f32; LANES];
                S::write(values.as_mut_ptr(), *sum);
                if count == LANES && job.col == 1 {
                    let out = &mut *out.cast::<[f32; LANES]>();
                    out.iter_mut().zip(values).for_each(|(out, value)| *out += value);
                } else {
                    for (n, value) in values[..count].iter().enumerate() {
                        *out.add(n * job.col) += value;
                    }
                }
            }
        }
    }
}

/// # Safety
/// The features of `S`; the rows `m0..m1` are some of `y` and `out`, and no other task has them. A row of `y` is `lanes` lanes: 16 tokens, or
/// 8 pairs of them.
#[inline(always)]
unsafe fn outer_rows<S: TileLanes>(job: &OuterJob, lanes: usize, m0: usize, m1: usize) {
    let blocks = job.cols.div_ceil(LANES);
    let mut block = 0;
    while block < blocks {
        let step = S::TILE_PANELS.min(blocks - block);
        let mut m = m0;
        while m < m1 {
            let rows = tile_rows(m1 - m, S::TILE_ROWS);
            // SAFETY: `m + rows <= m1` and `block + step <= blocks`.
            unsafe { with_tile!(rows, step, outer_tile::<S>(job, lanes, m, block)) };
            m += rows;
        }
        block += step;
    }
}

/// # Safety
/// As [`outer_rows`].
#[inline(always)]
unsafe fn outer_of_numbers<S: Simd>(job: &OuterJob, m0: usize, m1: usize) {
    // SAFETY: as the caller says.
    unsafe { outer_rows::<S>(job, LANES, m0, m1) }
}

/// # Safety
/// As [`outer_rows`].
#[inline(always)]
unsafe fn outer_of_pairs<P: PairLanes>(job: &OuterJob, m0: usize, m1: usize) {
    // SAFETY: as the caller says.
    unsafe { outer_rows::<P>(job, LANES / 2, m0, m1) }
}

dispatch! { fn outer_rows_at = outer_of_numbers(job: &OuterJob, m0: usize, m1: usize); }
dispatch_pairs! { fn outer_rows_in_pairs = outer_of_pairs(job: &OuterJob, m0: usize, m1: usize); }

/// `out` holds `[rows, cols]` with strides `[row, col]`.
pub(in crate::gemm) fn outer(out: &mut [f32], [row, col]: [usize; 2], y: &Activation, x: &Transposed) {
    let (rows, cols) = (y.features(), x.features);
    let job = OuterJob {
        out: out.as_mut_ptr(),
        row,
        col,
        cols,
        y: y.ptr(),
        y_stride: y.stride(),
        x: x.act.ptr(),
        x_stride: x.act.stride(),
        panels: y.panels(),
    };
    let step = TASK_ROWS.min(rows.div_ceil(par::threads()).next_multiple_of(12));
    let job = &job;
    par::run(rows.div_ceil(step), |task| {
        let (m0, m1) = (task * step, rows.min((task + 1) * step));
        // SAFETY: `gemm::outer` has asserted that the operands have the same panels, that all rows and columns lie
        // within `out`, which is borrowed for writing, and that the rows of the tasks are apart.
        unsafe { if x.in_pairs { task_in_pairs(job, m0, m1) } else { outer_rows_at(job, m0, m1) } };
    });
}

/// The rows `m0..m1` of a job whose `x` is in pairs: some panels after the other.
///
/// # Safety
/// As [`outer_rows`], without the features.
unsafe fn task_in_pairs(job: &OuterJob, m0: usize, m1: usize) {
    let (rows, lanes) = (m1 - m0, LANES / 2);
    with_scratch(rows * lanes * job.panels.min(ROUNDED_PANELS), |scratch| {
        for first in (0..job.panels).step_by(ROUNDED_PANELS) {
            let panels = ROUNDED_PANELS.min(job.panels - first);
            let to = scratch.as_mut_ptr();
            for panel in 0..panels {
                // SAFETY: panel `first + panel` of `y` has these rows of 16 tokens, and there is room for `panels` of them.
                unsafe {
                    let from = job.y.add((first + panel) * job.y_stride + m0 * LANES);
                    pairs::round_row_at(from, rows * LANES, to.add(panel * rows * lanes));
                }
            }
            let part = OuterJob {
                y: to.cast_const().wrapping_sub(m0 * lanes),
                y_stride: rows * lanes,
                x: job.x.wrapping_add(first * job.x_stride),
                panels,
                ..*job
            };
            // SAFETY: as the caller says: the rows of `y` are those that were just rounded.
            unsafe { outer_rows_in_pairs(&part, m0, m1) };
        }
    });
}

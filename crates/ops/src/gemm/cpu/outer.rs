//! `out[m, n] += sum_t y[t, m] x[t, n]`, rows in parallel.
use super::{tile, tile_rows, transpose, with_tile};
use crate::activation::{Activation, LANES};
use crate::gemm::Transposed;
use crate::par;
use crate::simd::{Simd, dispatch};

/// Fills `act`, the copy that [`Transposed`] is.
pub(in crate::gemm) fn transposed(x: &Activation, act: &mut Activation) {
    let (features, blocks) = (x.features(), x.features().div_ceil(LANES));
    let (to, stride) = (act.shared(), act.stride());
    par::run(x.panels(), |panel| {
        let from = x.panel(panel);
        for block in 0..blocks {
            let count = LANES.min(features - block * LANES);
            // SAFETY: `Transposed::new` makes `act` with the panels of `x` and `blocks` blocks of 256 floats in each: a
            // place within.
            let to = unsafe { to.get().add(panel * stride + block * LANES * LANES) };
            // SAFETY: `count` features of 16 lanes are left in the panel of `x`; the block of `act` is 256 floats, and
            // no other task has this panel.
            unsafe { transpose(from[block * LANES * LANES..].as_ptr(), count, to) };
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
/// `block..block + BLOCKS` are some of `x`.
#[inline(always)]
unsafe fn outer_tile<S: Simd, const ROWS: usize, const BLOCKS: usize>(job: &OuterJob, m: usize, block: usize) {
    // SAFETY: each turn of the first loop reads `ROWS` rows of 16 tokens of `y` and `BLOCKS` blocks of 256 floats of
    // `x`, of a panel below `panels`. `out` is read and written at columns below `cols` of the rows alone; a whole
    // vector only where 16 columns are left and lie end to end.
    unsafe {
        let mut acc = [[S::splat(0.0); BLOCKS]; ROWS];
        for panel in 0..job.panels {
            tile::<S, ROWS, BLOCKS>(
                LANES,
                job.y.add(panel * job.y_stride + m * LANES),
                LANES,
                1,
                job.x.add(panel * job.x_stride + block * LANES * LANES),
                LANES * LANES,
                &mut acc,
            );
        }
        for (index, sums) in acc.iter().enumerate() {
            for (offset, sum) in sums.iter().enumerate() {
                let n0 = (block + offset) * LANES;
                let count = LANES.min(job.cols - n0);
                let out = job.out.add((m + index) * job.row + n0 * job.col);
                if count == LANES && job.col == 1 {
                    S::store(out, S::add(S::load(out), *sum));
                } else {
                    let mut values = [0.0f32; LANES];
                    S::store(values.as_mut_ptr(), *sum);
                    for (n, value) in values[..count].iter().enumerate() {
                        *out.add(n * job.col) += value;
                    }
                }
            }
        }
    }
}

/// # Safety
/// The features of `S`; the rows `m0..m1` are some of `y` and `out`, and no other task has them.
#[inline(always)]
unsafe fn outer_rows<S: Simd>(job: &OuterJob, m0: usize, m1: usize) {
    let blocks = job.cols.div_ceil(LANES);
    let mut block = 0;
    while block < blocks {
        let step = S::PANELS.min(blocks - block);
        let mut m = m0;
        while m < m1 {
            let rows = tile_rows(m1 - m, S::ROWS);
            // SAFETY: `m + rows <= m1` and `block + step <= blocks`.
            unsafe { with_tile!(rows, step, outer_tile::<S>(job, m, block)) };
            m += rows;
        }
        block += step;
    }
}

dispatch! { fn outer_rows_at = outer_rows(job: &OuterJob, m0: usize, m1: usize); }

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
    let step = 48.min(rows.div_ceil(rayon::current_num_threads()).next_multiple_of(12));
    let job = &job;
    par::run(rows.div_ceil(step), |task| {
        // SAFETY: `gemm::outer` has asserted that the operands have the same panels, that all rows and columns lie
        // within `out`, which is borrowed for writing, and that the rows of the tasks are apart.
        unsafe { outer_rows_at(job, task * step, rows.min((task + 1) * step)) };
    });
}

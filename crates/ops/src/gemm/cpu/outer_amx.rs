//! Gradients of weights in AMX tiles, `out[m, n] += sum_t y[t, m] x[t, n]`, with operands rounded to bfloat16.
use super::outer_job::OuterJob;
use super::pairs::round_row;
use super::tile_sizes::STEP;
use crate::activation::LANES;
use crate::par;
use crate::scratch::{Cutter, with_scratch};
use crate::simd::amx::{TilePart, TileSums, Tiles};
use crate::simd::{PairLanes, dispatch_pairs};

/// Rows and columns of `out` that four tiles of sums cover.
const SIDE: usize = 2 * LANES;
/// How many tasks each thread gets.
const TASKS: usize = 4;
/// How many pairs the tokens of a panel make.
const PAIRS: usize = LANES / 2;

/// The scratch memory of a task: the pairs of all its rows, those of one panel, and four tiles of sums.
#[derive(Clone, Copy)]
struct Memory {
    rows: *mut f32,
    panel: *mut f32,
    sums: *mut f32,
}

/// Computes `rows` rows of `out`. The blocks of `x` have an even number of panels; the last panel is zeros if `y` has
/// none there.
pub(super) fn outer(job: &OuterJob, rows: usize) {
    let wanted = TASKS * par::threads();
    let row_tasks = rows.div_ceil(SIDE);
    let col_step = job.cols.div_ceil(wanted.div_ceil(row_tasks)).next_multiple_of(SIDE);
    let col_tasks = job.cols.div_ceil(col_step);
    let pairs = job.panels.next_multiple_of(2) * PAIRS;
    par::run(row_tasks * col_tasks, |task| {
        let (m, n) = (task / col_tasks * SIDE, task % col_tasks * col_step);
        with_scratch(SIDE * (pairs + PAIRS) + SIDE * SIDE, |scratch| {
            let mut scratch = Cutter(scratch);
            let memory = Memory {
                rows: scratch.take(SIDE * pairs),
                panel: scratch.take(SIDE * PAIRS),
                sums: scratch.take(SIDE * SIDE),
            };
            // SAFETY: `gemm::outer` has asserted that all rows and columns lie within `out`, which is borrowed for writing; the tasks'
            // are apart. The processor has tiles: the caller has asked.
            unsafe { outer_at(job, memory, [m, rows.min(m + SIDE)], [n, job.cols.min(n + col_step)]) };
        });
    });
}

/// # Safety
/// The CPU has the features of `P`, and tiles; the rows `m0..m1`, at most [`SIDE`], and the columns `n0..n1` are some of `out`, and no other task
/// has them. `memory` has room for these rows.
#[inline(always)]
unsafe fn outer_block<P: PairLanes>(job: &OuterJob, memory: Memory, [m0, m1]: [usize; 2], [n0, n1]: [usize; 2]) {
    let (rows, panels) = (m1 - m0, job.panels.next_multiple_of(2));
    let pairs = panels * PAIRS;
    for panel in 0..panels {
        // SAFETY: a panel of `y` has these rows of 16 tokens, and there is room for their pairs. Each row's go to its place; where `y` has
        // no such panel, zeros do.
        unsafe {
            if panel < job.panels {
                let from = job.y.add(panel * job.y_stride + m0 * LANES);
                round_row::<P>(from, rows * LANES, memory.panel);
            } else {
                memory.panel.write_bytes(0, rows * PAIRS);
            }
            for row in 0..rows {
                let from = memory.panel.add(row * PAIRS).cast::<[f32; PAIRS]>();
                let to = memory.rows.add(row * pairs + panel * PAIRS).cast::<[f32; PAIRS]>();
                to.write_unaligned(from.read_unaligned());
            }
        }
    }
    // SAFETY: the processor has tiles, as the caller says.
    let tiles = unsafe { Tiles::begin() };
    for n in (n0..n1).step_by(SIDE) {
        let cols = SIDE.min(n1 - n);
        let size = [rows.div_ceil(LANES), cols.div_ceil(LANES)];
        let of_block = |block: usize| job.x.wrapping_add(block * pairs * LANES).cast::<u8>();
        let block = n / LANES;
        let part = TilePart {
            rows: memory.rows.cast_const().cast(),
            apart: pairs * size_of::<f32>(),
            columns: [of_block(block), of_block(block + size[1] - 1)],
            steps: pairs / (STEP / 2),
        };
        (m0..m1).for_each(|row| job.fetch(row, n, cols));
        // SAFETY: the rows are those just packed, and the blocks are some of `x`, with as many pairs. Whole tiles of `out` lie within it where
        // its columns are end to end; others are summed in memory of our own, and added to `out` number by number.
        unsafe {
            let out = job.out.add(m0 * job.row + n * job.col);
            if job.col == 1 && rows % LANES == 0 && cols % LANES == 0 {
                let to = TileSums::places(out, LANES * job.row, LANES);
                let sums = TileSums { from: to.map(<*mut f32>::cast_const), to, apart: job.row * size_of::<f32>() };
                tiles.add_products(&sums, &[part], size);
                continue;
            }
            let to = TileSums::places(memory.sums, LANES * SIDE, LANES);
            let sums = TileSums { from: [std::ptr::null(); 4], to, apart: SIDE * size_of::<f32>() };
            tiles.add_products(&sums, &[part], size);
            for row in 0..rows {
                for col in 0..cols {
                    *out.add(row * job.row + col * job.col) += *memory.sums.add(row * SIDE + col);
                }
            }
        }
    }
}

dispatch_pairs! {
    fn outer_at = outer_block(job: &OuterJob, memory: Memory, rows: [usize; 2], cols: [usize; 2]);
}

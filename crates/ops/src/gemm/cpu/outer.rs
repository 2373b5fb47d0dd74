//! Gradients of weights on the CPU, `out[m, n] += sum_t y[t, m] x[t, n]`: tasks take rows of `out`.
use super::outer_job::OuterJob;
use super::strip::gather_rows;
use super::{outer_amx, pairs, tile, tile_rows, transpose, with_tile};
use crate::activation::{Activation, LANES};
use crate::gemm::Transposed;
use crate::par;
use crate::scratch::with_scratch;
use crate::simd::{PairLanes, Simd, TileLanes, dispatch, dispatch_pairs, in_tiles};

/// The most floats of `y` that a task packs, 384 KiB of the L2 cache, unless [`FEWEST_ROWS`] rows are more.
const PACKED: usize = 96 << 10;
/// The most and the fewest rows of a task.
const TASK_ROWS: usize = 48;
const FEWEST_ROWS: usize = 12;
/// How many pairs the tokens of a panel make.
const PAIRS: usize = LANES / 2;

/// Panels of each block of [`Transposed`]: those of `x`, rounded up to an even number for AMX, whose tiles take two
/// panels at a time. The panel that is added holds zeros.
fn panels(x: &Activation, in_pairs: bool) -> usize {
    if in_pairs && in_tiles() { x.panels().next_multiple_of(2) } else { x.panels() }
}

/// Fills `act` as the transposed copy of `x`, in bfloat16 pairs of tokens or in float32.
pub(in crate::gemm) fn transposed(x: &Activation, act: &mut Activation, in_pairs: bool) {
    let (features, blocks) = (x.features(), x.features().div_ceil(LANES));
    let (to, panels) = (act.shared(), panels(x, in_pairs));
    par::run(panels, |panel| {
        if panel == x.panels() {
            for block in 0..blocks {
                // SAFETY: the last panel of a block has a place of its own, as below.
                unsafe { to.get().add((block * panels + panel) * LANES * PAIRS).write_bytes(0, LANES * PAIRS) };
            }
            return;
        }
        let from = x.panel(panel);
        for block in 0..blocks {
            let count = LANES.min(features - block * LANES);
            // A block is 256 floats, and half as many in pairs.
            let floats = if in_pairs { LANES * LANES / 2 } else { LANES * LANES };
            // SAFETY: `Transposed::new` makes `act` with the panels of `x` and `blocks` blocks of 256 floats in each: a
            // place within. One panel more has room in pairs, which take half of it.
            let to = unsafe { to.get().add((block * panels + panel) * floats) };
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

/// Where a task finds its rows of `y`.
#[derive(Clone, Copy)]
enum Rows {
    /// Packed to `[tile][column][rows of the tile]`.
    Packed(*const f32),
    /// In panels, `[panel][row][column]`: the address of the first row, and the number of floats from one panel to the
    /// next.
    InPanels(*const f32, usize),
}

/// # Safety
/// The CPU has the features of `S`; the rows `m..m + ROWS` are some of `out`, and no other task has them. The blocks
/// `block..block + BLOCKS` are some of `x`, whose panels have `lanes` rows of 16 floats, tokens or pairs of them. `rows` has as many
/// columns in each panel, and begins with row `m0`.
#[inline(always)]
unsafe fn outer_tile<S: TileLanes, const ROWS: usize, const BLOCKS: usize>(
    job: &OuterJob,
    rows: Rows,
    lanes: usize,
    [m0, m]: [usize; 2],
    block: usize,
) {
    for row in m..m + ROWS {
        job.fetch(row, block * LANES, BLOCKS * LANES);
    }
    // SAFETY: the columns of `rows` and the rows of the blocks are there, as the caller says; a packed tile begins where those before
    // it end. `out` is read and written at columns below `cols` of the rows alone; a whole vector only where 16 columns are left and
    // lie end to end.
    unsafe {
        let mut acc = [[S::broadcast(0.0); BLOCKS]; ROWS];
        let depth = job.panels * lanes;
        let (x, apart) = (job.x.add(block * depth * LANES), depth * LANES);
        match rows {
            Rows::Packed(first) => {
                tile::<S, ROWS, BLOCKS>(depth, first.add((m - m0) * depth), 1, ROWS, x, apart, &mut acc);
            }
            Rows::InPanels(first, stride) => {
                for panel in 0..job.panels {
                    let (rows, x) = (first.add(panel * stride + (m - m0) * lanes), x.add(panel * lanes * LANES));
                    tile::<S, ROWS, BLOCKS>(lanes, rows, lanes, 1, x, apart, &mut acc);
                }
            }
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

/// Computes the rows `m0..m1` of `out`.
///
/// # Safety
/// The CPU has the features of `S`; these rows are some of `out`, no other task has them, and `rows` holds them, as [`outer_tile`] says.
#[inline(always)]
unsafe fn multiply<S: TileLanes>(job: &OuterJob, rows: Rows, lanes: usize, [m0, m1]: [usize; 2]) {
    let blocks = job.cols.div_ceil(LANES);
    let mut block = 0;
    while block < blocks {
        let step = S::TILE_PANELS.min(blocks - block);
        let mut m = m0;
        while m < m1 {
            let count = tile_rows(m1 - m, S::TILE_ROWS);
            // SAFETY: `m + count <= m1` and `block + step <= blocks`.
            unsafe { with_tile!(count, step, outer_tile::<S>(job, rows, lanes, [m0, m], block)) };
            m += count;
        }
        block += step;
    }
}

/// # Safety
/// The CPU has the features of `S`; the rows `m0..m1` are some of `y` and `out`, and no other task has them. `packed` has room for these rows'
/// numbers, and for 15 more, where they are packed.
#[inline(always)]
unsafe fn outer_of_numbers<S: Simd>(job: &OuterJob, [m0, m1]: [usize; 2], packed: *mut f32) {
    if !job.packs() {
        let rows = Rows::InPanels(job.y.wrapping_add(m0 * LANES), job.y_stride);
        // SAFETY: as the caller says; `y` lies in panels.
        return unsafe { multiply::<S>(job, rows, LANES, [m0, m1]) };
    }
    let depth = job.panels * LANES;
    let mut m = m0;
    while m < m1 {
        let rows = tile_rows(m1 - m, S::TILE_ROWS);
        for panel in 0..job.panels {
            // SAFETY: the panel of `y` has these rows of 16 tokens. The tile takes `rows * depth` floats after those before it. The 15
            // floats more that a block may overwrite are of later blocks, or those more that there is room for.
            unsafe {
                let from = job.y.add(panel * job.y_stride + m * LANES);
                let to = packed.add((m - m0) * depth + panel * LANES * rows);
                gather_rows::<S>(rows, from, LANES, to);
            }
        }
        m += rows;
    }
    // SAFETY: as the caller says; all rows were just packed.
    unsafe { multiply::<S>(job, Rows::Packed(packed), LANES, [m0, m1]) };
}

/// # Safety
/// The CPU has the features of `P`; the rows `m0..m1` are some of `y` and `out`, and no other task has them. `x` is in pairs, and `packed` has
/// room for those of these rows, and for 15 more.
#[inline(always)]
unsafe fn outer_of_pairs<P: PairLanes>(job: &OuterJob, [m0, m1]: [usize; 2], packed: *mut f32) {
    let (depth, count) = (job.panels * PAIRS, m1 - m0);
    if !job.packs() {
        for panel in 0..job.panels {
            // SAFETY: the panel of `y` has these rows of 16 tokens, and there is room for their pairs.
            unsafe {
                let from = job.y.add(panel * job.y_stride + m0 * LANES);
                pairs::round_row::<P>(from, count * LANES, packed.add(panel * count * PAIRS));
            }
        }
        // SAFETY: as the caller says; all rows were just rounded.
        return unsafe { multiply::<P>(job, Rows::InPanels(packed, count * PAIRS), PAIRS, [m0, m1]) };
    }
    let mut m = m0;
    while m < m1 {
        let rows = tile_rows(m1 - m, P::TILE_ROWS);
        for panel in (0..job.panels).step_by(2) {
            let count = 2.min(job.panels - panel);
            // The pairs of each row in two panels, one after the other.
            let mut rounded = [0.0f32; FEWEST_ROWS * LANES];
            for second in 0..count {
                let mut pairs = [0.0f32; FEWEST_ROWS * PAIRS];
                // SAFETY: the panel of `y` has these rows of 16 tokens, at most twelve, and `pairs` has room for them.
                unsafe {
                    let from = job.y.add((panel + second) * job.y_stride + m * LANES);
                    pairs::round_row::<P>(from, rows * LANES, pairs.as_mut_ptr());
                }
                let to = rounded.as_chunks_mut::<LANES>().0.iter_mut();
                for (to, from) in to.zip(pairs.as_chunks::<PAIRS>().0) {
                    to[second * PAIRS..][..PAIRS].copy_from_slice(from);
                }
            }
            // SAFETY: as in `outer_of_numbers`; of a last panel alone, `rows` pairs of each of its columns are written.
            unsafe {
                let to = packed.add((m - m0) * depth + panel * PAIRS * rows);
                if count == 2 {
                    gather_rows::<P::Wide>(rows, rounded.as_ptr(), LANES, to);
                } else {
                    (0..rows * PAIRS).for_each(|at| *to.add(at) = rounded[at % rows * LANES + at / rows]);
                }
            }
        }
        m += rows;
    }
    // SAFETY: as the caller says; all rows were just rounded.
    unsafe { multiply::<P>(job, Rows::Packed(packed), PAIRS, [m0, m1]) };
}

dispatch! { fn outer_rows_at = outer_of_numbers(job: &OuterJob, rows: [usize; 2], packed: *mut f32); }
dispatch_pairs! { fn outer_rows_in_pairs = outer_of_pairs(job: &OuterJob, rows: [usize; 2], packed: *mut f32); }

/// Adds the product to `out`, a matrix `[rows, cols]` with strides `[row, col]`.
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
        panels: y.panels(),
    };
    if x.in_pairs && in_tiles() {
        return outer_amx::outer(&job, rows);
    }
    let most = (PACKED / (job.panels * LANES) / FEWEST_ROWS * FEWEST_ROWS).clamp(FEWEST_ROWS, TASK_ROWS);
    let step = most.min(rows.div_ceil(par::threads()).next_multiple_of(FEWEST_ROWS));
    let (job, depth) = (&job, job.panels * if x.in_pairs { PAIRS } else { LANES });
    par::run(rows.div_ceil(step), |task| {
        let part = [task * step, rows.min((task + 1) * step)];
        let room = if x.in_pairs || job.packs() { (part[1] - part[0]) * depth + LANES } else { 0 };
        with_scratch(room, |packed| {
            let packed = packed.as_mut_ptr();
            // SAFETY: `gemm::outer` has asserted that the operands have the same panels, that all rows and columns lie
            // within `out`, which is borrowed for writing, and that the rows of the tasks are apart.
            unsafe {
                if x.in_pairs { outer_rows_in_pairs(job, part, packed) } else { outer_rows_at(job, part, packed) }
            };
        });
    });
}

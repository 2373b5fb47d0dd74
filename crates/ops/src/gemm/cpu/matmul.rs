//! The matrix product on the CPU, `out[t, m] = init + sum over terms of sum_k matrix[m, k] x[t, k]`, in blocks that
//! stay in the caches.
use super::interleaved::widen;
use super::product::{Job, Operands, Order, RawTerm, Stage, TILE_ROWS, matmul_tile};
use super::strip::Strip;
use super::{DEPTH, TASK_ROWS, tile_rows, with_tile};
use crate::activation::LANES;
use crate::gemm::interleaved::{FOLD, Interleaved};
use crate::simd::{Simd, TileLanes, dispatch};
use smallvec::SmallVec;
use std::ops::Range;

/// From so many panels on, packing a tile of a transposed matrix is worth its time.
const PACK_PANELS: usize = 6;
/// From this depth on, packing is worth its time for tiles of twelve rows, which are most of a cache line: that is the
/// depth of an LM head, which no cache holds. Smaller tiles use less of each cache line that they read, and packing
/// them is worth it at any depth.
const PACK_DEPTH: usize = 4096;

/// The most columns of an interleaved block that are converted to float32 at once.
const WIDE: usize = 256;
const _: () = assert!(WIDE * LANES <= DEPTH * TILE_ROWS && FOLD <= WIDE, "a tile's memory has room for them");

/// # Safety
/// The CPU has the features of `S`; the rows, at most [`TASK_ROWS`] where they are packed in a strip, and the panels are some of `out`, and no other task
/// has them. `job` has passed the checks of `gemm::matmul_grouped`.
#[inline(always)]
unsafe fn matmul_block<S: Simd>(job: &Job<'_>, stages: Range<usize>, rows: [usize; 2], panels: [usize; 2]) {
    for stage in &job.stages[stages] {
        // SAFETY: `stage` is one of the job's; the rest is as the caller says.
        unsafe {
            stage_block::<S>(job, stage, rows, panels);
        }
    }
}

/// A task's rows, for one block of the sum.
#[derive(Clone, Copy)]
struct Block<'s, 'a> {
    job: &'s Job<'a>,
    term: &'s RawTerm<'a>,
    /// All tiles of the task, packed, and the row with which they begin.
    strip: Option<(&'s Strip, usize)>,
    /// The first column, and how many columns.
    columns: [usize; 2],
    /// How many panels the task has.
    panels: usize,
    begins: bool,
    /// A second term, added together with the last columns of the first.
    second: Option<Operands>,
}

impl Block<'_, '_> {
    /// The operands of the tile of `rows` rows from `m` on, except for `x`. The tile is used as it lies in the matrix,
    /// or converted or packed to `buffer`.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the rows are some of `out` and of the strip where there is one; `buffer` has room for them and for
    /// [`LANES`] numbers more.
    #[inline(always)]
    unsafe fn tile<S: Simd>(&self, [m, rows]: [usize; 2], buffer: *mut f32) -> Operands {
        let Self { term, columns, panels, .. } = *self;
        let (whole, depth) = (term.whole, columns[1]);
        let own = Operands { depth, ..whole };
        if let Some((strip, m0)) = self.strip {
            return Operands { matrix: strip.tile(m - m0, depth), row: 1, col: rows, ..own };
        }
        if let Some(matrix) = term.interleaved {
            let lane = m % LANES;
            if let Some(block) = matrix.floats(m / LANES, columns[0]) {
                let tile = Operands::of_block(block, whole.depth * LANES, [lane, rows], depth);
                return Operands { x: own.x, stride: own.stride, ..tile };
            }
            // Tiles come in rising order: the first tile of the block has converted it for all of them.
            if lane == 0 {
                // SAFETY: the matrix has the block, and the stage's columns are at most WIDE: `buffer` has room for 16 numbers of each.
                unsafe { widen::<S>(matrix, m / LANES, columns, buffer) };
            }
            return Operands { matrix: buffer.wrapping_add(lane), row: 1, col: LANES, ..own };
        }
        let float = !whole.matrix.is_null();
        let pays = rows == S::TILE_ROWS && panels >= PACK_PANELS && (rows < 12 || whole.depth >= PACK_DEPTH);
        // SAFETY: the matrix reaches these rows and columns: `gemm::matmul_grouped` has asserted it.
        unsafe {
            if term.is_transposed() && (pays || !float) {
                // Numbers of a column are short runs that lie far apart, each in a cache line and a page of its own.
                term.columns::<S>([m, rows], columns, buffer);
                return Operands { matrix: buffer, row: 1, col: rows, ..own };
            }
            let (matrix, row) = term.rows::<S>([m, rows], columns, buffer);
            Operands { matrix, row, col: if float { whole.col } else { 1 }, ..own }
        }
    }

    /// What the sums of the rows `m..m + rows` are multiplied by, if numbers have scales apart.
    #[inline(always)]
    fn factors(&self, [m, rows]: [usize; 2]) -> Option<[f32; TILE_ROWS]> {
        let matrix = self.term.interleaved.filter(|matrix| matrix.fold().is_some())?;
        let mut factors = [0.0; TILE_ROWS];
        for (row, factor) in (m..m + rows).zip(&mut factors) {
            *factor = matrix.factor(row, self.columns[0]);
        }
        Some(factors)
    }

    /// Multiplies the tile of the rows `m..m + rows` with the panels `p..p + panels`.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the rows and panels are some of `out`, and no other task has them.
    #[inline(always)]
    unsafe fn multiply<S: Simd>(&self, tile: Operands, [m, rows]: [usize; 2], [p, panels]: [usize; 2]) {
        let x = self.term.whole.x.wrapping_add(p * tile.stride + self.columns[0] * LANES);
        let (tile, factors) = (Operands { x, ..tile }, self.factors([m, rows]));
        let mut second = self.second;
        if let Some(second) = &mut second {
            second.matrix = second.matrix.wrapping_add(m * second.row);
            second.x = second.x.wrapping_add(p * second.stride);
        }
        // SAFETY: `gemm::matmul_grouped` has asserted that matrices reach all rows and columns, and that activations have the panels
        // of `out`.
        unsafe {
            with_tile!(
                rows,
                panels,
                matmul_tile::<S>(self.job, self.begins, &tile, factors.as_ref(), second.as_ref(), m, p)
            );
        }
    }
}

/// # Safety
/// As [`matmul_block`], for one stage of the job.
#[inline(always)]
unsafe fn stage_block<'a, S: Simd>(job: &Job<'a>, stage: &Stage<'a>, [m0, m1]: [usize; 2], [p0, p1]: [usize; 2]) {
    let (term, first) = (&stage.first, &stage.first.whole);
    let by_panel = job.order == Order::ByPanel;
    // A tile of an interleaved matrix that is not packed must lie within one of its blocks of sixteen rows.
    let within = term.interleaved.is_some() && !by_panel;
    let most_rows = match S::TILE_ROWS {
        _ if !within => S::TILE_ROWS,
        8.. => 8,
        _ => 4,
    };
    let widens = within && term.interleaved.is_some_and(|matrix| matrix.floats(0, 0).is_none());
    let most_depth = if widens { WIDE } else { DEPTH };
    // Columns with scales apart are summed on their own, a few at a time.
    let depth = term.interleaved.and_then(Interleaved::fold).unwrap_or_else(|| {
        let blocks = first.depth.div_ceil(most_depth).max(1);
        first.depth.div_ceil(blocks)
    });
    let strips = by_panel || term.quantized.is_some() && term.is_transposed();
    let mut strip = Strip::new();
    #[allow(clippy::large_stack_arrays, reason = "24 KiB, so that the tile stays in L1")]
    let mut packed = [std::mem::MaybeUninit::<f32>::uninit(); DEPTH * TILE_ROWS + LANES];
    let buffer: *mut f32 = packed.as_mut_ptr().cast();
    // The first row of each tile, and how many it has.
    let mut rows = SmallVec::<[[usize; 2]; 64]>::new();
    let mut m = m0;
    while m < m1 {
        let count = tile_rows(m1 - m, most_rows);
        rows.push([m, count]);
        m += count;
    }
    let mut k0 = 0;
    loop {
        let part = depth.min(first.depth - k0);
        if strips {
            // SAFETY: `part <= DEPTH` and `m1 - m0 <= TASK_ROWS`; the matrix has these rows and columns.
            unsafe { strip.fill::<S, S>(term, [m0, m1 - m0], [k0, part]) };
        }
        let block = Block {
            job,
            term,
            strip: strips.then_some((&strip, m0)),
            columns: [k0, part],
            panels: p1 - p0,
            begins: k0 == 0 && stage.begins,
            second: stage.second.map(|second| second.whole).filter(|_| k0 + part == first.depth),
        };
        // By panel, the strip stays in L2 and is read once a panel, whose block stays in L1. Otherwise a tile stays in L1, and the
        // blocks of the panels are read from L2 once a tile.
        let (tiles, steps) = (rows.len(), (p1 - p0).div_ceil(S::TILE_PANELS));
        let mut tile = None;
        for turn in 0..tiles * steps {
            let (at, step) = if by_panel { (turn % tiles, turn / tiles) } else { (turn / steps, turn % steps) };
            let p = p0 + step * S::TILE_PANELS;
            // SAFETY: the rows end with `m1`, and the panels with `p1`.
            unsafe {
                if by_panel || step == 0 {
                    tile = Some(block.tile::<S>(rows[at], buffer));
                }
                if let Some(tile) = &mut tile {
                    block.multiply::<S>(*tile, rows[at], [p, S::TILE_PANELS.min(p1 - p)]);
                    tile.next = tile.next.map(|(next, _)| (next, 0));
                }
            }
        }
        k0 += part;
        if k0 >= first.depth {
            break;
        }
    }
}

dispatch! {
    fn matmul_block_at = matmul_block(job: &Job<'_>, stages: Range<usize>, rows: [usize; 2], panels: [usize; 2]);
}

/// Computes one part of `out`, for the stages `numbers` of the job.
///
/// # Safety
/// The rows and the panels are one task's ([`Job::part`]), and no other thread has it. The operands have passed the checks of
/// `gemm::matmul_grouped` and stay borrowed, `out` for writing.
pub(super) unsafe fn block(job: &Job<'_>, numbers: Range<usize>, [m0, m1]: [usize; 2], panels: [usize; 2]) {
    let stages = &job.stages[numbers.clone()];
    let in_strips = || job.order == Order::ByPanel || stages.iter().any(|stage| stage.first.quantized.is_some());
    let step = match job.panels {
        // With a single panel, each number of the matrix is used once, so the matrix is read as it lies in memory.
        1 if stages.iter().all(|stage| stage.first.interleaved.is_none()) => TILE_ROWS,
        _ if in_strips() => TASK_ROWS,
        _ => job.row_step,
    };
    for m in (m0..m1).step_by(step) {
        // SAFETY: the operands fit `out`, as the caller says. The block lies within it, at most TASK_ROWS rows where a strip
        // holds them.
        unsafe { matmul_block_at(job, numbers.clone(), [m, m1.min(m + step)], panels) };
    }
}

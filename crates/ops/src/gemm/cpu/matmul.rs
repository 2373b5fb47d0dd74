//! `out[t, m] = init + sum over terms of sum_k matrix[m, k] x[t, k]`, in blocks that stay in the caches.
use super::product::{Job, Operands, Stage, TILE_ROWS, matmul_tile};
use super::quantized::{self, Strip};
use super::{DEPTH, TASK_ROWS, tile_rows, with_tile};
use crate::activation::LANES;
use crate::simd::{Simd, TileLanes, dispatch, prefetch};

/// Panels from which packing a tile of a transposed matrix pays.
const PACK_PANELS: usize = 6;
/// Depth from which it pays for tiles of twelve rows, which are most of a cache line: that of an LM head, which no cache holds. Smaller
/// tiles use less of each line that they read, and packing them pays at any depth.
const PACK_DEPTH: usize = 4096;
/// Copies `depth` runs of `ROWS` floats, `col` floats apart, end to end.
///
/// # Safety
/// `from` reaches `depth` runs, `to` has room for `depth * ROWS` floats; they do not overlap.
#[inline(always)]
unsafe fn pack<const ROWS: usize>(from: *const f32, col: usize, depth: usize, to: *mut f32) {
    for k in 0..depth {
        // SAFETY: run `k` is below `depth`; both places are there, as the caller says, and moves need no alignment.
        unsafe {
            let run = from.add(k * col).cast::<[f32; ROWS]>().read_unaligned();
            to.add(k * ROWS).cast::<[f32; ROWS]>().write_unaligned(run);
        }
    }
}

/// Widens `rows` runs of `depth` numbers, `row` apart, end to end, and fetches the runs of as many rows more.
///
/// # Safety
/// The features of `S`; `from` reaches the last run; `to` has room for `rows * depth` numbers and 15 more.
#[inline(always)]
unsafe fn widen_rows<S: Simd>(from: *const u16, row: usize, rows: usize, depth: usize, to: *mut f32) {
    for index in 0..rows {
        // SAFETY: row `index` is below `rows`; a whole vector moves only where 16 of its `depth` numbers are left.
        unsafe {
            let (from, to) = (from.add(index * row), to.add(index * depth));
            let mut at = 0;
            while at + LANES <= depth {
                if at % (2 * LANES) == 0 {
                    prefetch(from.wrapping_add(rows * row + at).cast());
                }
                S::store(to.add(at), S::load_bf16(from.add(at)));
                at += LANES;
            }
            while at < depth {
                *to.add(at) = f32::from_bits(u32::from(*from.add(at)) << 16);
                at += 1;
            }
        }
    }
}

/// Widens `depth` runs of `rows` numbers, `col` apart, end to end. `left` numbers lie behind `from`.
///
/// # Safety
/// The features of `S`; `from` reaches the last run; `to` has room for `rows * depth` numbers and 15 more.
#[inline(always)]
unsafe fn widen_runs<S: Simd>(from: *const u16, col: usize, rows: usize, depth: usize, left: usize, to: *mut f32) {
    for k in 0..depth {
        // SAFETY: run `k` is below `depth`. A whole vector is read only where the matrix reaches that far. What it
        // writes beyond the run lies within the 15 numbers more, and the next run overwrites it.
        unsafe {
            let (run, to) = (from.add(k * col), to.add(k * rows));
            if k * col + LANES <= left {
                S::store(to, S::load_bf16(run));
            } else {
                for row in 0..rows {
                    *to.add(row) = f32::from_bits(u32::from(*run.add(row)) << 16);
                }
            }
        }
    }
}

/// # Safety
/// The features of `S`; the rows `m0..m1`, at most [`TASK_ROWS`] where a strip of them is dequantized, and the panels `p0..p1` are
/// some of `out`, and no other task has them. `job` has passed the checks of `gemm::matmul_grouped`.
#[inline(always)]
unsafe fn matmul_block<S: Simd>(job: &Job<'_>, m0: usize, m1: usize, p0: usize, p1: usize) {
    for stage in &job.stages {
        // SAFETY: `stage` is one of the job's; the rest is as the caller says.
        unsafe {
            if job.few {
                stage_block::<S, S::Few>(job, stage, [m0, m1], [p0, p1]);
            } else {
                stage_block::<S, S>(job, stage, [m0, m1], [p0, p1]);
            }
        }
    }
}

/// # Safety
/// As [`matmul_block`], for one stage of the job, in tiles of the lanes `T`, which are all that have a token.
#[inline(always)]
unsafe fn stage_block<S: Simd, T: TileLanes>(
    job: &Job<'_>,
    stage: &Stage<'_>,
    [m0, m1]: [usize; 2],
    [p0, p1]: [usize; 2],
) {
    let (term, first) = (&stage.first, &stage.first.whole);
    let blocks = first.depth.div_ceil(DEPTH).max(1);
    let depth = first.depth.div_ceil(blocks);
    #[allow(clippy::large_stack_arrays, reason = "24 KiB, so that the tile stays in L1")]
    let mut packed = [std::mem::MaybeUninit::<f32>::uninit(); DEPTH * 12 + LANES];
    let mut strip = Strip::new();
    let mut k0 = 0;
    loop {
        let part = depth.min(first.depth - k0);
        if let Some(matrix) = term.quantized.filter(|_| first.col != 1) {
            // SAFETY: `part <= DEPTH` and `m1 - m0 <= TASK_ROWS`. A quantized matrix that is not in rows is transposed, its
            // rows 1 apart: the last run ends with the last row, within the matrix.
            unsafe { strip.fill::<S, T>(matrix, m0 + k0 * first.col, first.col, m1 - m0, part) };
        }
        let mut m = m0;
        while m < m1 {
            let rows = tile_rows(m1 - m, T::TILE_ROWS);
            let at = m * first.row + k0 * first.col;
            let matrix = first.matrix.wrapping_add(at);
            let mut part_of = Operands { matrix, depth: part, ..*first };
            if !term.narrow.is_null() {
                let buffer: *mut f32 = packed.as_mut_ptr().cast();
                // SAFETY: `part <= DEPTH` and `rows <= 12`: `packed` has room for them and for LANES more. The tile
                // lies within the matrix, whose columns (of rows) or rows (where it is transposed) are 1 apart.
                unsafe {
                    let from = term.narrow.add(at);
                    if first.col == 1 {
                        widen_rows::<S>(from, first.row, rows, part, buffer);
                        (part_of.row, part_of.col) = (part, 1);
                    } else {
                        widen_runs::<S>(from, first.col, rows, part, term.len - at, buffer);
                        (part_of.row, part_of.col) = (1, rows);
                    }
                }
                part_of.matrix = buffer;
            } else if let Some(matrix) = term.quantized {
                if first.col == 1 {
                    let buffer: *mut f32 = packed.as_mut_ptr().cast();
                    // SAFETY: `part <= DEPTH` and `rows <= 12`, which `packed` has room for; each row's run lies within
                    // the matrix.
                    unsafe { quantized::widen_rows::<S>(matrix, at, first.row, rows, part, buffer) };
                    (part_of.matrix, part_of.row, part_of.col) = (buffer, part, 1);
                } else {
                    (part_of.matrix, part_of.row, part_of.col) = (strip.tile(m - m0, part), 1, rows);
                }
            } else if first.row == 1
                && rows == T::TILE_ROWS
                && (T::TILE_ROWS < 12 || first.depth >= PACK_DEPTH)
                && p1 - p0 >= PACK_PANELS
            {
                // A tile of a transposed matrix lies in short runs far apart, a cache line and a page each.
                // SAFETY: `part <= DEPTH` runs of `rows == T::TILE_ROWS <= 12` floats that are 1 apart lie within the
                // matrix, which is f32 here; `packed` has room for them and is no part of it.
                unsafe {
                    match T::TILE_ROWS {
                        12 => pack::<12>(matrix, first.col, part, packed.as_mut_ptr().cast()),
                        6 => pack::<6>(matrix, first.col, part, packed.as_mut_ptr().cast()),
                        _ => pack::<4>(matrix, first.col, part, packed.as_mut_ptr().cast()),
                    }
                }
                part_of = Operands { matrix: packed.as_ptr().cast(), col: rows, ..part_of };
            }
            let begins = k0 == 0 && stage.begins;
            let mut second = stage.second.map(|second| second.whole).filter(|_| k0 + part == first.depth);
            if let Some(second) = &mut second {
                second.matrix = second.matrix.wrapping_add(m * second.row);
            }
            let second_x = second.map_or(std::ptr::null(), |second| second.x);
            let mut p = p0;
            while p < p1 {
                let panels = T::TILE_PANELS.min(p1 - p);
                part_of.x = first.x.wrapping_add(p * first.stride + k0 * LANES);
                if let Some(second) = &mut second {
                    second.x = second_x.wrapping_add(p * second.stride);
                }
                // SAFETY: `m + rows <= m1` and `p + panels <= p1`. `part_of` is the tile of these rows from `k0` on: as
                // it lies in an f32 matrix, or as it was just widened or packed. `gemm::matmul_grouped` has asserted that
                // matrices reach all rows and columns, and that activations have the panels of `out`.
                unsafe { with_tile!(rows, panels, matmul_tile::<T>(job, begins, &part_of, second.as_ref(), m, p)) };
                p += panels;
            }
            m += rows;
        }
        k0 += part;
        if k0 >= first.depth {
            break;
        }
    }
}

dispatch! { fn matmul_block_at = matmul_block(job: &Job<'_>, m0: usize, m1: usize, p0: usize, p1: usize); }

/// Computes one part of `out`.
///
/// # Safety
/// The rows and the panels are one task's ([`Job::part`]), and no other thread has it. The operands have passed the checks of
/// `gemm::matmul_grouped` and stay borrowed, `out` for writing.
pub(super) unsafe fn block(job: &Job<'_>, [m0, m1]: [usize; 2], [p0, p1]: [usize; 2]) {
    // One panel uses each number once: the matrix is read as it lies in memory.
    let quantized = || job.stages.iter().any(|stage| stage.first.quantized.is_some());
    let step = match job.panels {
        1 => TILE_ROWS,
        _ if quantized() => TASK_ROWS,
        _ => job.row_step,
    };
    for m in (m0..m1).step_by(step) {
        // SAFETY: the operands fit `out`, as the caller says. The block lies within it, at most TASK_ROWS rows where a strip
        // holds them.
        unsafe { matmul_block_at(job, m, m1.min(m + step), p0, p1) };
    }
}

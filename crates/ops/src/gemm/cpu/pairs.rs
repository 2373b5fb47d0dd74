//! Matrix products on the CPU with operands rounded to bfloat16, two neighbours along the sum at a time (the
//! `VDPBF16PS` instruction). Sums are float32, in the order of the pairs, however the work is divided into tasks.
//!
//! A task rounds its panels once for each block of the sum, to `[panel][pair][16 tokens]`: a pair fills a lane of 32
//! bits. It rounds the matrix one tile at a time, in pairs of columns, so that one matrix serves forward and backward.
//! A tile is then multiplied as in float32, in half as many steps.
use super::product::{Job, Operands, Order, PAIR_PANELS, RawTerm, Stage, matmul_tile};
use super::rounding::{round_panel_at, round_panels};
use super::strip::Strip;
use super::{DEPTH, TASK_ROWS, tile_rows, tile_sizes, with_tile};
use crate::activation::LANES;
use crate::quant::{Quantized, any_run};
use crate::scratch::{Cutter, with_scratch};
use crate::simd::{PairLanes, Simd, dispatch_pairs, prefetch};
use std::mem::MaybeUninit;

/// The most pairs in a block of the sum: with the most panels they take 640 KiB.
const PAIRS: usize = 320;
/// How many columns ahead a transposed matrix is prefetched.
const AHEAD: usize = 16;
/// How many numbers of a row are dequantized at once.
pub(super) const RUN: usize = 512;

/// Rounds `depth` consecutive floats to `depth.div_ceil(2)` pairs.
///
/// # Safety
/// The CPU has the features of `P`; `from` holds `depth` floats, `to` has room for the pairs.
#[inline(always)]
pub(crate) unsafe fn round_row<P: PairLanes>(from: *const f32, depth: usize, to: *mut f32) {
    let mut at = 0;
    while at + 2 * LANES <= depth {
        // SAFETY: 32 floats are left, and room for 16 pairs.
        unsafe { P::write(to.add(at / 2), P::pair_neighbours(from.add(at))) };
        at += 2 * LANES;
    }
    if at < depth {
        let (mut last, mut pairs) = ([0.0f32; 2 * LANES], [0.0f32; LANES]);
        // SAFETY: `depth - at` floats are left, fewer than 32, and room for as many pairs as they make. Half a vector of
        // pairs is moved as a whole, which is what an adapter's rank of 16 leaves.
        unsafe {
            if depth - at == LANES {
                P::write(last.as_mut_ptr(), P::read(from.add(at)));
                P::write(pairs.as_mut_ptr(), P::pair_neighbours(last.as_ptr()));
                to.add(at / 2).cast::<[f32; LANES / 2]>().write_unaligned(*pairs.first_chunk().unwrap_unchecked());
            } else {
                std::ptr::copy_nonoverlapping(from.add(at), last.as_mut_ptr(), depth - at);
                P::write(pairs.as_mut_ptr(), P::pair_neighbours(last.as_ptr()));
                std::ptr::copy_nonoverlapping(pairs.as_ptr(), to.add(at / 2), (depth - at).div_ceil(2));
            }
        }
    }
}

dispatch_pairs! { pub(super) fn round_row_at = round_row(from: *const f32, depth: usize, to: *mut f32); }
/// Rounds a block of 16 rows of 16 floats in pairs of rows: `[8][16]`.
///
/// # Safety
/// `from` holds the block, `to` has room for 128 pairs.
pub(super) unsafe fn round_block(from: *const f32, to: *mut f32) {
    // SAFETY: as the caller says.
    unsafe { round_panel_at(from, LANES, to) }
}

/// The numbers of a matrix in its storage format, from a tile's first number on.
#[derive(Clone, Copy)]
pub(super) enum Numbers<'a> {
    Wide(*const f32),
    Narrow(*const u16),
    Quantized(&'a Quantized, usize),
}

impl<'a> RawTerm<'a> {
    /// Whether a task first packs a block's columns in a strip: for a quantized matrix that is transposed.
    const fn strips(&self) -> bool {
        self.quantized.is_some() && self.is_transposed()
    }

    /// How many features a block of the sum has; an even number.
    pub(super) fn block(&self, order: Order) -> usize {
        let (most, step) = match order {
            Order::InTiles => (tile_sizes::BLOCK, tile_sizes::STEP),
            Order::Split => (tile_sizes::SPLIT_BLOCK, tile_sizes::STEP),
            // A strip has room for fewer columns.
            _ if self.strips() => (DEPTH, 2),
            _ => (2 * PAIRS, 2),
        };
        let blocks = self.whole.depth.div_ceil(most).max(1);
        self.whole.depth.div_ceil(blocks).next_multiple_of(step)
    }

    /// The address of panel `p`, for the block of `depth` features from `k0` on, of an activation of `panels` panels
    /// that was rounded once for all tasks.
    pub(super) fn rounded_block(
        &self,
        (panels, order): (usize, Order),
        [k0, depth]: [usize; 2],
        p: usize,
    ) -> Option<*mut f32> {
        let at = (order.pairs(k0) * panels + p * order.pairs(depth)) * LANES;
        (!self.rounded.is_null()).then(|| self.rounded.wrapping_add(at).cast_mut())
    }

    /// The matrix's numbers from index `at` on.
    pub(super) fn numbers(&self, at: usize) -> Numbers<'a> {
        match self.quantized {
            Some(matrix) => Numbers::Quantized(matrix, at),
            None if self.narrow.is_null() => Numbers::Wide(self.whole.matrix.wrapping_add(at)),
            None => Numbers::Narrow(self.narrow.wrapping_add(at)),
        }
    }
}

/// Rounds `rows` rows of `depth` consecutive numbers; consecutive rows begin `row` numbers apart. Each row becomes
/// `depth.div_ceil(2)` consecutive pairs, which begin `apart` pairs after those of the row before.
///
/// # Safety
/// The CPU has the features of `P`; the matrix has these rows; `to` has room for them.
#[inline(always)]
pub(super) unsafe fn pack_rows<P: PairLanes>(
    from: Numbers<'_>,
    row: usize,
    rows: usize,
    depth: usize,
    (to, apart): (*mut f32, usize),
) {
    let pairs = depth.div_ceil(2);
    for index in 0..rows {
        let to = to.wrapping_add(index * apart);
        // SAFETY: row `index` is one of the matrix, and of those that `to` has room for. A run is at most RUN numbers, an even
        // number of them unless it is the last.
        unsafe {
            match from {
                Numbers::Wide(from) => round_row::<P>(from.add(index * row), depth, to),
                Numbers::Narrow(from) => {
                    let from = from.add(index * row);
                    let mut at = 0;
                    while at + 2 * LANES <= depth {
                        P::write(to.add(at / 2), P::read(from.add(at).cast()));
                        at += 2 * LANES;
                    }
                    if !depth.is_multiple_of(2) {
                        *to.add(pairs - 1) = 0.0;
                    }
                    std::ptr::copy_nonoverlapping(from.add(at), to.cast::<u16>().add(at), depth - at);
                }
                Numbers::Quantized(matrix, at) => {
                    let mut wide = [MaybeUninit::<f32>::uninit(); RUN + LANES];
                    let wide: *mut f32 = wide.as_mut_ptr().cast();
                    for k in (0..depth).step_by(RUN) {
                        let count = RUN.min(depth - k);
                        any_run::<P::Wide>(matrix, at + index * row + k, wide, count);
                        round_row::<P>(wide, count, to.add(k / 2));
                    }
                }
            }
        }
    }
}

/// The `rows` numbers at `at`. Lanes beyond them hold what follows in the matrix if all sixteen numbers are there, else
/// zeros.
///
/// # Safety
/// The CPU has the features of `P`; `rows` numbers are there, at most 16, and 16 if `whole`.
#[inline(always)]
pub(super) unsafe fn column<P: PairLanes>(from: Numbers<'_>, at: usize, rows: usize, whole: bool) -> P::Sum {
    // SAFETY: a whole vector is read only where it is there.
    unsafe {
        match from {
            Numbers::Wide(from) if whole => P::Wide::load(from.add(at)),
            Numbers::Narrow(from) if whole => P::Wide::load_bf16(from.add(at)),
            Numbers::Wide(from) => {
                let mut lanes = [0.0f32; LANES];
                std::ptr::copy_nonoverlapping(from.add(at), lanes.as_mut_ptr(), rows);
                P::Wide::load(lanes.as_ptr())
            }
            Numbers::Narrow(from) => {
                let mut lanes = [0u16; LANES];
                std::ptr::copy_nonoverlapping(from.add(at), lanes.as_mut_ptr(), rows);
                P::Wide::load_bf16(lanes.as_ptr())
            }
            // Columns of a quantized matrix come from a strip.
            Numbers::Quantized(..) => P::Wide::splat(0.0),
        }
    }
}

/// Rounds `rows` rows of a transposed matrix, whose rows are 1 apart and columns `col`, to `[pair][row]`. The matrix
/// has `left` numbers from `from` on.
///
/// # Safety
/// The CPU has the features of `P`; the matrix has these rows and `depth` columns; `to` has room for the pairs and 15 more.
#[inline(always)]
unsafe fn pack_columns<P: PairLanes>(
    from: Numbers<'_>,
    col: usize,
    rows: usize,
    depth: usize,
    left: usize,
    to: *mut f32,
) {
    for pair in 0..depth.div_ceil(2) {
        let k = 2 * pair;
        if let Numbers::Narrow(from) = from {
            // Each column is in a page of its own, and the processor prefetches within a page only.
            prefetch(from.wrapping_add((k + AHEAD) * col).cast());
            prefetch(from.wrapping_add((k + 1 + AHEAD) * col).cast());
            if k + 1 < depth && (k + 1) * col + LANES <= left {
                // SAFETY: both columns are there, sixteen numbers each; the place is as below.
                unsafe {
                    let both = P::pair_words(from.add(k * col), from.add((k + 1) * col));
                    P::write(to.add(pair * rows), both);
                }
                continue;
            }
        }
        // SAFETY: column `k` is below `depth`, and the next one where it is read. A pair's vector takes 15 places more than its
        // rows at most, which the next one overwrites.
        unsafe {
            let low = column::<P>(from, k * col, rows, k * col + LANES <= left);
            let high = if k + 1 < depth {
                column::<P>(from, (k + 1) * col, rows, (k + 1) * col + LANES <= left)
            } else {
                P::broadcast(0.0)
            };
            P::write(to.add(pair * rows), P::pair(low, high));
        }
    }
}

/// Rounds a matrix with any two strides, number by number, to `[row][pair]`; rows begin `apart` pairs from each other.
///
/// # Safety
/// The CPU has the features of `P`; the matrix has these rows and columns; `to` has room for the pairs.
#[inline(always)]
pub(super) unsafe fn pack_any<P: PairLanes>(
    from: *const f32,
    [row, col]: [usize; 2],
    rows: usize,
    depth: usize,
    (to, apart): (*mut f32, usize),
) {
    for index in 0..rows {
        for k in (0..depth).step_by(2 * LANES) {
            let count = (depth - k).min(2 * LANES);
            let mut numbers = [0.0f32; 2 * LANES];
            // SAFETY: column `k + at` is below `depth`, row `index` below `rows`.
            unsafe {
                for (at, number) in numbers.iter_mut().enumerate().take(count) {
                    *number = *from.add(index * row + (k + at) * col);
                }
                round_row::<P>(numbers.as_ptr(), count, to.add(index * apart + k / 2));
            }
        }
    }
}

/// As [`pack_any`], for numbers that are bfloat16 already.
///
/// # Safety
/// The matrix has these rows and columns; `to` has room for the pairs.
pub(super) unsafe fn copy_any(
    from: *const u16,
    [row, col]: [usize; 2],
    rows: usize,
    depth: usize,
    (to, apart): (*mut f32, usize),
) {
    for index in 0..rows {
        for k in 0..depth.next_multiple_of(2) {
            // SAFETY: column `k` is read below `depth`, row `index` below `rows`.
            unsafe {
                let number = if k < depth { *from.add(index * row + k * col) } else { 0 };
                *to.cast::<u16>().add(index * 2 * apart + k) = number;
            }
        }
    }
}

/// Scratch memory for the pairs of the largest tile, and for what a vector writes beyond them.
type Packed<const PAIRS: usize> = [MaybeUninit<f32>; PAIRS];

/// Rounds the tile of `rows` rows from `m` on and `depth` columns from `k0` on to `to`, and returns its operands,
/// without an `x`. A transposed quantized matrix is read from `strip`, which begins with row `strip_row`.
///
/// # Safety
/// The CPU has the features of `P`; the matrix has these rows and columns, `to` has room for `rows * depth.div_ceil(2)` pairs and 15
/// more. `strip` is filled with `depth` columns of these rows where it is needed.
#[inline(always)]
unsafe fn pack_tile<P: PairLanes>(
    term: &RawTerm<'_>,
    [m, rows]: [usize; 2],
    [k0, depth]: [usize; 2],
    (strip, strip_row): (&Strip, usize),
    to: *mut f32,
) -> Operands {
    let Operands { row, col, .. } = term.whole;
    let (at, pairs) = (m * row + k0 * col, depth.div_ceil(2));
    let from = term.numbers(at);
    // SAFETY: the matrix reaches these rows and columns, as the caller says.
    let (row, col) = unsafe {
        match from {
            _ if col == 1 => {
                pack_rows::<P>(from, row, rows, depth, (to, pairs));
                (pairs, 1)
            }
            Numbers::Quantized(..) => {
                let from = Numbers::Wide(strip.tile(strip_row, depth));
                pack_columns::<P>(from, rows, rows, depth, rows * depth, to);
                (1, rows)
            }
            _ if row == 1 => {
                pack_columns::<P>(from, col, rows, depth, term.len - at, to);
                (1, rows)
            }
            Numbers::Wide(from) => {
                pack_any::<P>(from, [row, col], rows, depth, (to, pairs));
                (pairs, 1)
            }
            Numbers::Narrow(from) => {
                copy_any(from, [row, col], rows, depth, (to, pairs));
                (pairs, 1)
            }
        }
    };
    Operands { matrix: to, row, col, x: std::ptr::null(), stride: 0, depth: pairs, next: None }
}

/// Computes the rows `m0..m1` and the panels `p0..p1` of a job's result.
///
/// # Safety
/// The rows and the panels, at most [`PAIR_PANELS`], are some of `out`, and no other task has them. `job` has passed the
/// checks of `gemm::matmul_grouped`.
pub(super) unsafe fn block(job: &Job<'_>, rows: [usize; 2], panels: [usize; 2]) {
    let count = panels[1] - panels[0];
    debug_assert!(count <= PAIR_PANELS);
    for stage in &job.stages {
        if !stage.first.rounded.is_null() {
            let none = [std::ptr::null_mut(); 2];
            // SAFETY: `stage` is one of the job's, and all of its terms are rounded; the rest is as the caller says.
            unsafe { stage_at(job, stage, none, rows, panels) };
            continue;
        }
        let first = stage.first.whole.depth.div_ceil(2).min(PAIRS);
        let second = stage.second.map_or(0, |second| second.whole.depth.div_ceil(2));
        with_scratch((first + second) * count * LANES, |scratch| {
            let mut scratch = Cutter(scratch);
            let x = [first, second].map(|pairs| scratch.take(pairs * count * LANES));
            // SAFETY: `stage` is one of the job's; `x` has room for the pairs of each of its terms; the rest is as the
            // caller says.
            unsafe { stage_at(job, stage, x, rows, panels) };
        });
    }
}

/// # Safety
/// The CPU has the features of `P`, and as [`block`], for one stage; `x` has room for a block of the first term's pairs in each panel,
/// and for all of the second term's.
#[inline(always)]
unsafe fn stage_block<P: PairLanes>(
    job: &Job<'_>,
    stage: &Stage<'_>,
    x: [*mut f32; 2],
    rows: [usize; 2],
    panels: [usize; 2],
) {
    let ([first_x, second_x], [m0, m1], [p0, p1]) = (x, rows, panels);
    let first = &stage.first;
    let (strips, depth) = (first.strips(), first.block(Order::InPairs));
    let most_rows = if first.interleaved.is_some() { P::TILE_ROWS.min(LANES / 2) } else { P::TILE_ROWS };
    #[allow(clippy::large_stack_arrays, reason = "15 KiB, so that the tile stays in L1")]
    let mut packed: Packed<{ PAIRS * 12 + LANES }> = [MaybeUninit::uninit(); PAIRS * 12 + LANES];
    let mut packed_second: Packed<{ DEPTH / 2 * 12 + LANES }> = [MaybeUninit::uninit(); DEPTH / 2 * 12 + LANES];
    let mut strip = Strip::new();
    let mut k0 = 0;
    loop {
        let part = depth.min(first.whole.depth - k0);
        let last = k0 + part == first.whole.depth;
        let (begins, second) = (k0 == 0 && stage.begins, stage.second.as_ref().filter(|_| last));
        let pairs = part.div_ceil(2);
        if first.rounded.is_null() {
            // SAFETY: the panels are some of `out`, and so of the operands; `part` is at most `2 * PAIRS`.
            unsafe { round_panels::<P>(&first.whole, [p0, p1], [k0, part], (first_x, Order::InPairs)) };
            if let Some(second) = second {
                // SAFETY: as above; all features of the second term.
                unsafe {
                    let depth = second.whole.depth;
                    round_panels::<P>(&second.whole, [p0, p1], [0, depth], (second_x, Order::InPairs));
                }
            }
        }
        // The address of panel `p0` in this block.
        let rounded = (job.panels, Order::InPairs);
        let first_x = first.rounded_block(rounded, [k0, part], p0).unwrap_or(first_x);
        let second_x = second.and_then(|it| it.rounded_block(rounded, [0, it.whole.depth], p0)).unwrap_or(second_x);
        for s0 in (m0..m1).step_by(TASK_ROWS) {
            let s1 = m1.min(s0 + TASK_ROWS);
            if strips {
                // SAFETY: `part <= DEPTH` and `s1 - s0 <= TASK_ROWS`; the matrix has these rows and columns.
                unsafe { strip.fill::<P::Wide, P>(first, [s0, s1 - s0], [k0, part]) };
            }
            let mut m = s0;
            while m < s1 {
                let rows = tile_rows(s1 - m, most_rows);
                // SAFETY: rows `m..m + rows` are some of `out`, and the matrices reach them and all columns; `rows` is at
                // most 12, `part` at most `2 * PAIRS`, and a second term is no deeper than DEPTH.
                let (mut first, mut second) = unsafe {
                    let to = packed.as_mut_ptr().cast();
                    let tile = match first.interleaved.and_then(|matrix| matrix.pairs(m / LANES)) {
                        // Used as it lies in memory: a tile is within a block of sixteen rows.
                        Some(words) => {
                            let apart = first.whole.depth.div_ceil(2) * LANES;
                            Operands::of_block(words.add(k0 / 2 * LANES), apart, [m % LANES, rows], pairs)
                        }
                        None => pack_tile::<P>(first, [m, rows], [k0, part], (&strip, m - s0), to),
                    };
                    let mut second_tile = None;
                    if let Some(second) = second {
                        let (columns, to) = ([0, second.whole.depth], packed_second.as_mut_ptr().cast());
                        second_tile = Some(pack_tile::<P>(second, [m, rows], columns, (&strip, 0), to));
                    }
                    (tile, second_tile)
                };
                first.stride = pairs * LANES;
                if let Some(second) = &mut second {
                    second.stride = second.depth * LANES;
                }
                let mut p = p0;
                while p < p1 {
                    let panels = P::TILE_PANELS.min(p1 - p);
                    first.x = first_x.wrapping_add((p - p0) * first.stride);
                    if let Some(second) = &mut second {
                        second.x = second_x.wrapping_add((p - p0) * second.stride);
                    }
                    // SAFETY: `m + rows <= m1` and `p + panels <= p1`. The operands are the tile of these rows, just
                    // packed, and these panels, just rounded.
                    unsafe {
                        with_tile!(rows, panels, matmul_tile::<P>(job, begins, &first, None, second.as_ref(), m, p));
                    };
                    first.next = first.next.map(|(next, _)| (next, 0));
                    p += panels;
                }
                m += rows;
            }
        }
        k0 += part;
        if last {
            break;
        }
    }
}

dispatch_pairs! {
    fn stage_at = stage_block(
        job: &Job<'_>,
        stage: &Stage<'_>,
        x: [*mut f32; 2],
        rows: [usize; 2],
        panels: [usize; 2],
    );
}

//! Products in tiles of AMX, whose operands are rounded to bfloat16, or of a bfloat16 matrix and an activation that is split into three such
//! numbers. Sums are float32, in an order that depends on the features alone.
//!
//! The activation's pairs, `[panel][pair][16 tokens]`, are tiles as they lie, and so are sixteen features of a panel of the result. Of
//! the matrix, a task packs a block of columns for all of its panels: `[32 rows][step of 32 columns][row][column]`. Then two panels stay
//! in the L1 cache while all rows pass. Features are padded with zeros to whole tiles.
use super::matmul;
use super::pairs::{Numbers, RUN, column, copy_any, pack_any, round_row};
use super::product::{Job, Operands, Order, RawTerm, Stage};
use super::rounding::round_panels;
use super::tile_sizes::{GROUP, STEP, pairs};
use crate::activation::LANES;
use crate::quant::any_run;
use crate::scratch::{Cutter, with_scratch};
use crate::simd::amx::{TilePart, TileSums, Tiles};
use crate::simd::{PairLanes, Simd, dispatch_pairs, number_of_half, prefetch, prefetch_far};
use std::mem::MaybeUninit;

/// Memory of a task: pairs of its rows of each term, and of its panels where they are not rounded for all tasks; and four tiles of sums.
#[derive(Clone, Copy)]
struct Memory {
    rows: [*mut f32; 2],
    x: [*mut f32; 2],
    sums: *mut f32,
}

/// The rows and the panels of a job's result. Meanwhile, asks for what is packed next: a block of columns of these rows of `then`'s first
/// matrix, unless the job has another stage.
///
/// # Safety
/// The rows and the panels are some of `out`, and no other task has them. `job` has passed the checks of `gemm::matmul_grouped`, and is
/// multiplied in tiles, which the processor has.
pub(super) unsafe fn block(job: &Job<'_>, rows: [usize; 2], panels: [usize; 2], then: Option<(&Job<'_>, [usize; 2])>) {
    let then = then.and_then(|(job, rows)| Some((job.order, job.stages.first()?, rows)));
    for (number, stage) in job.stages.iter().enumerate() {
        if !job.order.rounds(&stage.first) {
            // SAFETY: as the caller says.
            unsafe { matmul::block(job, number..number + 1, rows, panels) };
            continue;
        }
        let following = job.stages.get(number + 1).map(|stage| (job.order, stage, rows));
        let then = following.or(then).filter(|(order, stage, _)| order.rounds(&stage.first));
        let first = pairs(stage.first.block(job.order).min(stage.first.whole.depth));
        let both = [first, stage.second.map_or(0, |second| pairs(second.whole.depth))];
        let own = if stage.first.rounded.is_null() { panels[1] - panels[0] } else { 0 };
        let own = own * LANES * job.order.parts();
        let packed = (rows[1] - rows[0]).next_multiple_of(GROUP);
        with_scratch((both[0] + both[1]) * (packed + own) + 2 * GROUP * LANES, |scratch| {
            let mut scratch = Cutter(scratch);
            let memory = Memory {
                rows: both.map(|pairs| scratch.take(pairs * packed)),
                x: both.map(|pairs| scratch.take(pairs * own)),
                sums: scratch.take(2 * GROUP * LANES),
            };
            // SAFETY: `stage` is one of the job's; there is room for the pairs of a block of the first term and of all of the second;
            // the rest is as the caller says.
            unsafe { stage_at(job, stage, memory, rows, panels, then) };
        });
    }
}

/// Where row `row` of [`GROUP`] packed ones has the pairs of the [`STEP`] columns from `k` on, a multiple of it.
const fn place(to: *mut f32, row: usize, k: usize) -> *mut f32 {
    to.wrapping_add((k / STEP * GROUP + row) * (STEP / 2))
}

/// The whole tiles of [`pack_columns`]: [`GROUP`] rows of [`STEP`] columns of bfloat16 numbers. Each line of memory is read once.
///
/// # Safety
/// The features of `P`; `from` leads to these rows and columns, `to` has room for them.
#[inline(always)]
unsafe fn pack_tiles<P: PairLanes>(from: *const u16, col: usize, to: *mut f32) {
    // SAFETY: as the caller says; what is only asked for need not be there.
    unsafe {
        let mut halves = [[P::broadcast(0.0); LANES]; 2];
        for pair in 0..LANES {
            let [low, high] = [2 * pair, 2 * pair + 1].map(|k| from.wrapping_add(k * col));
            prefetch(low.wrapping_add(STEP * col).cast());
            prefetch(high.wrapping_add(STEP * col).cast());
            let both = P::pair_word_halves(low, high);
            for (half, pairs) in halves.iter_mut().zip(both) {
                half[pair] = pairs;
            }
        }
        for (half, columns) in halves.iter().enumerate() {
            for (lane, pairs) in P::Wide::turn(columns).into_iter().enumerate() {
                P::write(place(to, number_of_half(half, lane), 0), pairs);
            }
        }
    }
}

/// Packs rows of a transposed matrix, whose rows are 1 apart and columns `col`, at most [`GROUP`], as [`pack`] does. `left` numbers lie
/// behind `from`.
///
/// # Safety
/// The features of `P`; the matrix has these rows and `depth` columns; `to` has room for [`GROUP`] rows.
#[inline(always)]
unsafe fn pack_columns<P: PairLanes>(
    from: Numbers<'_>,
    col: usize,
    rows: usize,
    depth: usize,
    left: usize,
    to: *mut f32,
) {
    for k0 in (0..depth).step_by(STEP) {
        let mut wide = [0.0f32; STEP * GROUP];
        let (from, col, left) = match from {
            Numbers::Quantized(matrix, at) => {
                for k in 0..STEP.min(depth - k0) {
                    // SAFETY: the matrix has column `k0 + k` and these rows, at most `GROUP`.
                    unsafe {
                        let mut run = [0.0f32; GROUP + LANES];
                        any_run::<P::Wide>(matrix, at + (k0 + k) * col, run.as_mut_ptr(), rows);
                        wide[k * GROUP..][..rows].copy_from_slice(&run[..rows]);
                    }
                }
                (Numbers::Wide(wide.as_ptr()), GROUP, wide.len())
            }
            Numbers::Wide(from) => (Numbers::Wide(from.wrapping_add(k0 * col)), col, left - k0 * col),
            Numbers::Narrow(from) => (Numbers::Narrow(from.wrapping_add(k0 * col)), col, left - k0 * col),
        };
        if let Numbers::Narrow(from) = from
            && rows == GROUP
            && k0 + STEP <= depth
        {
            // SAFETY: columns `k0` to `k0 + STEP` have these rows, all of which are there; `to` has place for their pairs.
            unsafe { pack_tiles::<P>(from, col, place(to, 0, k0)) };
            continue;
        }
        for first in (0..rows).step_by(LANES) {
            let count = LANES.min(rows - first);
            // SAFETY: column `k` is below `depth`, and the next one where it is read; a whole vector is read only where it is there. `to`
            // has place for the pairs of whole tiles.
            unsafe {
                let mut columns = [P::broadcast(0.0); LANES];
                for (pair, both) in columns.iter_mut().enumerate() {
                    let k = 2 * pair;
                    if k0 + k >= depth {
                        break;
                    }
                    let [low, high] = [k, k + 1].map(|k| k * col + first);
                    let low = column::<P>(from, low, count, low + LANES <= left);
                    let mut next = P::broadcast(0.0);
                    if k0 + k + 1 < depth {
                        next = column::<P>(from, high, count, high + LANES <= left);
                    }
                    *both = P::pair(low, next);
                }
                for (row, pairs) in P::Wide::turn(&columns).into_iter().enumerate() {
                    P::write(place(to, first + row, k0), pairs);
                }
            }
        }
    }
}

/// Packs rows of `depth` consecutive numbers, which begin `row` numbers apart, as [`pack`] does.
///
/// # Safety
/// The features of `P`; the matrix has these rows, at most [`GROUP`]; `to` has room for [`GROUP`] rows.
#[inline(always)]
unsafe fn pack_along<P: PairLanes>(from: Numbers<'_>, row: usize, rows: usize, depth: usize, to: *mut f32) {
    for index in 0..rows {
        match from {
            Numbers::Narrow(from) => {
                let from = from.wrapping_add(index * row);
                let whole = depth / STEP * STEP;
                // SAFETY: these columns of the row are below `depth`; `to` has place for whole tiles.
                unsafe {
                    for k in (0..whole).step_by(STEP) {
                        P::write(place(to, index, k), P::read(from.add(k).cast()));
                    }
                    if whole < depth {
                        let mut last = [0u16; STEP];
                        std::ptr::copy_nonoverlapping(from.add(whole), last.as_mut_ptr(), depth - whole);
                        P::write(place(to, index, whole), P::read(last.as_ptr().cast()));
                    }
                }
            }
            Numbers::Wide(from) => {
                for k in (0..depth).step_by(STEP) {
                    // SAFETY: these columns of the row are below `depth`; `to` has place for whole tiles.
                    unsafe { pack_step::<P>(from.add(index * row + k), STEP.min(depth - k), place(to, index, k)) };
                }
            }
            Numbers::Quantized(matrix, at) => {
                let mut wide = [MaybeUninit::<f32>::uninit(); RUN + LANES];
                let wide: *mut f32 = wide.as_mut_ptr().cast();
                for k0 in (0..depth).step_by(RUN) {
                    let run = RUN.min(depth - k0);
                    // SAFETY: these columns of the row are the matrix's; a run may write up to a vector more; `to` has place for whole tiles.
                    unsafe {
                        any_run::<P::Wide>(matrix, at + index * row + k0, wide, run);
                        for k in (0..run).step_by(STEP) {
                            pack_step::<P>(wide.add(k), STEP.min(run - k), place(to, index, k0 + k));
                        }
                    }
                }
            }
        }
    }
}

/// Rounds up to [`STEP`] numbers to pairs, and adds zeros.
///
/// # Safety
/// The features of `P`; `count` numbers are there; `to` has room for [`STEP`].
#[inline(always)]
unsafe fn pack_step<P: PairLanes>(from: *const f32, count: usize, to: *mut f32) {
    // SAFETY: as the caller says.
    unsafe {
        if count == STEP {
            round_row::<P>(from, STEP, to);
            return;
        }
        let mut last = [0.0f32; STEP];
        std::ptr::copy_nonoverlapping(from, last.as_mut_ptr(), count);
        round_row::<P>(last.as_ptr(), STEP, to);
    }
}

/// Packs `rows` rows from `m` on, at most [`GROUP`], and `depth` columns from `k0` on, as bfloat16 numbers:
/// `[step][GROUP rows][STEP columns]`. Columns beyond `depth` become zeros, and rows beyond `rows` are anything.
///
/// # Safety
/// The features of `P`; the matrix has these rows and columns; `to` has room for the pairs of [`GROUP`] rows.
#[inline(always)]
unsafe fn pack<P: PairLanes>(term: &RawTerm<'_>, [m, rows]: [usize; 2], [k0, depth]: [usize; 2], to: *mut f32) {
    let Operands { row, col, .. } = term.whole;
    let at = m * row + k0 * col;
    let from = term.numbers(at);
    // SAFETY: the matrix reaches these rows and columns, as the caller says.
    unsafe {
        if col == 1 {
            return pack_along::<P>(from, row, rows, depth, to);
        }
        if row == 1 {
            return pack_columns::<P>(from, col, rows, depth, term.len - at, to);
        }
        for k in (0..depth).step_by(STEP) {
            let (to, count) = (place(to, 0, k), STEP.min(depth - k));
            if count < STEP {
                to.write_bytes(0, GROUP * STEP / 2);
            }
            let to_and_apart = (to, STEP / 2);
            match from {
                Numbers::Wide(from) => pack_any::<P>(from.add(k * col), [row, col], rows, count, to_and_apart),
                Numbers::Narrow(from) => copy_any(from.add(k * col), [row, col], rows, count, to_and_apart),
                // A quantized matrix lies in rows or is transposed.
                Numbers::Quantized(..) => {}
            }
        }
    }
}

/// Asks for part number `part` of `parts` of the numbers that these rows and columns have, to be packed soon: they come while others are
/// multiplied.
#[inline(always)]
fn fetch(term: &RawTerm<'_>, [m, end]: [usize; 2], [k0, depth]: [usize; 2], [part, parts]: [usize; 2]) {
    const LINE: usize = 64;
    let Operands { row, col, .. } = term.whole;
    let (rows, depth) = (end - m, depth.min(term.whole.depth - k0));
    let at = m * row + k0 * col;
    let (from, size): (*const u8, usize) = match term.numbers(at) {
        Numbers::Wide(from) => (from.cast(), size_of::<f32>()),
        Numbers::Narrow(from) => (from.cast(), size_of::<u16>()),
        Numbers::Quantized(..) => return,
    };
    // Numbers lie end to end in runs: rows, or columns of a transposed matrix.
    let (runs, apart, bytes) = match [row, col] {
        [_, 1] => (rows, row * size, depth * size),
        [1, _] => (depth, col * size, rows * size),
        _ => return,
    };
    for run in runs * part / parts..runs * (part + 1) / parts {
        for byte in (0..bytes).step_by(LINE) {
            prefetch_far(from.wrapping_add(run * apart + byte).cast());
        }
    }
}

/// As [`block`], for one stage.
///
/// # Safety
/// The features of `P`, and as [`block`], with room for the stage's pairs in `memory`.
#[inline(always)]
unsafe fn stage_block<P: PairLanes>(
    job: &Job<'_>,
    stage: &Stage<'_>,
    memory: Memory,
    [m0, m1]: [usize; 2],
    [p0, p1]: [usize; 2],
    then: Option<(Order, &Stage<'_>, [usize; 2])>,
) {
    let first = &stage.first;
    let depth = first.block(job.order);
    // SAFETY: the job is multiplied in tiles, as the caller says.
    let tiles = unsafe { Tiles::begin() };
    let mut k0 = 0;
    loop {
        let part = depth.min(first.whole.depth - k0);
        let last = k0 + part == first.whole.depth;
        let (begins, second) = (k0 == 0 && stage.begins, stage.second.as_ref().filter(|_| last));
        // The terms, their columns, and where panel `p0` of each is.
        let terms = [Some((first, [k0, part])), second.map(|second| (second, [0, second.whole.depth]))];
        let (mut x, mut steps, mut count) = (memory.x, [0; 2], 0);
        for (number, term) in terms.iter().enumerate() {
            let Some((term, [k0, depth])) = *term else { continue };
            match term.rounded_block((job.panels, job.order), [k0, depth], p0) {
                Some(rounded) => x[number] = rounded,
                // SAFETY: the panels are some of `out`, and so of the operands; there is room for them.
                None => unsafe {
                    round_panels::<P>(&term.whole, [p0, p1], [k0, depth], (x[number], job.order));
                },
            }
            for (group, m) in (m0..m1).step_by(GROUP).enumerate() {
                let to = memory.rows[number].wrapping_add(group * GROUP * pairs(depth));
                // SAFETY: these rows are some of `out`, and the matrix reaches them and its columns; there is room for them.
                unsafe { pack::<P>(term, [m, GROUP.min(m1 - m)], [k0, depth], to) };
            }
            steps[number] = pairs(depth) / (STEP / 2);
            count += 1;
        }
        // What is packed after this block.
        let next = if last {
            then.map(|(order, stage, rows)| (&stage.first, rows, [0, stage.first.block(order)]))
        } else {
            Some((first, [m0, m1], [k0 + part, depth]))
        };
        let [groups, pairs_of_panels] = [(m1 - m0).div_ceil(GROUP), (p1 - p0).div_ceil(2)];
        for p in (p0..p1).step_by(2) {
            let panels = 2.min(p1 - p);
            for (group, m) in (m0..m1).step_by(GROUP).enumerate() {
                if let Some((term, rows, columns)) = next {
                    let turn = (p - p0) / 2 * groups + group;
                    fetch(term, rows, columns, [turn, groups * pairs_of_panels]);
                }
                let parts: [TilePart; 2] = std::array::from_fn(|number| {
                    let pairs = steps[number] * STEP / 2;
                    let one = job.order.parts() * pairs * LANES;
                    TilePart {
                        rows: memory.rows[number].wrapping_add(group * GROUP * pairs).cast_const().cast(),
                        apart: STEP * size_of::<u16>(),
                        columns: [p, p + panels - 1]
                            .map(|p| x[number].wrapping_add((p - p0) * one).cast_const().cast()),
                        steps: steps[number],
                    }
                });
                // The sums after these ones.
                let after = if m + GROUP < m1 { [m + GROUP, p] } else { [m0, if p + 2 < p1 { p + 2 } else { p0 }] };
                let rows = GROUP.min(m1 - m);
                // SAFETY: the rows and panels are some of `out`, which no other task has; the parts are those just packed and rounded.
                unsafe {
                    add_products(job, begins, &tiles, &parts[..count], memory.sums, [m, rows], [p, panels], after);
                }
            }
        }
        k0 += part;
        if last {
            break;
        }
    }
}

/// Adds products to the sums of `rows` rows from `m` on and `panels` panels from `p` on, or to what they start with if `begins`. Asks for
/// the sums at a row and a panel meanwhile.
///
/// # Safety
/// These rows and panels are some of `out`, and no other task has them; `parts` are their operands, packed. `sums` has room for four tiles.
#[inline(always)]
unsafe fn add_products(
    job: &Job<'_>,
    begins: bool,
    tiles: &Tiles,
    parts: &[TilePart],
    sums: *mut f32,
    [m, rows]: [usize; 2],
    [p, panels]: [usize; 2],
    [next_row, next_panel]: [usize; 2],
) {
    const ROW: usize = LANES * size_of::<f32>();
    const TILE: usize = LANES * LANES;
    let next = job.out.wrapping_add(next_panel * job.stride + next_row * LANES).cast_const();
    let next = [next, if panels == 2 { next.wrapping_add(job.stride) } else { next }];
    // SAFETY: as the caller says.
    let add = |sums: &TileSums, parts: &[TilePart], size: [usize; 2]| unsafe {
        tiles.add_packed_products(sums, parts, size, job.order == Order::Split, next);
    };
    let at = p * job.stride + m * LANES;
    let out = job.out.wrapping_add(at);
    // SAFETY: all rows of these panels lie within `out`, and so within an addend, which has its shape, and below the bias's length. Tiles
    // of less than sixteen rows are summed in `sums`.
    unsafe {
        let mut from = out.cast_const();
        if begins && !job.addend.is_null() {
            from = job.addend.wrapping_add(at);
        } else if begins && !job.bias.is_null() {
            for panel in 0..panels {
                for row in 0..rows {
                    let to = out.add(panel * job.stride + row * LANES).cast::<[f32; LANES]>();
                    to.write_unaligned([*job.bias.add(m + row); LANES]);
                }
            }
        }
        let (zero, size) = (begins && job.zero, [rows.div_ceil(LANES), panels]);
        if rows % LANES == 0 {
            let start = TileSums::places(from.cast_mut(), TILE, job.stride).map(<*mut f32>::cast_const);
            let to = TileSums::places(out, TILE, job.stride);
            let from = if zero { [std::ptr::null(); 4] } else { start };
            add(&TileSums { from, to, apart: ROW }, parts, size);
            return;
        }
        if !zero {
            for panel in 0..panels {
                let (from, to) = (from.add(panel * job.stride), sums.add(panel * GROUP * LANES));
                std::ptr::copy_nonoverlapping(from, to, rows * LANES);
            }
        }
        let to = TileSums::places(sums, TILE, GROUP * LANES);
        let from = if zero { [std::ptr::null(); 4] } else { to.map(<*mut f32>::cast_const) };
        add(&TileSums { from, to, apart: ROW }, parts, size);
        for panel in 0..panels {
            let (from, to) = (sums.add(panel * GROUP * LANES), out.add(panel * job.stride));
            std::ptr::copy_nonoverlapping(from, to, rows * LANES);
        }
    }
}

dispatch_pairs! {
    fn stage_at = stage_block(
        job: &Job<'_>,
        stage: &Stage<'_>,
        memory: Memory,
        rows: [usize; 2],
        panels: [usize; 2],
        then: Option<(Order, &Stage<'_>, [usize; 2])>,
    );
}

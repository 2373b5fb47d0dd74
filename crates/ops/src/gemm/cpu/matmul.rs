//! `out[t, m] = init + sum over terms of sum_k matrix[m, k] x[t, k]`, in blocks that stay in the caches.
use super::pairs;
use super::quantized::{self, Strip};
use super::{DEPTH, TASK_ROWS, tile, tile_rows, with_tile};
use crate::activation::{Activation, LANES};
use crate::gemm::{Init, Matrix, Store, Term};
use crate::quant::Quantized;
use crate::simd::{Simd, TileLanes, dispatch, prefetch};
use smallvec::SmallVec;
use tunesmith_cpu_slice::CpuSlice as _;

/// What a tile multiplies: rows of a matrix, and panels of an activation.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// The first row.
    pub(super) matrix: *const f32,
    pub(super) row: usize,
    pub(super) col: usize,
    /// The first panel.
    pub(super) x: *const f32,
    /// From one panel to the next.
    pub(super) stride: usize,
    pub(super) depth: usize,
    /// How far ahead of its reading the matrix is fetched; 0 leaves that to the processor.
    pub(super) ahead: usize,
}

#[derive(Clone, Copy)]
pub(super) struct RawTerm<'a> {
    /// The whole term. The matrix is null where it is not float32, until a tile of it has been widened.
    pub(super) whole: Operands,
    /// The matrix where it is bfloat16.
    pub(super) narrow: *const u16,
    /// The matrix where it is quantized.
    pub(super) quantized: Option<&'a Quantized>,
    /// The number of values of the matrix.
    pub(super) len: usize,
}

/// Terms that a tile is summed over before it goes back to memory.
pub(super) struct Stage<'a> {
    /// In blocks of [`DEPTH`].
    pub(super) first: RawTerm<'a>,
    /// At once, after the last block of the first one.
    pub(super) second: Option<RawTerm<'a>>,
    /// The result begins here; later stages go on with what `out` holds.
    pub(super) begins: bool,
}

/// A product, and how it is cut into tasks.
pub(super) struct Job<'a> {
    out: *mut f32,
    rows: usize,
    panels: usize,
    stride: usize,
    bias: *const f32,
    addend: *const f32,
    zero: bool,
    /// Only the first eight lanes of the one panel have a token.
    few: bool,
    /// Operands are rounded to bfloat16 and multiplied in pairs.
    pairs: bool,
    pub(super) stages: SmallVec<[Stage<'a>; 1]>,
    /// Rows of a task.
    row_step: usize,
    /// Panels of a task.
    panel_step: usize,
}

// SAFETY: the operands stay borrowed while tasks run; each reads them and writes a block of `out` that no other task
// has.
unsafe impl Sync for Job<'_> {}

/// Rows of the largest tile of any kernel.
const TILE_ROWS: usize = 12;
/// Depth from which packing a tile of a transposed matrix pays: an LM head, which no cache holds.
const PACK_DEPTH: usize = 4096;
/// Panels from which it pays.
const PACK_PANELS: usize = 6;
/// The most rows of a task.
const MOST_ROWS: usize = 288;
/// The number of panels that a task computes.
const TASK_PANELS: usize = 16;

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

/// As [`tile`] with one panel and rows that lie end to end. Each line of the matrix is fetched `ahead` floats before it
/// is read: with one panel a product is as fast as memory is read, and rows are too short for the processor to
/// prefetch.
///
/// # Safety
/// As [`tile`], with `part.depth` columns that lie 1 apart.
#[inline(always)]
unsafe fn stream<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    part: &Operands,
    x: *const f32,
    acc: &mut [[S::Sum; PANELS]; ROWS],
) {
    let mut k = 0;
    while k < part.depth {
        let depth = LANES.min(part.depth - k);
        for row in 0..ROWS {
            prefetch(part.matrix.wrapping_add(row * part.row + part.ahead + k));
        }
        // SAFETY: the columns `k..k + depth` are some of the `part.depth` that the caller promises.
        unsafe {
            let matrix = part.matrix.wrapping_add(k);
            tile::<S, ROWS, PANELS>(depth, matrix, part.row, 1, x.wrapping_add(k * LANES), part.stride, acc);
        }
        k += depth;
    }
}

/// One tile of `out` at row `m` and panel `p`: the products of `first`, then those of `second`, added to what the result
/// starts with if `begins`, or else to what `out` holds.
///
/// # Safety
/// The features of `S`; the rows `m..m + ROWS` and the panels `p..p + PANELS` are some of `out`, and no other task has
/// them. The operands begin with these rows and with panel `p`, and have as many.
#[inline(always)]
pub(super) unsafe fn matmul_tile<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    job: &Job<'_>,
    begins: bool,
    first: &Operands,
    second: Option<&Operands>,
    m: usize,
    p: usize,
) {
    // SAFETY: the rows and panels lie within `out`, and so within an addend, which has its shape, and below the bias's
    // length. The operands are there, as the caller says.
    unsafe {
        let out = job.out.add(p * job.stride + m * LANES);
        let mut acc = [[S::broadcast(0.0); PANELS]; ROWS];
        let base: *const f32 = if !begins || (!job.zero && job.addend.is_null() && job.bias.is_null()) {
            out
        } else if job.addend.is_null() {
            std::ptr::null()
        } else {
            job.addend.add(p * job.stride + m * LANES)
        };
        if !base.is_null() {
            for (row, sums) in acc.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::read(base.add(panel * job.stride + row * LANES));
                }
            }
        } else if !job.bias.is_null() {
            for (row, sums) in acc.iter_mut().enumerate() {
                *sums = [S::broadcast(*job.bias.add(m + row)); PANELS];
            }
        }
        if PANELS == 1 && first.ahead > 0 {
            stream::<S, ROWS, PANELS>(first, first.x, &mut acc);
        } else {
            let Operands { matrix, row, col, x, stride, depth, .. } = *first;
            tile::<S, ROWS, PANELS>(depth, matrix, row, col, x, stride, &mut acc);
        }
        if let Some(&Operands { matrix, row, col, x, stride, depth, .. }) = second {
            tile::<S, ROWS, PANELS>(depth, matrix, row, col, x, stride, &mut acc);
        }
        for (row, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::write(out.add(panel * job.stride + row * LANES), *sum);
            }
        }
    }
}

/// # Safety
/// The features of `S`; the rows `m0..m1`, at most [`TASK_ROWS`], and the panels `p0..p1` are some of `out`, and no
/// other task has them. `job` has passed the checks of `gemm::matmul_grouped`.
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
            } else if first.row == 1 && rows == T::TILE_ROWS && first.depth >= PACK_DEPTH && p1 - p0 >= PACK_PANELS {
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

impl<'a> Job<'a> {
    /// The product of one entry of `gemm::matmul_grouped`.
    pub(super) fn new(out: &mut Activation, init: Init<'a>, terms: &[Term<'a>]) -> Self {
        let (rows, panels, stride) = (out.features(), out.panels(), out.stride());
        let pairs = pairs::fit(out);
        // Enough tasks for every thread, each of many rows: a task reads its panels, and rounds them, once for all of them.
        let threads = rayon::current_num_threads();
        let most_panels = if pairs { pairs::TASK_PANELS } else { TASK_PANELS };
        let panel_step = panels.div_ceil(4 * threads).next_multiple_of(2).clamp(2, most_panels);
        let row_tasks = (4 * threads).div_ceil(panels.div_ceil(panel_step).max(1));
        let row_step = rows.div_ceil(row_tasks).next_multiple_of(12).clamp(12, MOST_ROWS);
        let panel_step = if rows <= row_step { panel_step } else { most_panels };
        let mut job = Self {
            out: out.shared().get(),
            rows,
            panels,
            stride,
            bias: std::ptr::null(),
            addend: std::ptr::null(),
            zero: false,
            few: out.tokens() <= LANES / 2,
            pairs,
            stages: SmallVec::new(),
            row_step,
            panel_step,
        };
        match init {
            Init::Zero => job.zero = true,
            Init::Bias(bias) => job.bias = bias.cpu_slice().as_ptr(),
            Init::Out => {}
            Init::Add(other) => job.addend = other.ptr(),
        }
        for term in terms {
            let term = RawTerm::new(term, panels);
            match job.stages.last_mut() {
                // A low-rank term needs no blocks: the tile stays in registers for it.
                Some(stage)
                    if stage.second.is_none()
                        && (!term.whole.matrix.is_null() || pairs && term.quantized.is_none())
                        && term.whole.depth <= DEPTH =>
                {
                    stage.second = Some(term);
                }
                last => {
                    let begins = last.is_none();
                    job.stages.push(Stage { first: term, second: None, begins });
                }
            }
        }
        job
    }

    /// The number of tasks.
    pub(super) const fn tasks(&self) -> usize {
        self.rows.div_ceil(self.row_step) * self.panels.div_ceil(self.panel_step)
    }

    /// Computes one part of `out`.
    ///
    /// # Safety
    /// `task` is below [`Job::tasks`], and no other thread has it. The operands have passed the checks of
    /// `gemm::matmul_grouped` and stay borrowed, `out` for writing.
    pub(super) unsafe fn run(&self, task: usize) {
        let panel_tasks = self.panels.div_ceil(self.panel_step);
        let (m0, p0) = (task / panel_tasks * self.row_step, task % panel_tasks * self.panel_step);
        let (m1, p1) = (self.rows.min(m0 + self.row_step), self.panels.min(p0 + self.panel_step));
        if self.pairs {
            // SAFETY: as below; a task's panels are at most TASK_PANELS.
            unsafe { pairs::block(self, [m0, m1], [p0, p1]) };
            return;
        }
        // One panel uses each number once: the matrix is read as it lies in memory.
        let quantized = || self.stages.iter().any(|stage| stage.first.quantized.is_some());
        let step = match self.panels {
            1 => TILE_ROWS,
            _ if quantized() => TASK_ROWS,
            _ => self.row_step,
        };
        for m in (m0..m1).step_by(step) {
            // SAFETY: the operands fit `out`, as the caller says. The block lies within it, at most TASK_ROWS rows, and
            // tasks have different blocks.
            unsafe { matmul_block_at(self, m, m1.min(m + step), p0, p1) };
        }
    }
}

impl<'a> RawTerm<'a> {
    /// A term of a product with so many panels.
    fn new(term: &Term<'a>, panels: usize) -> Self {
        let Matrix { data, row, col } = term.matrix;
        let (matrix, narrow, quantized) = match data {
            Store::F32(values) => (values.cpu_slice().as_ptr(), std::ptr::null(), None),
            Store::Bf16(values) => (std::ptr::null(), values.cpu_slice().as_ptr().cast(), None),
            Store::Quantized(matrix) => (std::ptr::null(), std::ptr::null(), Some(matrix)),
        };
        let ahead = if panels == 1 && col == 1 && !matrix.is_null() { TILE_ROWS * row } else { 0 };
        let (x, stride, depth) = (term.x.ptr(), term.x.stride(), term.x.features());
        Self { whole: Operands { matrix, row, col, x, stride, depth, ahead }, narrow, quantized, len: data.len() }
    }
}

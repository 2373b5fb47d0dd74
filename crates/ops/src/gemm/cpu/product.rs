//! A product, how it is cut into tasks, and the tile that all kernels have.
use super::{DEPTH, TASK_ROWS, tile, tile_and, tile_sizes};
use crate::activation::{Activation, LANES, Pool};
use crate::gemm::{Init, Interleaved, Matrix, Store, Term};
use crate::quant::Quantized;
use crate::simd::amx::SPLIT;
use crate::simd::{self, Level, TileLanes, prefetch_far};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use tunesmith_cpu_slice::CpuSlice as _;

/// Rows of the largest tile of any kernel.
pub(super) const TILE_ROWS: usize = 12;
/// The most rows of a task.
const MOST_ROWS: usize = 288;
/// The most panels of a task in float32.
const TASK_PANELS: usize = 16;
/// The same in pairs: a tile is packed once for all of them.
pub(super) const PAIR_PANELS: usize = 32;

/// Tasks for each thread where panels are rounded for all of them, and the fewest rows of one.
const SHARED_TASKS: usize = 4;
const FEWEST_ROWS: usize = 48;

/// Rows of a task with an interleaved matrix are a multiple of this: of a block's, and of the largest tile's.
const INTERLEAVED_ROWS: usize = 48;

/// The fewest rows and panels of a product whose tasks pack all of their tiles, and the most panels of such a task. Speed was measured
/// with 32 and 64 panels; the fewest are estimates.
const STRIP_ROWS: usize = 48;
const STRIP_PANELS: usize = 8;
const MOST_STRIP_PANELS: usize = 64;
/// The fewest panels with AVX-512, unless the matrix or the activation [`aliases`].
const FEWEST_WIDE: usize = 32;
/// The most features of an activation that the caches hold for several tasks.
const DEEP: usize = 4096;

/// Whether rows of the matrix lie multiples of 4 KiB apart, or panels of the activation multiples of 64 KiB: caches have few places for lines at
/// such distances.
fn aliases(term: &Term<'_>) -> bool {
    [term.matrix.row, term.matrix.col, term.x.features()].iter().any(|apart| apart.is_multiple_of(1024))
}

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
    /// What to fetch while columns of a block of sixteen rows are multiplied, and floats of it for each.
    pub(super) next: Option<(*const f32, usize)>,
}

impl Operands {
    /// `rows` rows from `lane` on of a block that holds sixteen rows of each column, without an `x`. They fetch their share of the block
    /// `apart` floats later.
    pub(super) const fn of_block(block: *const f32, apart: usize, [lane, rows]: [usize; 2], depth: usize) -> Self {
        let next = Some((block.wrapping_add(apart + lane * depth), rows));
        Self { matrix: block.wrapping_add(lane), row: 1, col: LANES, x: std::ptr::null(), stride: 0, depth, next }
    }
}

#[derive(Clone, Copy)]
pub(super) struct RawTerm<'a> {
    /// The whole term. The matrix is null where it is not float32, until a tile of it has been widened.
    pub(super) whole: Operands,
    /// The matrix where it is bfloat16.
    pub(super) narrow: *const u16,
    /// The matrix where it is quantized.
    pub(super) quantized: Option<&'a Quantized>,
    /// The matrix where it is interleaved.
    pub(super) interleaved: Option<&'a Interleaved>,
    /// The number of values of the matrix.
    pub(super) len: usize,
    /// The activation, rounded for all tasks as `rounded` says, or null where each task rounds its own panels.
    pub(super) rounded: *const f32,
}

/// Terms that a tile is summed over before it goes back to memory.
pub(super) struct Stage<'a> {
    /// In blocks of [`DEPTH`], or of so many features as `pairs` says.
    pub(super) first: RawTerm<'a>,
    /// At once, after the last block of the first one.
    pub(super) second: Option<RawTerm<'a>>,
    /// The result begins here; later stages go on with what `out` holds.
    pub(super) begins: bool,
}

/// How a task computes its block of the result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// One tile of the matrix after the other, each with all panels.
    ByTile,
    /// All tiles are packed at one depth, and multiplied with one panel after the other.
    ByPanel,
    /// One tile after the other; operands are rounded to bfloat16 and multiplied in pairs.
    InPairs,
    /// Operands are rounded to bfloat16 and multiplied in tiles of AMX.
    InTiles,
    /// A bfloat16 matrix is multiplied in tiles of AMX with the three bfloat16 numbers of each of the activation's; other matrices are
    /// multiplied one tile after the other, in float32.
    Split,
}

impl Order {
    /// Whether a term's operands are multiplied as bfloat16 numbers.
    pub(super) const fn rounds(self, term: &RawTerm<'_>) -> bool {
        match self {
            Self::InPairs | Self::InTiles => true,
            Self::Split => !term.narrow.is_null(),
            Self::ByTile | Self::ByPanel => false,
        }
    }

    /// Whether AMX multiplies.
    pub(super) const fn in_tiles(self) -> bool {
        matches!(self, Self::InTiles | Self::Split)
    }

    /// Bfloat16 numbers that stand for one of an activation's.
    pub(super) const fn parts(self) -> usize {
        if matches!(self, Self::Split) { SPLIT } else { 1 }
    }

    /// Pairs of a panel's tokens for so many features of a block.
    pub(super) const fn pairs(self, features: usize) -> usize {
        if self.in_tiles() { self.parts() * tile_sizes::pairs(features) } else { features.div_ceil(2) }
    }
}

/// A product, and how it is cut into tasks.
pub(super) struct Job<'a> {
    pub(super) out: *mut f32,
    pub(super) rows: usize,
    pub(super) panels: usize,
    pub(super) stride: usize,
    pub(super) bias: *const f32,
    pub(super) addend: *const f32,
    pub(super) zero: bool,
    pub(super) order: Order,
    pub(super) stages: SmallVec<[Stage<'a>; 1]>,
    /// Rows of a task.
    pub(super) row_step: usize,
    /// Panels of a task.
    panel_step: usize,
}

// SAFETY: the operands stay borrowed while tasks run; each reads them and writes a block of `out` that no other task
// has.
unsafe impl Sync for Job<'_> {}

/// What the sums of a tile start with: those of `out` at row `m` and panel `p`, or the product's own start if it `begins`.
///
/// # Safety
/// As of [`matmul_tile`].
#[inline(always)]
unsafe fn starts<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    job: &Job<'_>,
    begins: bool,
    m: usize,
    p: usize,
) -> [[S::Sum; PANELS]; ROWS] {
    // SAFETY: the rows and panels lie within `out`, and so within an addend, which has its shape, and below the bias's length.
    unsafe {
        let mut starts = [[S::broadcast(0.0); PANELS]; ROWS];
        let base: *const f32 =
            if !begins || (!job.zero && job.addend.is_null() && job.bias.is_null()) { job.out } else { job.addend };
        if !base.is_null() {
            let base = base.add(p * job.stride + m * LANES);
            for (row, sums) in starts.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::read(base.add(panel * job.stride + row * LANES));
                }
            }
        } else if !job.bias.is_null() {
            for (row, sums) in starts.iter_mut().enumerate() {
                *sums = [S::broadcast(*job.bias.add(m + row)); PANELS];
            }
        }
        starts
    }
}

/// One tile of `out` at row `m` and panel `p`: the products of `first`, then those of `second`, added to what the result
/// starts with if `begins`, or else to what `out` holds. With `factors`, one a row, the products of `first` are summed on their own and
/// multiplied by them.
///
/// # Safety
/// The features of `S`; the rows `m..m + ROWS` and the panels `p..p + PANELS` are some of `out`, and no other task has
/// them. The operands begin with these rows and with panel `p`, and have as many.
#[inline(always)]
pub(super) unsafe fn matmul_tile<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    job: &Job<'_>,
    begins: bool,
    first: &Operands,
    factors: Option<&[f32; TILE_ROWS]>,
    second: Option<&Operands>,
    m: usize,
    p: usize,
) {
    // SAFETY: the rows and panels lie within `out`, and so within an addend, which has its shape, and below the bias's
    // length. The operands are there, as the caller says.
    unsafe {
        // Loops over the sums hold no branches, so that the compiler unrolls them.
        let mut acc = match factors {
            Some(_) => [[S::broadcast(0.0); PANELS]; ROWS],
            None => starts::<S, ROWS, PANELS>(job, begins, m, p),
        };
        let Operands { matrix, row, col, x, stride, depth, next } = *first;
        if row == 1 && col == ROWS {
            // Packed: the compiler knows the strides.
            tile::<S, ROWS, PANELS>(depth, matrix, 1, ROWS, x, stride, &mut acc);
        } else if let Some((next, step)) = next.filter(|_| const { ROWS <= LANES / 2 }) {
            let fetch = |k: usize| prefetch_far(next.wrapping_add(k * step));
            tile_and::<S, ROWS, PANELS>(depth, [matrix, x], [1, LANES], stride, &mut acc, fetch);
        } else {
            tile::<S, ROWS, PANELS>(depth, matrix, row, col, x, stride, &mut acc);
        }
        if let Some(factors) = factors {
            let starts = starts::<S, ROWS, PANELS>(job, begins, m, p);
            for (row, sums) in acc.iter_mut().enumerate() {
                let factor = S::broadcast(factors[row]);
                for (sum, start) in sums.iter_mut().zip(starts[row]) {
                    *sum = S::add_product(*sum, factor, start);
                }
            }
        }
        if let Some(&Operands { matrix, row, col, x, stride, depth, .. }) = second {
            tile::<S, ROWS, PANELS>(depth, matrix, row, col, x, stride, &mut acc);
        }
        let out = job.out.add(p * job.stride + m * LANES);
        for (row, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::write(out.add(panel * job.stride + row * LANES), *sum);
            }
        }
    }
}

/// Whether a product of these terms, with a result of this pool, splits an activation.
pub(super) fn splits(pool: &Pool, terms: &[Term<'_>]) -> bool {
    pool.splits() && terms.iter().any(|term| matches!(term.matrix.data, Store::Bf16(_)))
}

impl<'a> Job<'a> {
    /// The product of one entry of `gemm::matmul_grouped`.
    pub(super) fn new(out: &mut Activation, init: Init<'a>, terms: &[Term<'a>]) -> Self {
        let (rows, panels, stride) = (out.features(), out.panels(), out.stride());
        // An interleaved matrix is multiplied as it lies, in pairs or in float32.
        let interleaved = terms.iter().any(|term| term.matrix.interleaved().is_some());
        let lies_in_pairs = terms.iter().any(|term| term.matrix.lies_in_pairs());
        debug_assert!(!lies_in_pairs || terms.len() == 1, "such a term comes alone");
        let pairs = if interleaved { lies_in_pairs } else { out.pool().in_pairs() };
        let splits = !interleaved && splits(out.pool(), terms);
        // Enough tasks for every thread, each of many rows: a task reads its panels, and rounds them, once for all of them.
        let threads = crate::par::threads();
        let (most_panels, wanted) = if pairs { (PAIR_PANELS, 2 * threads) } else { (TASK_PANELS, 4 * threads) };
        let mut panel_step = panels.div_ceil(wanted).next_multiple_of(2).clamp(2, most_panels);
        let row_tasks = wanted.div_ceil(panels.div_ceil(panel_step).max(1));
        let mut row_step = rows.div_ceil(row_tasks).next_multiple_of(12).clamp(12, MOST_ROWS);
        if rows > row_step {
            panel_step = most_panels;
            // A thread should not wait long for the last task.
            if pairs && rows.div_ceil(row_step) * panels.div_ceil(panel_step) < 2 * wanted {
                panel_step /= 2;
            }
        }
        let fewest = match simd::level().vectors() {
            // Its tiles of twelve rows use most of a cache line that they read, and an interleaved matrix lies as they need it.
            Level::Avx512 if interleaved => usize::MAX,
            Level::Avx512 if !terms.iter().any(aliases) => FEWEST_WIDE,
            _ => STRIP_PANELS,
        };
        let by_panel = rows >= STRIP_ROWS && panels >= fewest;
        let order = match by_panel {
            _ if splits => Order::Split,
            _ if pairs && !interleaved && simd::in_tiles() => Order::InTiles,
            _ if pairs => Order::InPairs,
            true => Order::ByPanel,
            false => Order::ByTile,
        };
        if order == Order::ByPanel {
            // Packing costs least where many panels share it: first few rows a task, then few panels. With fewer rows, no thread waits
            // long for the last task; but each task reads all features of its panels.
            let shallow = terms.iter().all(|term| term.x.features() <= DEEP);
            let row_tasks = if shallow { 2 * wanted } else { wanted };
            row_step = rows.div_ceil(row_tasks).next_multiple_of(12).clamp(24, TASK_ROWS);
            let panel_tasks = wanted.div_ceil(rows.div_ceil(row_step));
            panel_step = panels.div_ceil(panel_tasks).clamp(STRIP_PANELS, MOST_STRIP_PANELS);
        }
        if order.in_tiles() {
            [row_step, panel_step] = tile_sizes::steps(rows, panels);
        }
        if interleaved {
            // Whole blocks of sixteen rows.
            row_step = row_step.next_multiple_of(INTERLEAVED_ROWS);
        }
        let mut job = Self {
            out: out.shared().get(),
            rows,
            panels,
            stride,
            bias: std::ptr::null(),
            addend: std::ptr::null(),
            zero: false,
            order,
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
            let term = RawTerm::new(term);
            match job.stages.last_mut() {
                // A low-rank term needs no blocks: the tile stays in registers for it.
                Some(stage)
                    if !splits
                        && stage.second.is_none()
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

    /// Smaller tasks in pairs, where none rounds panels of its own: no thread waits long for the last one.
    pub(super) fn cut_finer(&mut self) {
        if self.order != Order::InPairs {
            return;
        }
        let wanted = SHARED_TASKS * crate::par::threads();
        let row_tasks = wanted.div_ceil(self.panels.div_ceil(PAIR_PANELS));
        let rows = self.rows.div_ceil(row_tasks).next_multiple_of(self.rows_apart());
        self.row_step = rows.clamp(FEWEST_ROWS, MOST_ROWS);
        let panel_tasks = wanted.div_ceil(self.rows.div_ceil(self.row_step));
        self.panel_step = self.panels.div_ceil(panel_tasks).next_multiple_of(2).clamp(2, PAIR_PANELS);
    }

    /// The same product as several, to be run one after the other, of at most so many features of its activation each. None where it has
    /// more than one stage, or a quantized matrix.
    pub(super) fn cut_deep(&self, features: usize) -> Option<Vec<Self>> {
        let [Stage { first, second, begins }] = self.stages[..] else { return None };
        let depth = first.whole.depth;
        if features == 0 || first.quantized.is_some() || first.interleaved.is_some() {
            return None;
        }
        let part = |k: usize| {
            let end = depth.min(k + features);
            let (begins, second) = (begins && k == 0, second.filter(|_| end == depth));
            Self { stages: smallvec![Stage { first: first.of_features(k..end), second, begins }], ..*self }
        };
        Some((0..depth).step_by(features).map(part).collect())
    }

    /// The number of tasks.
    pub(super) const fn tasks(&self) -> usize {
        self.rows.div_ceil(self.row_step) * self.panels.div_ceil(self.panel_step)
    }

    /// Tasks begin at multiples of so many rows.
    fn rows_apart(&self) -> usize {
        let interleaved = self.stages.iter().any(|stage| stage.first.interleaved.is_some());
        if interleaved { INTERLEAVED_ROWS } else { TILE_ROWS }
    }

    /// The rows and the panels of `out` that a task computes: tasks have different blocks.
    pub(super) fn part(&self, task: usize) -> [[usize; 2]; 2] {
        let panel_tasks = self.panels.div_ceil(self.panel_step);
        let (m0, p0) = (task / panel_tasks * self.row_step, task % panel_tasks * self.panel_step);
        [[m0, self.rows.min(m0 + self.row_step)], [p0, self.panels.min(p0 + self.panel_step)]]
    }
}

impl<'a> RawTerm<'a> {
    /// The part of some features, of a matrix in float32 or bfloat16.
    fn of_features(&self, features: Range<usize>) -> Self {
        let Operands { matrix, col, x, .. } = self.whole;
        let skipped = features.start * col;
        let (wide, narrow) = (matrix.wrapping_add(skipped), self.narrow.wrapping_add(skipped));
        Self {
            whole: Operands {
                matrix: if matrix.is_null() { matrix } else { wide },
                x: x.wrapping_add(features.start * LANES),
                depth: features.len(),
                ..self.whole
            },
            narrow: if self.narrow.is_null() { self.narrow } else { narrow },
            len: self.len - skipped,
            ..*self
        }
    }

    /// Whether a column's numbers lie end to end, and a row's do not.
    pub(super) const fn is_transposed(&self) -> bool {
        self.whole.row == 1 && self.whole.col != 1
    }

    fn new(term: &Term<'a>) -> Self {
        let Matrix { data, row, col } = term.matrix;
        let (x, stride, depth) = (term.x.ptr(), term.x.stride(), term.x.features());
        let whole = Operands { matrix: std::ptr::null(), row, col, x, stride, depth, next: None };
        let own = Self {
            whole,
            narrow: std::ptr::null(),
            quantized: None,
            interleaved: None,
            len: data.len(),
            rounded: std::ptr::null(),
        };
        match data {
            Store::F32(values) => Self { whole: Operands { matrix: values.cpu_slice().as_ptr(), ..whole }, ..own },
            Store::Bf16(values) => Self { narrow: values.cpu_slice().as_ptr().cast(), ..own },
            Store::Quantized(matrix) => Self { quantized: Some(matrix), ..own },
            Store::Interleaved(matrix) => Self { interleaved: Some(matrix), ..own },
        }
    }
}

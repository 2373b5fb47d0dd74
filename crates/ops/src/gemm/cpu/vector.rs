//! The product with one token. It uses each number of the matrix once, so it is as fast as memory is read.
//!
//! `matmul` would use one lane of sixteen. Here sixteen rows of the matrix are transposed in registers and fill the
//! lanes. The sum of each row equals that of `matmul` to the bit: the same multiply-adds in the same order. A step of
//! generation consists of such products.
use super::{DEPTH, widen};
use crate::activation::{Activation, LANES};
use crate::gemm::{Init, Matrix, Store, Term};
use crate::simd::{Number, Simd, dispatch};
use smallvec::SmallVec;
use std::mem::MaybeUninit;
use tunesmith_cpu_slice::CpuSlice as _;

/// Rows of a block: two vectors, side by side, so that a sum's latency is hidden.
const ROWS: usize = 2 * LANES;
/// Bytes of a row between what is fetched and what is summed: long enough for memory to answer, and what is under way
/// stays in the first cache.
const AHEAD: usize = 768;
/// Blocks in the largest task.
const TASK_BLOCKS: usize = 32;

/// Rows of a matrix that a block sums.
struct Rows<T> {
    from: *const T,
    /// From one row to the next.
    row: usize,
    /// How many; at least one.
    count: usize,
    depth: usize,
    /// Numbers that lie behind `from`.
    left: usize,
}

struct Part<'a> {
    matrix: Matrix<'a>,
    /// The token, its features end to end.
    x: Vec<f32>,
}

/// A product, and how it is cut into tasks.
pub(super) struct Job<'a> {
    /// The first lane of the result's first feature.
    out: *mut f32,
    init: Init<'a>,
    parts: SmallVec<[Part<'a>; 2]>,
    rows: usize,
    /// Rows of a task.
    step: usize,
}

// SAFETY: the operands stay borrowed while tasks run; each reads them and writes rows of `out` that no other task has.
unsafe impl Sync for Job<'_> {}

/// `sums[row] += sum_k matrix[row, k] x[k]`, k rising.
///
/// # Safety
/// The features of `S`; `rows` are there: `rows.count` of them, of `rows.depth` numbers each, within `rows.left`. `x`
/// holds `rows.depth` floats.
#[inline(always)]
unsafe fn add_rows<S: Simd, T: Number, const TURNS: usize>(rows: &Rows<T>, x: *const f32, sums: &mut [S::V; TURNS]) {
    let ahead = AHEAD / size_of::<T>();
    let (whole, line) = (rows.depth - rows.depth % LANES, 64 / size_of::<T>());
    let mut k = 0;
    while rows.count == TURNS * LANES && k < whole {
        // The row's own end comes before the beginning of the row that follows in the next block.
        let beyond = k + ahead >= rows.depth;
        let fetched = if beyond { k + ahead - rows.depth + ROWS * rows.row } else { k + ahead };
        let fetch = if k % line == 0 { rows.from.wrapping_add(fetched) } else { std::ptr::null() };
        // SAFETY: there are `TURNS * LANES` rows, and `k + LANES <= whole <= depth`.
        unsafe { S::add_rows::<T, TURNS>(rows.from.add(k), rows.row, fetch, x.add(k), sums) };
        k += LANES;
    }
    // The last columns, or all of fewer rows: those past the last are the last once more, and their sums are not used.
    while k < rows.depth {
        let columns = LANES.min(rows.depth - k);
        for (turn, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the row is below `count`, and has `columns` numbers from `k` on. A whole vector is read only where it
            // ends within `left`. `x` holds the `columns` floats too.
            unsafe {
                let mut vectors = [S::splat(0.0); LANES];
                for (at, vector) in vectors.iter_mut().enumerate() {
                    let row = (turn * LANES + at).min(rows.count - 1);
                    let start = rows.from.add(row * rows.row + k);
                    if row * rows.row + k + LANES <= rows.left {
                        *vector = T::load::<S>(start);
                        continue;
                    }
                    let mut lanes = [0.0f32; LANES];
                    for (k, lane) in lanes.iter_mut().enumerate().take(columns) {
                        *lane = (*start.add(k)).wide();
                    }
                    *vector = S::load(lanes.as_ptr());
                }
                for (at, column) in S::turn(&vectors).into_iter().enumerate().take(columns) {
                    *sum = S::fma(column, S::splat(*x.add(k + at)), *sum);
                }
            }
        }
        k += columns;
    }
}

/// The rows `m..m + count` of the result, at most `TURNS` vectors.
///
/// # Safety
/// The features of `S`; `count` is 1 to `TURNS * LANES`, the rows `m..m + count` are some of the result, and no other
/// task has them. `job` has passed the checks of `gemm::matmul_grouped`.
#[inline(always)]
unsafe fn block<S: Simd, const TURNS: usize>(job: &Job<'_>, m: usize, count: usize) {
    // SAFETY: `gemm::matmul_grouped` has asserted that each matrix reaches all rows of the result and the operand's features. An
    // addend has the result's shape: row `row` of both is 16 lanes from `row * LANES` on. A quantized matrix is widened
    // `DEPTH` columns at a time, of at most ROWS rows, which `wide` has room for; nothing of it is read that was not
    // widened.
    unsafe {
        let mut lanes = [[0.0f32; LANES]; TURNS];
        for (row, lane) in (m..m + count).zip(lanes.as_flattened_mut()) {
            *lane = match job.init {
                Init::Zero => 0.0,
                Init::Bias(bias) => bias.cpu_slice()[row],
                Init::Out => *job.out.add(row * LANES),
                Init::Add(other) => *other.ptr().add(row * LANES),
            };
        }
        let mut sums = [S::splat(0.0); TURNS];
        for (sum, lanes) in sums.iter_mut().zip(&lanes) {
            *sum = S::load(lanes.as_ptr());
        }
        for Part { matrix, x } in &job.parts {
            let (row, depth, at) = (matrix.row, x.len(), m * matrix.row);
            let left = matrix.data.len() - at;
            match matrix.data {
                Store::F32(values) => {
                    let rows = Rows { from: values.cpu_slice().as_ptr().add(at), row, count, depth, left };
                    add_rows::<S, f32, TURNS>(&rows, x.as_ptr(), &mut sums);
                }
                Store::Bf16(values) => {
                    let rows =
                        Rows { from: values.cpu_slice().as_ptr().cast::<u16>().add(at), row, count, depth, left };
                    add_rows::<S, u16, TURNS>(&rows, x.as_ptr(), &mut sums);
                }
                Store::Quantized(values) => {
                    #[allow(clippy::large_stack_arrays, reason = "64 KiB, so that it stays in L2")]
                    let mut wide = [MaybeUninit::<f32>::uninit(); ROWS * DEPTH + LANES];
                    let wide: *mut f32 = wide.as_mut_ptr().cast();
                    for k in (0..depth).step_by(DEPTH) {
                        let part = DEPTH.min(depth - k);
                        widen::quantized_rows::<S>(values, at + k, row, count, part, wide);
                        let rows = Rows { from: wide.cast_const(), row: part, count, depth: part, left: count * part };
                        add_rows::<S, f32, TURNS>(&rows, x.as_ptr().add(k), &mut sums);
                    }
                }
            }
        }
        for (lanes, sum) in lanes.iter_mut().zip(sums) {
            S::store(lanes.as_mut_ptr(), sum);
        }
        for (row, sum) in (m..m + count).zip(lanes.as_flattened()) {
            // Lanes without a token are zero.
            let to = job.out.add(row * LANES);
            S::store(to, S::splat(0.0));
            *to = *sum;
        }
    }
}

/// # Safety
/// The features of `S`; the rows `m0..m1` are some of the result, and no other task has them. `job` has passed the
/// checks of `gemm::matmul_grouped`.
#[inline(always)]
unsafe fn task_kernel<S: Simd>(job: &Job<'_>, m0: usize, m1: usize) {
    for m in (m0..m1).step_by(ROWS) {
        let count = ROWS.min(m1 - m);
        // SAFETY: `m + count <= m1`, and `count` fits the vectors that are chosen for it.
        unsafe { if count > LANES { block::<S, 2>(job, m, count) } else { block::<S, 1>(job, m, count) } };
    }
}

dispatch! { fn task_at = task_kernel(job: &Job<'_>, m0: usize, m1: usize); }

/// Whether this product is one with a single token, and its matrices lie in rows.
pub(super) fn fits(out: &Activation, terms: &[Term<'_>]) -> bool {
    out.tokens() == 1 && terms.iter().all(|term| term.matrix.col == 1)
}

impl<'a> Job<'a> {
    /// The product of one entry of `gemm::matmul_grouped` that [`fits`].
    pub(super) fn new(out: &mut Activation, init: Init<'a>, terms: &[Term<'a>]) -> Self {
        let rows = out.features();
        let parts = terms
            .iter()
            .map(|term| Part { matrix: term.matrix, x: term.x.panel(0).iter().step_by(LANES).copied().collect() })
            .collect();
        let step = rows.div_ceil(ROWS).div_ceil(4 * crate::par::threads()).min(TASK_BLOCKS) * ROWS;
        Self { out: out.shared().get(), init, parts, rows, step }
    }

    /// The number of tasks.
    pub(super) const fn tasks(&self) -> usize {
        self.rows.div_ceil(self.step)
    }

    /// Computes one part of the result.
    ///
    /// # Safety
    /// `task` is below [`Job::tasks`], and no other thread has it. The operands have passed the checks of
    /// `gemm::matmul_grouped` and stay borrowed, the result for writing.
    pub(super) unsafe fn run(&self, task: usize) {
        // SAFETY: the rows are some of the result, and tasks have different ones; the rest is as the caller says.
        unsafe { task_at(self, task * self.step, self.rows.min((task + 1) * self.step)) };
    }
}

//! The products on the CPU, with the tiles of the matrix products. One task computes one panel, or the gradient of one
//! block.
use super::Diagonal;
use crate::activation::{Activation, LANES};
use crate::gemm::cpu::{tile, tile_rows, with_tile};
use crate::par;
use crate::simd::{Simd, dispatch};
use tunesmith_cpu_slice::CpuSlice as _;

struct Job {
    out: *mut f32,
    x: *const f32,
    stride: usize,
    matrices: *const f32,
    count: usize,
    size: usize,
    blocks: usize,
    row: usize,
    col: usize,
    adds: bool,
}

// SAFETY: the operands stay borrowed while tasks run; each reads them and writes a panel of `out` that no other task
// has.
unsafe impl Sync for Job {}

/// Computes `ROWS` output features of a block, from feature `first` of the block on.
///
/// # Safety
/// The CPU has the features of `S`; `first + ROWS <= job.size`. `matrix` holds `size * size` floats, `x` and `out` `size` vectors
/// each, of one panel: `PANELS` is 1.
#[inline(always)]
unsafe fn features<S: Simd, const ROWS: usize, const PANELS: usize>(
    job: &Job,
    matrix: *const f32,
    x: *const f32,
    out: *mut f32,
    first: usize,
) {
    // SAFETY: the rows `first..first + ROWS` lie within the matrix and within `out`, as the caller says. Both strides
    // of the matrix keep within `size * size`, and `x` has a vector for each of `size` steps.
    unsafe {
        let mut acc = [[S::splat(0.0); PANELS]; ROWS];
        if job.adds {
            for (index, sums) in acc.iter_mut().enumerate() {
                sums[0] = S::load(out.add((first + index) * LANES));
            }
        }
        tile::<S, ROWS, PANELS>(job.size, matrix.add(first * job.row), job.row, job.col, x, 0, &mut acc);
        for (index, sums) in acc.iter().enumerate() {
            S::store(out.add((first + index) * LANES), sums[0]);
        }
    }
}

/// # Safety
/// The CPU has the features of `S`; `panel` is one of `x` and `out`, which hold `blocks * size` features, and no other task has it.
#[inline(always)]
unsafe fn panel_of<S: Simd>(job: &Job, panel: usize) {
    for block in 0..job.blocks {
        let at = panel * job.stride + block * job.size * LANES;
        let mut first = 0;
        while first < job.size {
            let rows = tile_rows(job.size - first, S::ROWS);
            // SAFETY: the last matrix is `count - 1`; a panel has `blocks * size` vectors, of which the block begins at
            // `at`; `first + rows <= size`.
            unsafe {
                let matrix = job.matrices.add(block.min(job.count - 1) * job.size * job.size);
                let (x, out) = (job.x.add(at), job.out.add(at));
                with_tile!(rows, 1, features::<S>(job, matrix, x, out, first));
            }
            first += rows;
        }
    }
}

dispatch! { fn panel_at = panel_of(job: &Job, panel: usize); }

pub(super) fn times(diagonal: Diagonal<'_>, x: &Activation, transposed: bool, out: &mut Activation, adds: bool) {
    let (size, stride) = (diagonal.size, x.stride());
    let (row, col) = if transposed { (size, 1) } else { (1, size) };
    let (matrices, count, blocks) = (diagonal.matrices.cpu_slice().as_ptr(), diagonal.count(), x.features() / size);
    let job = Job { out: out.shared().get(), x: x.ptr(), stride, matrices, count, size, blocks, row, col, adds };
    let job = &job;
    // SAFETY: `super::times` asserts that `x` and `out` have one shape, of whole blocks, and that there is a matrix.
    // `out` is borrowed for writing, and a task alone has its panel.
    par::run(x.panels(), |panel| unsafe { panel_at(job, panel) });
}

struct OuterJob {
    out: *mut f32,
    x: *const f32,
    d: *const f32,
    stride: usize,
    size: usize,
    tokens: usize,
}

// SAFETY: the operands stay borrowed while tasks run; each reads them and writes a block of `out` that no other task
// has.
unsafe impl Sync for OuterJob {}

/// Computes `COLS` numbers of one row of a block's gradient, from column `first` on.
///
/// # Safety
/// The CPU has the features of `S`; `row` and `first + COLS - 1` are below `job.size`, `block` is one of `x`, `d` and `out`, and no
/// other task has it.
#[inline(always)]
unsafe fn sums<S: Simd, const COLS: usize>(job: &OuterJob, block: usize, row: usize, first: usize) {
    // SAFETY: whole panels are below `tokens / LANES`, the rest reads lanes below `tokens % LANES` of the one after
    // them. Features and the places in `out` (`[block][size][size]`) lie within, as the caller says.
    unsafe {
        let zero = S::splat(0.0);
        let mut acc = [zero; COLS];
        let (x, d) = (job.x.add((block * job.size + row) * LANES), job.d.add((block * job.size + first) * LANES));
        for panel in 0..job.tokens / LANES {
            let x = S::load(x.add(panel * job.stride));
            for (index, sum) in acc.iter_mut().enumerate() {
                *sum = S::fma(x, S::load(d.add(panel * job.stride + index * LANES)), *sum);
            }
        }
        let (whole, rest) = (job.tokens / LANES, job.tokens % LANES);
        let out = job.out.add((block * job.size + row) * job.size + first);
        for (index, sum) in acc.iter().enumerate() {
            let mut lanes = [0.0f32; LANES];
            S::store(lanes.as_mut_ptr(), *sum);
            // Lanes without a token may hold anything, so they are left out.
            for (lane, value) in lanes.iter_mut().enumerate().take(rest) {
                let at = whole * job.stride + lane;
                *value += *x.add(at) * *d.add(at + index * LANES);
            }
            *out.add(index) = lanes.iter().sum();
        }
    }
}

/// # Safety
/// The CPU has the features of `S`; `block` is one of `x`, `d` and `out`, and no other task has it.
#[inline(always)]
unsafe fn block_of<S: Simd>(job: &OuterJob, block: usize) {
    for row in 0..job.size {
        let mut first = 0;
        while first < job.size {
            // SAFETY: `row < size`, and four columns are summed only where four are left.
            unsafe {
                match job.size - first {
                    4.. => sums::<S, 4>(job, block, row, first),
                    _ => sums::<S, 1>(job, block, row, first),
                }
            }
            first += if job.size - first >= 4 { 4 } else { 1 };
        }
    }
}

dispatch! { fn block_at = block_of(job: &OuterJob, block: usize); }

pub(super) fn outer(size: usize, x: &Activation, d: &Activation, out: &mut [f32]) {
    let job = OuterJob { out: out.as_mut_ptr(), x: x.ptr(), d: d.ptr(), stride: x.stride(), size, tokens: x.tokens() };
    let job = &job;
    // SAFETY: `super::outer` asserts that `x` and `d` have one shape, of whole blocks, and makes `out` with `size * size`
    // floats for each. `out` is borrowed for writing until all tasks are done. A task alone has its block.
    par::run(x.features() / size, |block| unsafe { block_at(job, block) });
}

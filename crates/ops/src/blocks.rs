//! Products with a block-diagonal matrix: each block of a token's features, a row, times a matrix of its own. OFT's rotations.
use super::floats::Floats;
use super::gemm::{tile, tile_rows, with_tile};
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

/// The matrices on the diagonal, `[count, size, size]`.
#[derive(Debug, Clone, Copy)]
pub struct Diagonal<'a> {
    /// The matrices end to end, each row-major.
    pub matrices: Floats<'a>,
    /// Rows and columns of each.
    pub size: usize,
}

impl Diagonal<'_> {
    const fn count(&self) -> usize {
        self.matrices.len() / (self.size * self.size)
    }
}

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

/// `ROWS` features of a block, from `first` on.
///
/// # Safety
/// The features of `S`; `first + ROWS <= job.size`. `matrix` holds `size * size` floats, `x` and `out` `size` vectors
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
/// The features of `S`; `panel` is one of `x` and `out`, which hold `blocks * size` features, and no other task has it.
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

/// `out = x D` or, `transposed`, `x D^T`, in addition to what `out` holds if `adds`; both are `[tokens, features]`. The last matrix
/// counts for all further blocks.
///
/// # Panics
/// If the shapes do not fit.
pub fn times(diagonal: Diagonal<'_>, x: &Act, transposed: bool, out: &mut Act, adds: bool) {
    let (size, stride) = (diagonal.size, x.stride());
    assert!(x.features().is_multiple_of(size) && diagonal.count() > 0, "whole blocks of {size}");
    assert_eq!((x.tokens(), x.features()), (out.tokens(), out.features()), "one shape");
    if x.is_meta() {
        return;
    }
    let (row, col) = if transposed { (size, 1) } else { (1, size) };
    let (matrices, count, blocks) = (diagonal.matrices.host().as_ptr(), diagonal.count(), x.features() / size);
    let job = Job { out: out.shared().get(), x: x.ptr(), stride, matrices, count, size, blocks, row, col, adds };
    let job = &job;
    // SAFETY: the assertions hold the shapes against each other: `blocks * size` features and at least one matrix.
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

/// `COLS` columns of a row of a block's gradient.
///
/// # Safety
/// The features of `S`; `row` and `first + COLS - 1` are below `job.size`, `block` is one of `x`, `d` and `out`, and no
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
            // Lanes without a token may hold anything.
            for (lane, value) in lanes.iter_mut().enumerate().take(rest) {
                let at = whole * job.stride + lane;
                *value += *x.add(at) * *d.add(at + index * LANES);
            }
            *out.add(index) = lanes.iter().sum();
        }
    }
}

/// # Safety
/// The features of `S`; `block` is one of `x`, `d` and `out`, and no other task has it.
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

/// The gradients of the matrices of blocks of `size`, `sum_t x[t]^T d[t]` of each: `[features / size, size, size]`.
///
/// # Panics
/// If the shapes do not fit.
pub fn outer(size: usize, x: &Act, d: &Act) -> Vec<f32> {
    assert!(x.features().is_multiple_of(size), "whole blocks of {size}");
    assert_eq!((x.tokens(), x.features()), (d.tokens(), d.features()), "one shape");
    let mut out = vec![0.0f32; x.features() * size];
    if x.is_meta() {
        return out;
    }
    let job = OuterJob { out: out.as_mut_ptr(), x: x.ptr(), d: d.ptr(), stride: x.stride(), size, tokens: x.tokens() };
    let job = &job;
    // SAFETY: `x` and `d` have one shape, of whole blocks; `out` has `size * size` floats for each, and lives until all
    // tasks are done. A task alone has its block.
    par::run(x.features() / size, |block| unsafe { block_at(job, block) });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::Pool;
    use crate::testing::{each_level, numbers};

    #[test]
    fn products_and_gradients_equal_their_definition() {
        each_level(|level| {
            for (tokens, size, blocks, count) in
                [(37, 5, 3, 3), (16, 32, 2, 1), (1, 8, 4, 4), (50, 13, 1, 1), (3, 2, 6, 6)]
            {
                let (pool, features) = (Pool::new(), size * blocks);
                let (x, d) = (numbers(1, tokens * features), numbers(2, tokens * features));
                let matrices = numbers(3, count * size * size);
                let (xa, da) = (Act::from_rows(&pool, &x, features), Act::from_rows(&pool, &d, features));
                let at = |block: usize, row: usize, col: usize| {
                    f64::from(matrices[(block.min(count - 1) * size + row) * size + col])
                };
                for (transposed, adds) in [(false, false), (true, false), (false, true), (true, true)] {
                    let mut out = da.copy();
                    times(Diagonal { matrices: (&matrices).into(), size }, &xa, transposed, &mut out, adds);
                    for (index, got) in out.to_rows().into_iter().enumerate() {
                        let (token, block, col) = (index / features, index % features / size, index % size);
                        let x = |k: usize| f64::from(x[token * features + block * size + k]);
                        let entry = |k: usize| if transposed { at(block, col, k) } else { at(block, k, col) };
                        let wanted: f64 = (0..size).map(|k| x(k) * entry(k)).sum();
                        let wanted = wanted + if adds { f64::from(d[index]) } else { 0.0 };
                        assert!(
                            (f64::from(got) - wanted).abs() < 1e-4,
                            "{level:?} {size} {transposed}: {got} {wanted}"
                        );
                    }
                }
                for (index, got) in outer(size, &xa, &da).into_iter().enumerate() {
                    let (block, row, col) = (index / (size * size), index / size % size, index % size);
                    let at = |token: usize, feature: usize| token * features + block * size + feature;
                    let wanted: f64 = (0..tokens).map(|t| f64::from(x[at(t, row)]) * f64::from(d[at(t, col)])).sum();
                    assert!((f64::from(got) - wanted).abs() < 1e-4, "{level:?} {size}: {got} {wanted}");
                }
            }
        });
    }
}

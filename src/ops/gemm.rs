//! Matrix products on panels. The activation is the vector operand (16 tokens a lane each), the matrix is the
//! broadcast operand and may have any two strides, so that one row-major weight serves forward and backward:
//!
//! - [`matmul`]: `out[t, m] = init + sum_k matrix[m, k] x[t, k]`, over one or two terms (a weight and its LoRA B);
//! - [`outer`]: `out[m, n] += sum_t y[t, m] x[t, n]`, a weight's gradient.
use super::panel::{Act, LANES};
use super::par;
use super::simd::{Simd, dispatch};

/// A matrix `[rows, cols]` seen through two strides.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    row: usize,
    col: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major `data: [rows, width]` as it is: element (m, k) is `data[m * width + k]`.
    pub const fn rows(data: &'a [f32], width: usize) -> Self {
        Self { data, row: width, col: 1 }
    }

    /// Row-major `data: [rows, width]` transposed: element (m, k) is `data[k * width + m]`.
    pub const fn transposed(data: &'a [f32], width: usize) -> Self {
        Self { data, row: 1, col: width }
    }
}

/// What a product is added to.
#[derive(Debug, Clone, Copy)]
pub enum Init<'a> {
    /// Nothing.
    Zero,
    /// A bias `[m]`.
    Bias(&'a [f32]),
    /// What `out` holds.
    Out,
    /// Another activation of `out`'s shape: the residual stream.
    Add(&'a Act),
}

/// One summand: `matrix [m, k]` times `x [tokens, k]`.
#[derive(Debug, Clone, Copy)]
pub struct Term<'a> {
    /// The broadcast operand.
    pub matrix: Matrix<'a>,
    /// The vector operand.
    pub x: &'a Act,
}

#[derive(Clone, Copy)]
struct RawTerm {
    matrix: *const f32,
    row: usize,
    col: usize,
    x: *const f32,
    stride: usize,
    depth: usize,
}

struct Job {
    out: *mut f32,
    stride: usize,
    bias: *const f32,
    addend: *const f32,
    zero: bool,
    first: RawTerm,
    second: Option<RawTerm>,
}

// SAFETY: tasks read the operands and write disjoint blocks of `out`.
unsafe impl Sync for Job {}

/// Depth of a block of the contraction: the matrix tile stays in L1, the activation block in L2.
const DEPTH: usize = 512;
/// Rows of the matrix in a task.
const TASK_ROWS: usize = 96;
/// Depth from which packing a tile of a transposed matrix pays: an LM head, which no cache holds.
const PACK_DEPTH: usize = 4096;
/// Panels from which it pays.
const PACK_PANELS: usize = 6;
/// Panels in a task.
const TASK_PANELS: usize = 16;

/// `acc[i][j] += sum_k matrix[i, k] x[k, panel j]`, `k` in `0..depth`.
///
/// # Safety
/// `matrix` reaches `ROWS` rows of `row` floats and `depth` columns of `col`, `x` reaches `depth` vectors in each of
/// `PANELS` panels that lie `stride` floats apart.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const ROWS: usize, const PANELS: usize>(
    depth: usize,
    mut matrix: *const f32,
    row: usize,
    col: usize,
    mut x: *const f32,
    stride: usize,
    acc: &mut [[S::V; PANELS]; ROWS],
) {
    for _ in 0..depth {
        // SAFETY: the caller's promise.
        unsafe {
            let mut vectors = [S::splat(0.0); PANELS];
            for (panel, vector) in vectors.iter_mut().enumerate() {
                *vector = S::load(x.add(panel * stride));
            }
            for (index, sums) in acc.iter_mut().enumerate() {
                let value = S::splat(*matrix.add(index * row));
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = S::fma(value, vector, *sum);
                }
            }
            // After the last turn these may point past the end; they are not read then.
            matrix = matrix.wrapping_add(col);
            x = x.wrapping_add(LANES);
        }
    }
}

/// How many rows the next tile takes when `left` remain, for a kernel of `max` rows.
#[inline(always)]
pub(super) const fn tile_rows(left: usize, max: usize) -> usize {
    match left {
        // Two tiles of eight run better than one of twelve and one of four.
        16 if max == 12 => 8,
        _ if left >= max => max,
        8.. => 8,
        6.. if max == 6 => 6,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Calls `$f::<S, ROWS, PANELS>(args)` for run-time `rows` and `panels`.
macro_rules! with_tile {
    ($rows:expr, $panels:expr, $f:ident::<$s:ident>($($arg:expr),* $(,)?)) => {
        match ($rows, $panels) {
            (12, 2) => $f::<$s, 12, 2>($($arg),*),
            (8, 2) => $f::<$s, 8, 2>($($arg),*),
            (6, 2) => $f::<$s, 6, 2>($($arg),*),
            (4, 2) => $f::<$s, 4, 2>($($arg),*),
            (2, 2) => $f::<$s, 2, 2>($($arg),*),
            (1, 2) => $f::<$s, 1, 2>($($arg),*),
            (12, _) => $f::<$s, 12, 1>($($arg),*),
            (8, _) => $f::<$s, 8, 1>($($arg),*),
            (6, _) => $f::<$s, 6, 1>($($arg),*),
            (4, _) => $f::<$s, 4, 1>($($arg),*),
            (2, _) => $f::<$s, 2, 1>($($arg),*),
            _ => $f::<$s, 1, 1>($($arg),*),
        }
    };
}
pub(super) use with_tile;

/// Copies `depth` runs of `ROWS` floats, `col` floats apart, end to end.
///
/// # Safety
/// Both places hold that many.
#[inline(always)]
unsafe fn pack<const ROWS: usize>(from: *const f32, col: usize, depth: usize, to: *mut f32) {
    for k in 0..depth {
        // SAFETY: the caller's promise.
        unsafe {
            let run = from.add(k * col).cast::<[f32; ROWS]>().read_unaligned();
            to.add(k * ROWS).cast::<[f32; ROWS]>().write_unaligned(run);
        }
    }
}

/// One tile of `out` at row `m` and panel `p` for `part` of the first term (its columns from `k0` on), and the whole
/// second term if it is the last part.
#[inline(always)]
unsafe fn matmul_tile<S: Simd, const ROWS: usize, const PANELS: usize>(
    job: &Job,
    part: &RawTerm,
    m: usize,
    p: usize,
    k0: usize,
) {
    // SAFETY: the task's block lies inside `out`; operands were checked in `matmul`.
    unsafe {
        let out = job.out.add(p * job.stride + m * LANES);
        let mut acc = [[S::splat(0.0); PANELS]; ROWS];
        let base: *const f32 = if k0 > 0 || (!job.zero && job.addend.is_null() && job.bias.is_null()) {
            out
        } else if job.addend.is_null() {
            std::ptr::null()
        } else {
            job.addend.add(p * job.stride + m * LANES)
        };
        if !base.is_null() {
            for (row, sums) in acc.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(base.add(panel * job.stride + row * LANES));
                }
            }
        } else if !job.bias.is_null() {
            for (row, sums) in acc.iter_mut().enumerate() {
                *sums = [S::splat(*job.bias.add(m + row)); PANELS];
            }
        }
        let x = part.x.add(p * part.stride);
        tile::<S, ROWS, PANELS>(part.depth, part.matrix, part.row, part.col, x, part.stride, &mut acc);
        if let Some(second) = job.second.as_ref().filter(|_| k0 + part.depth == job.first.depth) {
            tile::<S, ROWS, PANELS>(
                second.depth,
                second.matrix.add(m * second.row),
                second.row,
                second.col,
                second.x.add(p * second.stride),
                second.stride,
                &mut acc,
            );
        }
        for (row, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::store(out.add(panel * job.stride + row * LANES), *sum);
            }
        }
    }
}

#[inline(always)]
unsafe fn matmul_block<S: Simd>(job: &Job, m0: usize, m1: usize, p0: usize, p1: usize) {
    let blocks = job.first.depth.div_ceil(DEPTH).max(1);
    let depth = job.first.depth.div_ceil(blocks);
    #[allow(clippy::large_stack_arrays, reason = "24 KiB, so that the tile stays in L1")]
    let mut packed = [std::mem::MaybeUninit::<f32>::uninit(); DEPTH * 12];
    let mut k0 = 0;
    loop {
        let part = depth.min(job.first.depth - k0);
        let mut m = m0;
        while m < m1 {
            let rows = tile_rows(m1 - m, S::ROWS);
            let first = &job.first;
            // SAFETY: the tile lies inside the matrix.
            let at = unsafe { first.matrix.add(m * first.row + k0 * first.col) };
            let mut part_of = RawTerm { matrix: at, x: first.x.wrapping_add(k0 * LANES), depth: part, ..*first };
            if first.row == 1 && rows == S::ROWS && first.depth >= PACK_DEPTH && p1 - p0 >= PACK_PANELS {
                // A tile of a transposed matrix lies in short runs far apart, a cache line and a page each.
                // SAFETY: `part <= DEPTH` runs of `rows <= 12` floats.
                unsafe {
                    match S::ROWS {
                        12 => pack::<12>(at, first.col, part, packed.as_mut_ptr().cast()),
                        6 => pack::<6>(at, first.col, part, packed.as_mut_ptr().cast()),
                        _ => pack::<4>(at, first.col, part, packed.as_mut_ptr().cast()),
                    }
                }
                part_of = RawTerm { matrix: packed.as_ptr().cast(), col: rows, ..part_of };
            }
            let mut p = p0;
            while p < p1 {
                let panels = S::PANELS.min(p1 - p);
                // SAFETY: the block lies inside `out`.
                unsafe { with_tile!(rows, panels, matmul_tile::<S>(job, &part_of, m, p, k0)) };
                p += panels;
            }
            m += rows;
        }
        k0 += part;
        if k0 >= job.first.depth {
            break;
        }
    }
}

dispatch! { fn matmul_block_at = matmul_block(job: &Job, m0: usize, m1: usize, p0: usize, p1: usize); }

/// `out[t, m] = init + sum over terms of sum_k matrix[m, k] x[t, k]`.
///
/// `out` is `[tokens, m]`; each term's `x` is `[tokens, k]` and its matrix `[m, k]`. One or two terms.
///
/// # Panics
/// If the shapes do not fit.
pub fn matmul(out: &mut Act, init: Init<'_>, terms: &[Term<'_>]) {
    let (rows, panels, stride) = (out.features(), out.panels(), out.stride());
    let raw = |term: &Term<'_>| {
        let depth = term.x.features();
        assert_eq!(term.x.tokens(), out.tokens(), "x and out have the same tokens");
        assert!(rows > 0 && depth > 0, "no empty product");
        let last = (rows - 1) * term.matrix.row + (depth - 1) * term.matrix.col;
        assert!(last < term.matrix.data.len(), "the matrix holds [{rows}, {depth}]");
        let matrix = term.matrix.data.as_ptr();
        RawTerm { matrix, row: term.matrix.row, col: term.matrix.col, x: term.x.ptr(), stride: term.x.stride(), depth }
    };
    assert!((1..=2).contains(&terms.len()), "one or two terms");
    let mut job = Job {
        stride,
        bias: std::ptr::null(),
        addend: std::ptr::null(),
        zero: false,
        first: raw(&terms[0]),
        second: terms.get(1).map(raw),
        out: std::ptr::null_mut(),
    };
    match init {
        Init::Zero => job.zero = true,
        Init::Bias(bias) => {
            assert_eq!(bias.len(), rows, "a bias for each row");
            job.bias = bias.as_ptr();
        }
        Init::Out => {}
        Init::Add(other) => {
            assert_eq!((other.tokens(), other.features()), (out.tokens(), rows), "the addend has out's shape");
            job.addend = other.ptr();
        }
    }
    job.out = out.shared().get();
    // Enough tasks for every thread, in the order that keeps a thread on the same rows of the matrix.
    let threads = rayon::current_num_threads();
    let row_step = TASK_ROWS.min(rows.div_ceil(threads).next_multiple_of(12)).max(12);
    let panel_step =
        TASK_PANELS.min(if rows <= row_step { panels.div_ceil(4 * threads).next_multiple_of(2) } else { TASK_PANELS });
    let (row_tasks, panel_tasks) = (rows.div_ceil(row_step), panels.div_ceil(panel_step));
    let job = &job;
    par::run(row_tasks * panel_tasks, |task| {
        let (m0, p0) = (task / panel_tasks * row_step, task % panel_tasks * panel_step);
        // SAFETY: tasks own disjoint blocks of `out`, which the caller lends for writing.
        unsafe { matmul_block_at(job, m0, rows.min(m0 + row_step), p0, panels.min(p0 + panel_step)) };
    });
}

/// `x` with tokens as rows, for products that sum over tokens: `[panel][block of 16 features][16 tokens][16 features]`,
/// features padded with zeros to a multiple of 16.
#[derive(Debug)]
pub struct Transposed {
    act: Act,
    features: usize,
}

impl Transposed {
    /// Transposes `x [tokens, features]`.
    pub fn new(x: &Act) -> Self {
        let (features, blocks) = (x.features(), x.features().div_ceil(LANES));
        let mut act = x.pool().act(x.panels() * LANES, blocks * LANES);
        let (to, stride) = (act.shared(), act.stride());
        par::run(x.panels(), |panel| {
            let from = x.panel(panel);
            for block in 0..blocks {
                let count = LANES.min(features - block * LANES);
                // SAFETY: this task owns the panel of `act`.
                let to = unsafe { to.get().add(panel * stride + block * LANES * LANES) };
                // SAFETY: 256 floats each, or `count` rows of the source.
                unsafe { transpose(from[block * LANES * LANES..].as_ptr(), count, to) };
            }
        });
        Self { act, features }
    }
}

/// `to[j][i] = from[i][j]` for `rows` rows i of 16 and all 16 columns j; missing rows count as zero.
///
/// # Safety
/// `from` holds `rows * 16` floats, `to` 256.
#[inline(always)]
pub(super) unsafe fn transpose(from: *const f32, rows: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        if rows == LANES {
            let rows = from.cast::<[[f32; LANES]; LANES]>().read_unaligned();
            let block: [[f32; LANES]; LANES] = std::array::from_fn(|j| std::array::from_fn(|i| rows[i][j]));
            to.cast::<[[f32; LANES]; LANES]>().write_unaligned(block);
            return;
        }
        for j in 0..LANES {
            for i in 0..LANES {
                *to.add(j * LANES + i) = if i < rows { *from.add(i * LANES + j) } else { 0.0 };
            }
        }
    }
}

struct OuterJob {
    out: *mut f32,
    row: usize,
    col: usize,
    cols: usize,
    y: *const f32,
    y_stride: usize,
    x: *const f32,
    x_stride: usize,
    panels: usize,
}

// SAFETY: tasks write disjoint rows of `out`.
unsafe impl Sync for OuterJob {}

#[inline(always)]
unsafe fn outer_tile<S: Simd, const ROWS: usize, const BLOCKS: usize>(job: &OuterJob, m: usize, block: usize) {
    // SAFETY: rows and columns lie inside `out`, panels inside the operands.
    unsafe {
        let mut acc = [[S::splat(0.0); BLOCKS]; ROWS];
        for panel in 0..job.panels {
            tile::<S, ROWS, BLOCKS>(
                LANES,
                job.y.add(panel * job.y_stride + m * LANES),
                LANES,
                1,
                job.x.add(panel * job.x_stride + block * LANES * LANES),
                LANES * LANES,
                &mut acc,
            );
        }
        for (index, sums) in acc.iter().enumerate() {
            for (offset, sum) in sums.iter().enumerate() {
                let n0 = (block + offset) * LANES;
                let count = LANES.min(job.cols - n0);
                let out = job.out.add((m + index) * job.row + n0 * job.col);
                if count == LANES && job.col == 1 {
                    S::store(out, S::add(S::load(out), *sum));
                } else {
                    let mut values = [0.0f32; LANES];
                    S::store(values.as_mut_ptr(), *sum);
                    for (n, value) in values[..count].iter().enumerate() {
                        *out.add(n * job.col) += value;
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn outer_rows<S: Simd>(job: &OuterJob, m0: usize, m1: usize) {
    let blocks = job.cols.div_ceil(LANES);
    let mut block = 0;
    while block < blocks {
        let step = S::PANELS.min(blocks - block);
        let mut m = m0;
        while m < m1 {
            let rows = tile_rows(m1 - m, S::ROWS);
            // SAFETY: the caller's promise.
            unsafe { with_tile!(rows, step, outer_tile::<S>(job, m, block)) };
            m += rows;
        }
        block += step;
    }
}

dispatch! { fn outer_rows_at = outer_rows(job: &OuterJob, m0: usize, m1: usize); }

/// Where [`outer`] adds its result.
#[derive(Debug)]
pub enum Target<'a> {
    /// `out: [m, n]` row-major.
    Rows(&'a mut [f32]),
    /// `out: [n, m]` row-major.
    Transposed(&'a mut [f32]),
}

/// Adds `sum_t y[t, m] x[t, n]` to `out`. `y` is `[tokens, m]`, `x` is `[tokens, n]`; unused lanes must be zero in one of them.
///
/// # Panics
/// If the shapes do not fit.
pub fn outer(out: Target<'_>, y: &Act, x: &Transposed) {
    let (rows, cols) = (y.features(), x.features);
    assert_eq!(x.act.panels(), y.panels(), "the same tokens");
    let (out, row, col) = match out {
        Target::Rows(out) => (out, cols, 1),
        Target::Transposed(out) => (out, 1, rows),
    };
    assert_eq!(out.len(), rows * cols, "out holds [{rows}, {cols}]");
    let job = OuterJob {
        out: out.as_mut_ptr(),
        row,
        col,
        cols,
        y: y.ptr(),
        y_stride: y.stride(),
        x: x.act.ptr(),
        x_stride: x.act.stride(),
        panels: y.panels(),
    };
    let step = 48.min(rows.div_ceil(rayon::current_num_threads()).next_multiple_of(12));
    let job = &job;
    par::run(rows.div_ceil(step), |task| {
        // SAFETY: tasks own disjoint rows of `out`.
        unsafe { outer_rows_at(job, task * step, rows.min((task + 1) * step)) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::panel::Pool;
    use crate::ops::testing::{each_level, numbers};

    #[test]
    fn matmul_equals_the_plain_sum_on_odd_sizes() {
        each_level(|level| {
            for (tokens, depth, rows) in
                [(1, 1, 1), (5, 3, 7), (17, 33, 16), (40, 600, 29), (33, 1100, 100), (300, 16, 130)]
            {
                let pool = Pool::new();
                let (x, w) = (numbers(1, tokens * depth), numbers(2, rows * depth));
                let (z, b) = (numbers(3, tokens * 5), numbers(4, rows * 5));
                let (bias, addend) = (numbers(5, rows), numbers(6, tokens * rows));
                let (xa, za) = (Act::from_rows(&pool, &x, depth), Act::from_rows(&pool, &z, 5));
                let added = Act::from_rows(&pool, &addend, rows);
                let wt: Vec<f32> = (0..depth * rows).map(|i| w[i % rows * depth + i / rows]).collect();
                for (case, init) in
                    [Init::Zero, Init::Bias(&bias), Init::Add(&added), Init::Out].into_iter().enumerate()
                {
                    for matrix in [Matrix::rows(&w, depth), Matrix::transposed(&wt, rows)] {
                        let mut out = added.copy();
                        let terms = [Term { matrix, x: &xa }, Term { matrix: Matrix::rows(&b, 5), x: &za }];
                        matmul(&mut out, init, &terms);
                        for t in 0..tokens {
                            for m in 0..rows {
                                let start = [0.0, bias[m], addend[t * rows + m], addend[t * rows + m]][case];
                                let mut sum = f64::from(start);
                                for k in 0..depth {
                                    sum += f64::from(w[m * depth + k]) * f64::from(x[t * depth + k]);
                                }
                                for k in 0..5 {
                                    sum += f64::from(b[m * 5 + k]) * f64::from(z[t * 5 + k]);
                                }
                                let got = f64::from(out.at(t, m));
                                assert!((got - sum).abs() < 1e-4, "{level:?} {case} [{t},{m}]: {got} != {sum}");
                            }
                        }
                    }
                }
            }
        });
    }

    #[test]
    fn outer_equals_the_plain_sum_on_odd_sizes() {
        each_level(|level| {
            for (tokens, rows, cols) in [(1, 1, 1), (5, 7, 3), (17, 16, 33), (40, 29, 16), (100, 130, 50)] {
                let pool = Pool::new();
                let (y, x) = (numbers(1, tokens * rows), numbers(2, tokens * cols));
                let (ya, xa) = (Act::from_rows(&pool, &y, rows), Act::from_rows(&pool, &x, cols));
                let xt = Transposed::new(&xa);
                let (mut plain, mut turned) = (vec![1.0; rows * cols], vec![1.0; rows * cols]);
                outer(Target::Rows(&mut plain), &ya, &xt);
                outer(Target::Transposed(&mut turned), &ya, &xt);
                for m in 0..rows {
                    for n in 0..cols {
                        let sum: f64 = 1.0
                            + (0..tokens).map(|t| f64::from(y[t * rows + m]) * f64::from(x[t * cols + n])).sum::<f64>();
                        assert!((f64::from(plain[m * cols + n]) - sum).abs() < 1e-4, "{level:?} rows [{m},{n}]");
                        assert!((f64::from(turned[n * rows + m]) - sum).abs() < 1e-4, "{level:?} turned [{m},{n}]");
                    }
                }
            }
        });
    }
}

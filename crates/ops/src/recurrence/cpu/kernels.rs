//! The inner loops of a chunk, for each SIMD level. Arrays lie in panels of sixteen lanes, `[panels][rows][16]`; a
//! block is sixteen rows of one panel.
use super::CHUNK;
use crate::activation::LANES;
use crate::gemm::cpu::{score_tile, sum_tile, tile_rows, with_tile};
use crate::simd::{Simd, dispatch};

/// How many numbers a block has.
pub(super) const BLOCK: usize = LANES * LANES;

/// Decays whose logarithm is below this count as 0; the decay here is about 1e-20. Products with smaller decays would
/// be subnormal numbers, which some processors multiply many times more slowly.
pub(super) const LEAST_LOG_DECAY: f32 = -46.0;

/// `exp(LEAST_LOG_DECAY)`, about.
const LEAST_DECAY: f32 = 1e-20;

/// One number for each token of a panel.
pub(super) type Lanes = [f32; LANES];

/// The product `to[panel][16 block + row][lane] = sum_k matrix[block][k][row] x[panel][k][lane]`.
pub(super) struct Across<'a> {
    /// `[blocks][depth][16]`, one block after the other.
    pub(super) matrix: &'a [f32],
    pub(super) blocks: usize,
    pub(super) depth: usize,
    pub(super) x: &'a [f32],
    /// How many floats lie from one panel to the next: of `x`, and of the result.
    pub(super) steps: [usize; 2],
    pub(super) panels: usize,
}

/// # Safety
/// The CPU has the features of `S`; [`Across::run`] has checked the operands.
#[inline(always)]
unsafe fn across_kernel<S: Simd>(job: &Across<'_>, to: *mut f32) {
    let ([x_step, to_step], depth) = (job.steps, job.depth);
    let mut panel = 0;
    while panel < job.panels {
        let count = S::PANELS.min(job.panels - panel);
        for block in 0..job.blocks {
            let mut row = 0;
            while row < LANES {
                let rows = tile_rows(LANES - row, S::ROWS);
                // SAFETY: the tile's panels are below `panels`, its rows are some of a block's sixteen.
                unsafe {
                    let matrix = job.matrix.as_ptr().add(block * depth * LANES + row);
                    let x = job.x.as_ptr().add(panel * x_step);
                    let to = to.add(panel * to_step + block * BLOCK + row * LANES);
                    with_tile!(rows, count, score_tile::<S>(depth, matrix, 1, x, x_step, to, to_step));
                }
                row += rows;
            }
        }
        panel += count;
    }
}

dispatch! { fn across_at = across_kernel(job: &Across<'_>, to: *mut f32); }

impl Across<'_> {
    /// Writes the product to `to`.
    pub(super) fn run(&self, to: &mut [f32]) {
        let Self { matrix, blocks, depth, x, steps: [x_step, to_step], panels } = *self;
        let last = panels - 1;
        assert!(matrix.len() >= blocks * depth * LANES, "a matrix of all blocks");
        assert!(x.len() >= last * x_step + depth * LANES, "vectors of all panels");
        assert!(to.len() >= last * to_step + blocks * BLOCK, "room for all panels");
        // SAFETY: as `score_tile` asks, by the assertions; `to` is borrowed for writing and so no operand.
        unsafe { across_at(self, to.as_mut_ptr()) };
    }
}

/// The sum `to[panel][row][lane] (+)= sum over blocks b, t of matrix[b][row][t] x[panel][b][t][lane]`.
pub(super) struct Mix<'a> {
    /// Rows of sixteen numbers, in blocks that begin `matrix_step` floats apart.
    pub(super) matrix: &'a [f32],
    pub(super) matrix_step: usize,
    pub(super) rows: usize,
    pub(super) blocks: usize,
    pub(super) x: &'a [f32],
    /// How many floats lie from one block of `x` to the next.
    pub(super) x_step: usize,
    /// How many floats lie from one panel to the next: of `x`, and of the result.
    pub(super) steps: [usize; 2],
    pub(super) panels: usize,
    /// Whether to add to what the result holds.
    pub(super) add: bool,
}

/// # Safety
/// The CPU has the features of `S`; [`Mix::run`] has checked the operands.
#[inline(always)]
unsafe fn mix_kernel<S: Simd>(job: &Mix<'_>, to: *mut f32) {
    let ([stride, to_step], blocks, (step, x_step), add) =
        (job.steps, job.blocks, (job.matrix_step, job.x_step), job.add);
    let mut panel = 0;
    while panel < job.panels {
        let count = S::PANELS.min(job.panels - panel);
        let mut row = 0;
        while row < job.rows {
            let rows = tile_rows(job.rows - row, S::ROWS);
            // SAFETY: the tile's panels are below `panels`, its rows below `rows`.
            unsafe {
                let matrix = job.matrix.as_ptr().add(row * LANES);
                let x = job.x.as_ptr().add(panel * stride);
                let to = to.add(panel * to_step + row * LANES);
                with_tile!(
                    rows,
                    count,
                    sum_tile::<S>(blocks, LANES, matrix, step, x, x_step, stride, to, to_step, add)
                );
            }
            row += rows;
        }
        panel += count;
    }
}

dispatch! { fn mix_at = mix_kernel(job: &Mix<'_>, to: *mut f32); }

impl<'a> Mix<'a> {
    /// The sum for one panel, whose blocks follow each other; the matrix is `[blocks][rows][16]`.
    pub(super) const fn one(
        matrix: &'a [f32],
        [step, rows]: [usize; 2],
        x: &'a [f32],
        blocks: usize,
        add: bool,
    ) -> Self {
        Self { matrix, matrix_step: step, rows, blocks, x, x_step: BLOCK, steps: [0, 0], panels: 1, add }
    }

    /// Writes the sum to `to`, or adds it.
    pub(super) fn run(&self, to: &mut [f32]) {
        let Self { matrix, matrix_step, rows, blocks, x, x_step, steps: [stride, to_step], panels, .. } = *self;
        let (last, deepest) = (panels - 1, blocks - 1);
        assert!(matrix.len() >= deepest * matrix_step + rows * LANES, "a matrix of all blocks");
        assert!(x.len() >= last * stride + deepest * x_step + BLOCK, "vectors of all panels");
        assert!(to.len() >= last * to_step + rows * LANES, "room for all panels");
        // SAFETY: as `sum_tile` asks, by the assertions; `to` is borrowed for writing and so no operand.
        unsafe { mix_at(self, to.as_mut_ptr()) };
    }
}

/// Makes `fn name(to, operands, factors)`: for each row of sixteen lanes `to = $what`.
macro_rules! each_row {
    ($(#[$meta:meta])* fn $name:ident = $kernel:ident, $at:ident($to:ident $(, $x:ident)*; $($factors:ident),*) $what:expr;) => {
        /// # Safety
        /// The CPU has the features of `S`; operands are as long as `to`.
        #[inline(always)]
        unsafe fn $kernel<S: Simd>($to: &mut [f32] $(, $x: &[f32])* $(, $factors: &Lanes)*) {
            // SAFETY: `at` is the beginning of a row of `to`, and so of each operand; factors are sixteen.
            unsafe {
                $(let $factors = S::load($factors.as_ptr());)*
                let mut at = 0;
                while at < $to.len() {
                    let place = $to.as_mut_ptr().add(at);
                    let $to = S::load(place);
                    $(let $x = S::load($x.as_ptr().add(at));)*
                    let _ = $to;
                    S::store(place, $what);
                    at += LANES;
                }
            }
        }

        dispatch! { fn $at = $kernel($to: &mut [f32] $(, $x: &[f32])* $(, $factors: &Lanes)*); }

        $(#[$meta])*
        pub(super) fn $name($to: &mut [f32] $(, $x: &[f32])* $(, $factors: &Lanes)*) {
            assert!($to.len().is_multiple_of(LANES) $(&& $x.len() >= $to.len())*, "rows of one number");
            // SAFETY: as asserted.
            unsafe { $at($to $(, $x)* $(, $factors)*) };
        }
    };
}

each_row! {
    /// `to *= factor`.
    fn times = times_kernel, times_at(to; factor) S::mul(to, factor);
}

each_row! {
    /// `to *= factor x`.
    fn times_by = times_by_kernel, times_by_at(to, x; factor) S::mul(S::mul(to, x), factor);
}

each_row! {
    /// `to = factor x`.
    fn set_times = set_times_kernel, set_times_at(to, x; factor) S::mul(x, factor);
}

each_row! {
    /// `to += factor x`.
    fn add_times = add_times_kernel, add_times_at(to, x; factor) S::fma(x, factor, to);
}

each_row! {
    /// `to = factor x y`.
    fn set_product = set_product_kernel, set_product_at(to, x, y; factor) S::mul(S::mul(x, y), factor);
}

each_row! {
    /// `to += factor x y`.
    fn add_product = add_product_kernel, add_product_at(to, x, y; factor) S::fma(S::mul(x, y), factor, to);
}

each_row! {
    /// `to = scale (v - decay to)`.
    fn miss = miss_kernel, miss_at(to, v; scale, decay) S::mul(scale, S::sub(v, S::mul(decay, to)));
}

/// # Safety
/// The CPU has the features of `S`; `x` and `y` are as long, whole rows.
#[inline(always)]
unsafe fn dot_kernel<S: Simd>(x: &[f32], y: &[f32], sums: &mut Lanes) {
    // SAFETY: each row is within both; `sums` is sixteen floats.
    unsafe {
        let mut parts = [S::load(sums.as_ptr()), S::splat(0.0)];
        for (row, (x, y)) in x.chunks_exact(LANES).zip(y.chunks_exact(LANES)).enumerate() {
            parts[row % 2] = S::fma(S::load(x.as_ptr()), S::load(y.as_ptr()), parts[row % 2]);
        }
        S::store(sums.as_mut_ptr(), S::add(parts[0], parts[1]));
    }
}

dispatch! { fn dot_at = dot_kernel(x: &[f32], y: &[f32], sums: &mut Lanes); }

/// `sums[lane] += sum over rows of x y`.
pub(super) fn add_dot(x: &[f32], y: &[f32], sums: &mut Lanes) {
    // SAFETY: the kernel reads the rows that both have.
    unsafe { dot_at(x, y, sums) };
}

/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
unsafe fn turn_kernel<S: Simd>(x: &[f32; BLOCK], factors: &Lanes, to: &mut [f32; BLOCK]) {
    // SAFETY: sixteen rows of sixteen lanes in each.
    unsafe {
        let factors = S::load(factors.as_ptr());
        let mut rows = [S::splat(0.0); LANES];
        for (row, at) in rows.iter_mut().zip(x.chunks_exact(LANES)) {
            *row = S::mul(S::load(at.as_ptr()), factors);
        }
        for (column, at) in S::turn(&rows).into_iter().zip(to.chunks_exact_mut(LANES)) {
            S::store(at.as_mut_ptr(), column);
        }
    }
}

dispatch! { fn turn_at = turn_kernel(x: &[f32; BLOCK], factors: &Lanes, to: &mut [f32; BLOCK]); }

fn block(x: &[f32]) -> &[f32; BLOCK] {
    x[..BLOCK].try_into().expect("a block")
}

fn block_mut(x: &mut [f32]) -> &mut [f32; BLOCK] {
    (&mut x[..BLOCK]).try_into().expect("a block")
}

/// Transposes a block: `to[i][j] = factors[i] x[j][i]`.
pub(super) fn turn(x: &[f32], factors: &Lanes, to: &mut [f32]) {
    // SAFETY: the kernel asks nothing of its arguments.
    unsafe { turn_at(block(x), factors, block_mut(to)) };
}

/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
unsafe fn decay_kernel<S: Simd>(behind: &[f64; LANES], before: &[f64; LANES], to: &mut [f32; BLOCK]) {
    for (before, to) in before.iter().zip(to.chunks_exact_mut(LANES)) {
        let mut differences = [0.0f32; LANES];
        for (difference, behind) in differences.iter_mut().zip(behind) {
            *difference = (behind - before) as f32;
        }
        // SAFETY: sixteen floats in both.
        unsafe {
            let logarithms = S::load(differences.as_ptr());
            S::store(
                to.as_mut_ptr(),
                S::if_gt(S::splat(LEAST_LOG_DECAY), logarithms, S::splat(0.0), S::exp(logarithms)),
            );
        };
    }
}

dispatch! {
    fn decay_at = decay_kernel(behind: &[f64; LANES], before: &[f64; LANES], to: &mut [f32; BLOCK]);
}

/// `to[j][i] = exp(behind[i] - before[j])`: the share of token j's contribution that is left at token i; 0 below
/// [`LEAST_LOG_DECAY`]. The sums of logarithms are in f64, so that a difference keeps its digits even after tokens that
/// forget everything.
pub(super) fn decay(behind: &[f64; LANES], before: &[f64; LANES], to: &mut [f32]) {
    // SAFETY: the kernel asks nothing of its arguments.
    unsafe { decay_at(behind, before, block_mut(to)) };
}

/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
unsafe fn inverse_kernel<S: Simd>(lower: &[f32; BLOCK], to: &mut [f32; BLOCK]) {
    // SAFETY: rows of `to` are below sixteen.
    unsafe {
        for i in 0..LANES {
            let mut unit = [0.0; LANES];
            unit[i] = 1.0;
            let mut row = S::load(unit.as_ptr());
            for l in 0..i {
                row = S::fma(S::splat(lower[l * LANES + i]), S::load(to.as_ptr().add(l * LANES)), row);
            }
            let size = S::max(row, S::sub(S::splat(0.0), row));
            row = S::if_gt(S::splat(LEAST_DECAY), size, S::splat(0.0), row);
            S::store(to.as_mut_ptr().add(i * LANES), row);
        }
    }
}

dispatch! { fn inverse_at = inverse_kernel(lower: &[f32; BLOCK], to: &mut [f32; BLOCK]); }

/// The inverse `to[i][j]` of `1 - N`, by forward substitution, where `N[i][j] = lower[j][i]` is 0 except for `j < i`.
/// Its diagonal is 1. Products of decays below [`LEAST_DECAY`] count as 0, for the reason that [`LEAST_LOG_DECAY`] has.
pub(super) fn inverse(lower: &[f32], to: &mut [f32]) {
    // SAFETY: the kernel asks nothing of its arguments.
    unsafe { inverse_at(block(lower), block_mut(to)) };
}

/// # Safety
/// The CPU has the features of `S`; `x` has `panels` panels of [`CHUNK`] rows.
#[inline(always)]
unsafe fn crossing_kernel<S: Simd>(x: &[f32], panels: usize, sums: &mut [f32; CHUNK]) {
    // SAFETY: rows and panels are those of `x`; `left` is sixteen floats.
    unsafe {
        let mut columns = [S::splat(0.0); CHUNK / LANES];
        let mut left = [0.0f32; LANES];
        for (token, sum) in sums.iter_mut().enumerate().take(panels * LANES) {
            let (panel, lane) = (token / LANES, token % LANES);
            let mut later = S::splat(0.0);
            for column in &columns[panel + 1..panels] {
                later = S::add(later, *column);
            }
            S::store(left.as_mut_ptr(), columns[panel]);
            left[..lane].fill(0.0);
            S::store(left.as_mut_ptr(), S::add(S::load(left.as_ptr()), later));
            *sum = left.iter().sum();
            for (at, column) in columns.iter_mut().enumerate().take(panels).skip(panel) {
                *column = S::add(*column, S::load(x.as_ptr().add((at * CHUNK + token) * LANES)));
            }
        }
    }
}

dispatch! { fn crossing_at = crossing_kernel(x: &[f32], panels: usize, sums: &mut [f32; CHUNK]); }

/// `sums[t]`: the sum of `x[i][j]` over `j < t <= i`. `x` is `[panels][CHUNK j][16 i]`; only `j <= i` is read.
pub(super) fn crossing(x: &[f32], panels: usize, sums: &mut [f32; CHUNK]) {
    assert!(panels <= CHUNK / LANES && x.len() >= panels * CHUNK * LANES, "pairs of a chunk's tokens");
    // SAFETY: as asserted.
    unsafe { crossing_at(x, panels, sums) };
}

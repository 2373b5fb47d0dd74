//! Matrix products on the CPU. The activation is the vector operand: a vector holds one feature of 16 tokens. Each
//! number of the matrix is broadcast to all lanes. The matrix may have any two strides, so that one row-major weight
//! serves forward and backward.
use crate::activation::LANES;
use crate::simd::TileLanes;

mod amx;
mod columns;
mod grouped;
mod interleaved;
mod matmul;
mod outer;
mod outer_amx;
mod outer_job;
pub(crate) mod pairs;
mod product;
pub(crate) mod rounding;
mod skinny;
mod skinny_pairs;
mod strip;
mod tile_sizes;
mod tiles;
mod tokens;
mod widen;

pub(super) use grouped::{has_transposed, matmul_grouped, matmul_transposed, matvec, matvec_grouped};
pub(super) use outer::{outer, transposed};
pub(crate) use tiles::{score_tile, sum_tile};

/// How many columns of the matrix are summed in one block: the matrix tile then stays in L1, and the activation's block
/// in L2.
const DEPTH: usize = 512;
/// The most rows of the matrix that are packed together ([`strip`]). A task that packs a tile at a time may have more.
const TASK_ROWS: usize = 96;

/// Adds the products of one column of the matrix to `acc`.
///
/// # Safety
/// The CPU has the features of `S`; `matrix` reaches `ROWS` rows, `x` a vector in each of `PANELS` panels.
#[inline(always)]
unsafe fn column<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    matrix: *const f32,
    row: usize,
    x: *const f32,
    stride: usize,
    acc: &mut [[S::Sum; PANELS]; ROWS],
) {
    // SAFETY: as the caller says.
    unsafe {
        let mut vectors = [S::broadcast(0.0); PANELS];
        for (panel, vector) in vectors.iter_mut().enumerate() {
            *vector = S::read(x.add(panel * stride));
        }
        for (index, sums) in acc.iter_mut().enumerate() {
            let value = S::broadcast(*matrix.add(index * row));
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = S::add_product(value, vector, *sum);
            }
        }
    }
}

/// `acc[i][j] += sum_k matrix[i, k] x[k, panel j]`, `k` in `0..depth`.
///
/// # Safety
/// The CPU has the features of `S`; `matrix` reaches `ROWS` rows of `row` floats and `depth` columns of `col`, `x` reaches `depth`
/// vectors in each of `PANELS` panels that lie `stride` floats apart.
#[inline(always)]
pub(crate) unsafe fn tile<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    depth: usize,
    matrix: *const f32,
    row: usize,
    col: usize,
    x: *const f32,
    stride: usize,
    acc: &mut [[S::Sum; PANELS]; ROWS],
) {
    // SAFETY: as the caller says.
    unsafe { tile_and::<S, ROWS, PANELS>(depth, [matrix, x], [row, col], stride, acc, |_| {}) }
}

/// As [`tile`], with the matrix and `x` in one array, and the matrix's two strides in another. Calls `meanwhile` with
/// the number of each column, or of every fourth column in a small tile.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn tile_and<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    depth: usize,
    [mut matrix, mut x]: [*const f32; 2],
    [row, col]: [usize; 2],
    stride: usize,
    acc: &mut [[S::Sum; PANELS]; ROWS],
    meanwhile: impl Fn(usize),
) {
    // A small tile takes four columns at a time, because counting columns takes time beside so few products.
    let turns = if ROWS * PANELS <= 6 { 4 } else { 1 };
    // The compiler keeps a local array in registers, whatever the caller does with `acc`.
    let mut sums = *acc;
    let mut left = depth;
    while left >= turns {
        for turn in 0..turns {
            let (matrix, x) = (matrix.wrapping_add(turn * col), x.wrapping_add(turn * LANES));
            // SAFETY: fewer than `depth` columns were before this one: it is there, as the caller says.
            unsafe { column::<S, ROWS, PANELS>(matrix, row, x, stride, &mut sums) };
        }
        meanwhile(depth - left);
        // After the last column these may point past the end; they are not read then.
        matrix = matrix.wrapping_add(turns * col);
        x = x.wrapping_add(turns * LANES);
        left -= turns;
    }
    for turn in 0..left {
        let (matrix, x) = (matrix.wrapping_add(turn * col), x.wrapping_add(turn * LANES));
        // SAFETY: as above.
        unsafe { column::<S, ROWS, PANELS>(matrix, row, x, stride, &mut sums) };
    }
    *acc = sums;
}

/// How many rows the next tile takes if `left` rows remain and the kernel's largest tile has `max`.
#[inline(always)]
pub(crate) const fn tile_rows(left: usize, max: usize) -> usize {
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

/// Whether [`tile_rows`] ever chooses a tile of so many rows and panels. No code is compiled for others.
pub(crate) const fn has_tile<S: TileLanes>(rows: usize, panels: usize) -> bool {
    rows <= S::TILE_ROWS && panels <= S::TILE_PANELS && (rows != 6 || S::TILE_ROWS == 6)
}

/// Calls `$f::<S, ROWS, PANELS>(args)` for run-time `rows` and `panels`.
macro_rules! with_tile {
    ($rows:expr, $panels:expr, $f:ident::<$s:ident>($($arg:expr),* $(,)?)) => {
        match ($rows, $panels) {
            (12, 2) if const { $crate::gemm::cpu::has_tile::<$s>(12, 2) } => $f::<$s, 12, 2>($($arg),*),
            (8, 2) if const { $crate::gemm::cpu::has_tile::<$s>(8, 2) } => $f::<$s, 8, 2>($($arg),*),
            (6, 2) if const { $crate::gemm::cpu::has_tile::<$s>(6, 2) } => $f::<$s, 6, 2>($($arg),*),
            (4, 2) if const { $crate::gemm::cpu::has_tile::<$s>(4, 2) } => $f::<$s, 4, 2>($($arg),*),
            (2, 2) if const { $crate::gemm::cpu::has_tile::<$s>(2, 2) } => $f::<$s, 2, 2>($($arg),*),
            (1, 2) if const { $crate::gemm::cpu::has_tile::<$s>(1, 2) } => $f::<$s, 1, 2>($($arg),*),
            (12, _) if const { $crate::gemm::cpu::has_tile::<$s>(12, 1) } => $f::<$s, 12, 1>($($arg),*),
            (8, _) if const { $crate::gemm::cpu::has_tile::<$s>(8, 1) } => $f::<$s, 8, 1>($($arg),*),
            (6, _) if const { $crate::gemm::cpu::has_tile::<$s>(6, 1) } => $f::<$s, 6, 1>($($arg),*),
            (4, _) if const { $crate::gemm::cpu::has_tile::<$s>(4, 1) } => $f::<$s, 4, 1>($($arg),*),
            (2, _) if const { $crate::gemm::cpu::has_tile::<$s>(2, 1) } => $f::<$s, 2, 1>($($arg),*),
            _ => $f::<$s, 1, 1>($($arg),*),
        }
    };
}
pub(crate) use with_tile;

/// `to[j][i] = from[i][j]` for `rows` rows i of 16 and all 16 columns j; missing rows count as zero.
///
/// # Safety
/// `from` holds `rows * 16` floats, `to` has room for 256; they do not overlap. `rows` is at most 16.
#[inline(always)]
pub(crate) unsafe fn transpose(from: *const f32, rows: usize, to: *mut f32) {
    // SAFETY: `from` is read below `rows * 16`, `to` written below 256, as the caller says. Neither needs an alignment
    // of its own: a whole block moves unaligned, and single floats are aligned as the caller's are. All is read before
    // a whole block is written.
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

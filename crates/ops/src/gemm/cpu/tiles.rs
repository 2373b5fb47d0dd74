//! Small matrix products in panels of 16 lanes, for attention and recurrences: scores, and sums of rows weighted by
//! them.
use super::tile;
use crate::activation::LANES;
use crate::simd::TileLanes;

/// `to[panel j][row i] = sum_k matrix[i, k] x[k, panel j]`: matrix rows lie `row` floats apart, columns 16.
///
/// # Safety
/// The CPU has the features of `S`; `matrix` and `x` are as [`tile`] asks, columns 16 apart; `to` has room for `ROWS` vectors in
/// each of `PANELS` panels, `to_stride` floats apart.
#[inline(always)]
pub(crate) unsafe fn score_tile<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    depth: usize,
    matrix: *const f32,
    row: usize,
    x: *const f32,
    stride: usize,
    to: *mut f32,
    to_stride: usize,
) {
    // SAFETY: `tile` asks of `matrix` and `x` what this function asks; row and panel of `to` are below ROWS and PANELS.
    unsafe {
        let mut acc = [[S::broadcast(0.0); PANELS]; ROWS];
        tile::<S, ROWS, PANELS>(depth, matrix, row, LANES, x, stride, &mut acc);
        for (index, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::write(to.add(panel * to_stride + index * LANES), *sum);
            }
        }
    }
}

/// `to[panel j][row i] (+)= sum over blocks b, lanes t of matrix[b][i][t] x[b][t][panel j]`, `lanes` lanes a block.
///
/// # Safety
/// The CPU has the features of `S`. In each of `blocks` blocks `matrix` reaches `ROWS` vectors of `lanes` floats, and `x` `lanes` vectors
/// in each of `PANELS` panels, `x_stride` apart. `to` holds `ROWS` vectors in each of `PANELS` panels, `to_stride` floats apart,
/// and does not overlap them.
#[inline(always)]
pub(crate) unsafe fn sum_tile<S: TileLanes, const ROWS: usize, const PANELS: usize>(
    blocks: usize,
    lanes: usize,
    matrix: *const f32,
    matrix_step: usize,
    x: *const f32,
    x_step: usize,
    x_stride: usize,
    to: *mut f32,
    to_stride: usize,
    add: bool,
) {
    // SAFETY: a block below `blocks` has the columns that `tile` is asked for; row and panel of `to` are below ROWS
    // and PANELS.
    unsafe {
        let mut acc = [[S::broadcast(0.0); PANELS]; ROWS];
        if add {
            for (index, sums) in acc.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    *sum = S::read(to.add(panel * to_stride + index * LANES));
                }
            }
        }
        for block in 0..blocks {
            let (matrix, x) = (matrix.add(block * matrix_step), x.add(block * x_step));
            tile::<S, ROWS, PANELS>(lanes, matrix, lanes, 1, x, x_stride, &mut acc);
        }
        for (index, sums) in acc.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                S::write(to.add(panel * to_stride + index * LANES), *sum);
            }
        }
    }
}

//! Tiles of a quantized matrix ([`Quantized`]), widened while it is multiplied. No copy of the matrix outlives a task.
use super::{DEPTH, TASK_ROWS, tile_rows};
use crate::activation::LANES;
use crate::quant::{Quantized, any_run as run};
use crate::simd::{Simd, TileLanes};
use std::mem::MaybeUninit;

/// Widens `rows` runs of `depth` numbers from `at` on, `row` apart, end to end.
///
/// # Safety
/// The features of `S`; the last run ends within the matrix; `to` has room for `rows * depth` floats.
#[inline(always)]
pub(super) unsafe fn widen_rows<S: Simd>(
    matrix: &Quantized,
    at: usize,
    row: usize,
    rows: usize,
    depth: usize,
    to: *mut f32,
) {
    for index in 0..rows {
        // SAFETY: run `index` is one of `rows`, within the matrix, and takes the floats `index * depth..` of `to`.
        unsafe { run::<S>(matrix, at + index * row, to.add(index * depth), depth) };
    }
}

/// Copies `ROWS` floats.
///
/// # Safety
/// Both places hold that many, at any alignment.
#[inline(always)]
unsafe fn copy<const ROWS: usize>(from: *const f32, to: *mut f32) {
    // SAFETY: both places hold `ROWS` floats; neither move needs an alignment, and all is read before it is written.
    unsafe { to.cast::<[f32; ROWS]>().write_unaligned(from.cast::<[f32; ROWS]>().read_unaligned()) }
}

/// The tiles of a transposed matrix that a task needs at one depth, side by side. A run of the matrix serves all of them,
/// so that the scale of its block is looked up once.
pub(super) struct Strip {
    values: [MaybeUninit<f32>; DEPTH * TASK_ROWS],
}

impl Strip {
    #[allow(clippy::large_stack_arrays, reason = "192 KiB of a thread's stack, so that the strip stays in L2")]
    #[inline(always)]
    pub(super) const fn new() -> Self {
        Self { values: [MaybeUninit::uninit(); DEPTH * TASK_ROWS] }
    }

    /// Widens `depth` runs of `rows` numbers from `at` on, `col` apart, for tiles of the lanes `T`.
    ///
    /// # Safety
    /// The features of `S`; the last run ends within the matrix; `rows <= TASK_ROWS` and `depth <= DEPTH`.
    #[inline(always)]
    pub(super) unsafe fn fill<S: Simd, T: TileLanes>(
        &mut self,
        matrix: &Quantized,
        at: usize,
        col: usize,
        rows: usize,
        depth: usize,
    ) {
        let mut line = [0.0f32; TASK_ROWS + LANES];
        let to: *mut f32 = self.values.as_mut_ptr().cast();
        for k in 0..depth {
            // SAFETY: the run is within the matrix, and `line` has room for `rows` floats. A tile takes `tile <= rows -
            // done` of them to the place `done * depth + k * tile` of `values`: all tiles together take `rows * depth`
            // floats, which it has room for.
            unsafe {
                run::<S>(matrix, at + k * col, line.as_mut_ptr(), rows);
                let mut done = 0;
                while done < rows {
                    let tile = tile_rows(rows - done, T::TILE_ROWS);
                    let (from, to) = (line.as_ptr().add(done), to.add(done * depth + k * tile));
                    match tile {
                        12 => copy::<12>(from, to),
                        8 => copy::<8>(from, to),
                        6 => copy::<6>(from, to),
                        4 => copy::<4>(from, to),
                        2 => copy::<2>(from, to),
                        _ => copy::<1>(from, to),
                    }
                    done += tile;
                }
            }
        }
    }

    /// The tile that begins with row `row` of the strip, `depth` runs end to end. It is written if [`Strip::fill`] was
    /// called with that depth and more rows than `row`.
    #[inline(always)]
    pub(super) fn tile(&self, row: usize, depth: usize) -> *const f32 {
        self.values.as_ptr().cast::<f32>().wrapping_add(row * depth)
    }
}

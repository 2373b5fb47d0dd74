//! Packs the tiles of a matrix that the products of one task need.
use super::interleaved::widen;
use super::product::{RawTerm, TILE_ROWS};
use super::{DEPTH, TASK_ROWS, tile_rows};
use crate::activation::LANES;
use crate::gemm::Interleaved;
use crate::simd::{Simd, TileLanes, prefetch};
use std::mem::MaybeUninit;

/// Copies `ROWS` floats.
///
/// # Safety
/// Both places hold that many, at any alignment.
#[inline(always)]
unsafe fn copy<const ROWS: usize>(from: *const f32, to: *mut f32) {
    // SAFETY: both places hold `ROWS` floats, and eight of them if there are so many; moves need no alignment.
    unsafe {
        if const { ROWS > 8 } {
            to.cast::<[f32; 8]>().write_unaligned(from.cast::<[f32; 8]>().read_unaligned());
            for at in (8..ROWS).step_by(4) {
                to.add(at).cast::<[f32; 4]>().write_unaligned(from.add(at).cast::<[f32; 4]>().read_unaligned());
            }
        } else {
            to.cast::<[f32; ROWS]>().write_unaligned(from.cast::<[f32; ROWS]>().read_unaligned());
        }
    }
}

/// Copies one number of each of `ROWS` rows, which lie `row` floats apart, end to end.
///
/// # Safety
/// `from` reaches `ROWS` rows, `to` has room for as many floats.
#[inline(always)]
unsafe fn gather<const ROWS: usize>(from: *const f32, row: usize, to: *mut f32) {
    for index in 0..ROWS {
        // SAFETY: row `index` is one of `ROWS`.
        unsafe { *to.add(index) = *from.add(index * row) };
    }
}

/// Transposes sixteen numbers of each of `ROWS` rows, which lie `row` floats apart: first one number of each row, then
/// the next of each.
///
/// # Safety
/// `from` reaches `ROWS` rows of sixteen floats, `to` has room for as many and 15 more, which are overwritten.
#[inline(always)]
unsafe fn gather_block<S: Simd, const ROWS: usize>(from: *const f32, row: usize, to: *mut f32) {
    // SAFETY: row `index` is one of `ROWS`; a column's place is followed by those of the others, or by 15 floats more.
    unsafe {
        let mut rows = [S::splat(0.0); LANES];
        for (index, lanes) in rows.iter_mut().enumerate().take(ROWS) {
            *lanes = S::load(from.add(index * row));
        }
        for (index, column) in S::turn(&rows).into_iter().enumerate() {
            S::store(to.add(index * ROWS), column);
        }
    }
}

/// Calls `$f::<ROWS>(args)`, or `$f::<S, ROWS>(args)`, for a run-time number of a tile's rows.
macro_rules! with_rows {
    ($rows:expr, $f:ident$(::<$s:ident>)?($($arg:expr),*)) => {
        match $rows {
            12 => $f::<$($s,)? 12>($($arg),*),
            8 => $f::<$($s,)? 8>($($arg),*),
            6 => $f::<$($s,)? 6>($($arg),*),
            4 => $f::<$($s,)? 4>($($arg),*),
            2 => $f::<$($s,)? 2>($($arg),*),
            _ => $f::<$($s,)? 1>($($arg),*),
        }
    };
}

/// As [`gather_block`], for a run-time number of rows.
///
/// # Safety
/// As for [`gather_block`].
#[inline(always)]
pub(super) unsafe fn gather_rows<S: Simd>(rows: usize, from: *const f32, row: usize, to: *mut f32) {
    // SAFETY: as the caller says.
    unsafe { with_rows!(rows, gather_block::<S>(from, row, to)) }
}

/// How many columns ahead a transposed matrix is prefetched: each column lies in other cache lines, and mostly in
/// another page.
const AHEAD: usize = 8;

impl RawTerm<'_> {
    /// Packs the columns `k0..k0 + depth` of `rows` rows from `m` on end to end.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the matrix is transposed and has these rows and columns; `rows` are a tile's; `to` has room for `rows *
    /// depth` numbers and 15 more.
    #[inline(always)]
    pub(super) unsafe fn columns<S: Simd>(&self, [m, rows]: [usize; 2], [k0, depth]: [usize; 2], to: *mut f32) {
        for k in 0..depth {
            // SAFETY: column `k0 + k` is one of the matrix. What is widened beyond its rows lies within the 15 numbers more, and the next
            // column overwrites it.
            unsafe {
                let to = to.add(k * rows);
                let run = self.column::<S>([m, rows], k0 + k, to);
                if run != to.cast_const() {
                    with_rows!(rows, copy(run, to));
                }
            }
        }
    }
}

/// The tiles of a matrix that a task needs at one depth, side by side: `[tile][depth][rows of the tile]` in float32.
pub(super) struct Strip {
    values: [MaybeUninit<f32>; DEPTH * TASK_ROWS + LANES],
    /// The rows of a tile, or a column, after they were converted to float32.
    widened: [MaybeUninit<f32>; DEPTH * TILE_ROWS + LANES],
}

impl Strip {
    #[allow(clippy::large_stack_arrays, reason = "216 KiB of a thread's stack, so that the strip stays in L2")]
    #[inline(always)]
    pub(super) const fn new() -> Self {
        Self {
            values: [MaybeUninit::uninit(); DEPTH * TASK_ROWS + LANES],
            widened: [MaybeUninit::uninit(); DEPTH * TILE_ROWS + LANES],
        }
    }

    /// Packs `rows` rows from `m` on and `depth` columns from `k0` on, in tiles for the lanes of `T`.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the matrix has these rows and columns; `rows <= TASK_ROWS` and `depth <= DEPTH`.
    #[inline(always)]
    pub(super) unsafe fn fill<S: Simd, T: TileLanes>(
        &mut self,
        term: &RawTerm<'_>,
        [m, rows]: [usize; 2],
        [k0, depth]: [usize; 2],
    ) {
        let (to, buffer): (*mut f32, *mut f32) = (self.values.as_mut_ptr().cast(), self.widened.as_mut_ptr().cast());
        if let Some(matrix) = term.interleaved {
            // SAFETY: as the caller says; a tile's place is as below.
            unsafe { self.fill_interleaved::<S, T>(matrix, [m, rows], [k0, depth]) };
            return;
        }
        if term.is_transposed() {
            // One run of the matrix serves all tiles, so that the scale of its block is looked up once.
            for k in 0..depth {
                // SAFETY: column `k0 + k` is one of the matrix, and `buffer` has room for `rows <= TASK_ROWS` numbers and more. A
                // tile takes `tile <= rows - done` of them to the place `done * depth + k * tile` of `values`: all tiles together
                // take `rows * depth` floats, which it has room for.
                unsafe {
                    if !term.whole.matrix.is_null() {
                        let ahead = term.whole.matrix.wrapping_add(m + (k0 + k + AHEAD) * term.whole.col);
                        for at in (0..rows).step_by(LANES) {
                            prefetch(ahead.wrapping_add(at).cast());
                        }
                    }
                    let run = term.column::<S>([m, rows], k0 + k, buffer);
                    let mut done = 0;
                    while done < rows {
                        let tile = tile_rows(rows - done, T::TILE_ROWS);
                        let (from, to) = (run.add(done), to.add(done * depth + k * tile));
                        with_rows!(tile, copy(from, to));
                        done += tile;
                    }
                }
            }
            return;
        }
        let mut done = 0;
        while done < rows {
            let tile = tile_rows(rows - done, T::TILE_ROWS);
            // SAFETY: these rows and columns are some of the matrix. `buffer` has room for a tile of `DEPTH` columns. The tile takes the
            // floats `done * depth..(done + tile) * depth` of `values`. The 15 floats after them, which a block may overwrite, are of later
            // tiles or beyond all of them.
            unsafe {
                let (from, row) = term.rows::<S>([m + done, tile], [k0, depth], buffer);
                let col = if from == buffer.cast_const() { 1 } else { term.whole.col };
                let to = to.add(done * depth);
                let whole = if col == 1 { depth - depth % LANES } else { 0 };
                for k in (0..whole).step_by(LANES) {
                    with_rows!(tile, gather_block::<S>(from.add(k), row, to.add(k * tile)));
                }
                for k in whole..depth {
                    with_rows!(tile, gather(from.add(k * col), row, to.add(k * tile)));
                }
            }
            done += tile;
        }
    }

    /// As [`Strip::fill`], for an interleaved matrix.
    ///
    /// # Safety
    /// As for [`Strip::fill`].
    #[inline(always)]
    unsafe fn fill_interleaved<S: Simd, T: TileLanes>(
        &mut self,
        matrix: &Interleaved,
        [m, rows]: [usize; 2],
        [k0, depth]: [usize; 2],
    ) {
        const AT_ONCE: usize = 256;
        const { assert!(AT_ONCE * LANES <= DEPTH * TILE_ROWS) };
        let (to, buffer): (*mut f32, *mut f32) = (self.values.as_mut_ptr().cast(), self.widened.as_mut_ptr().cast());
        // For each row, where its first number goes, and how far apart its numbers are.
        let mut places = [[0; 2]; TASK_ROWS];
        let mut done = 0;
        while done < rows {
            let tile = tile_rows(rows - done, T::TILE_ROWS);
            for row in 0..tile {
                places[done + row] = [done * depth + row, tile];
            }
            done += tile;
        }
        for block in m / LANES..(m + rows).div_ceil(LANES) {
            for first in (0..depth).step_by(AT_ONCE) {
                let count = AT_ONCE.min(depth - first);
                // SAFETY: the block and the columns are some of the matrix, and `buffer` has room for so many. A row's numbers have their
                // places in its tile, which takes `tile * depth` floats from `done * depth` on.
                unsafe {
                    widen::<S>(matrix, block, [k0 + first, count], buffer);
                    for row in (block * LANES).max(m)..((block + 1) * LANES).min(m + rows) {
                        let [place, tile] = places[row - m];
                        for k in 0..count {
                            *to.add(place + (first + k) * tile) = *buffer.add(k * LANES + row % LANES);
                        }
                    }
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

//! Converts parts of a matrix to float32 while it is multiplied. No copy of the matrix outlives a task.
use super::product::RawTerm;
use crate::activation::LANES;
use crate::quant::{Quantized, any_run as run};
use crate::simd::{Simd, prefetch};

/// Dequantizes `rows` runs of `depth` numbers, which begin `row` numbers apart from `at` on, and writes them one after
/// the other.
///
/// # Safety
/// The CPU has the features of `S`; the last run ends within the matrix; `to` has room for `rows * depth` floats.
#[inline(always)]
pub(super) unsafe fn quantized_rows<S: Simd>(
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

/// Converts `rows` runs of `depth` bfloat16 numbers, which begin `row` numbers apart, and writes them one after the
/// other. Prefetches the runs of as many rows more.
///
/// # Safety
/// The CPU has the features of `S`; `from` reaches the last run; `to` has room for `rows * depth` numbers and 15 more.
#[inline(always)]
unsafe fn narrow_rows<S: Simd>(from: *const u16, row: usize, rows: usize, depth: usize, to: *mut f32) {
    for index in 0..rows {
        // SAFETY: row `index` is below `rows`; a whole vector moves only where 16 of its `depth` numbers are left.
        unsafe {
            let (from, to) = (from.add(index * row), to.add(index * depth));
            let mut at = 0;
            while at + LANES <= depth {
                if at % (2 * LANES) == 0 {
                    prefetch(from.wrapping_add(rows * row + at).cast());
                }
                S::store(to.add(at), S::load_bf16(from.add(at)));
                at += LANES;
            }
            while at < depth {
                *to.add(at) = f32::from_bits(u32::from(*from.add(at)) << 16);
                at += 1;
            }
        }
    }
}

/// Converts `rows` consecutive numbers of a bfloat16 matrix. The matrix has `left` numbers from `from` on.
///
/// # Safety
/// The CPU has the features of `S`; `from` reaches them; `to` has room for them and 15 more.
#[inline(always)]
unsafe fn narrow_run<S: Simd>(from: *const u16, rows: usize, left: usize, to: *mut f32) {
    let mut done = 0;
    while done < rows {
        // SAFETY: a whole vector is read only where the matrix reaches that far. It writes 15 numbers more at most.
        unsafe {
            if done + LANES <= left {
                S::store(to.add(done), S::load_bf16(from.add(done)));
            } else {
                for row in done..rows.min(done + LANES) {
                    *to.add(row) = f32::from_bits(u32::from(*from.add(row)) << 16);
                }
            }
        }
        done += LANES;
    }
}

impl RawTerm<'_> {
    /// The numbers `k0..k0 + depth` of `rows` rows from `m` on: where they begin, and how far apart rows are. They are
    /// read in the matrix, or converted to `buffer`.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the matrix has these rows and columns, and a row's lie end to end where it is not float32;
    /// `buffer` has room for `rows * depth` numbers and 15 more.
    #[inline(always)]
    pub(super) unsafe fn rows<S: Simd>(
        &self,
        [m, rows]: [usize; 2],
        [k0, depth]: [usize; 2],
        buffer: *mut f32,
    ) -> (*const f32, usize) {
        let row = self.whole.row;
        let at = m * row + k0 * self.whole.col;
        // SAFETY: as the caller says.
        unsafe {
            if let Some(matrix) = self.quantized {
                quantized_rows::<S>(matrix, at, row, rows, depth, buffer);
            } else if self.narrow.is_null() {
                return (self.whole.matrix.add(at), row);
            } else {
                narrow_rows::<S>(self.narrow.add(at), row, rows, depth, buffer);
            }
        }
        (buffer, depth)
    }

    /// Where column `k` of `rows` consecutive rows from `m` on begins: in the matrix, or converted to `buffer`.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the matrix is transposed and has these rows and this column; `buffer` has room for `rows` numbers and 15 more.
    #[inline(always)]
    pub(super) unsafe fn column<S: Simd>(&self, [m, rows]: [usize; 2], k: usize, buffer: *mut f32) -> *const f32 {
        let at = m + k * self.whole.col;
        // SAFETY: as the caller says.
        unsafe {
            if let Some(matrix) = self.quantized {
                run::<S>(matrix, at, buffer, rows);
            } else if self.narrow.is_null() {
                return self.whole.matrix.add(at);
            } else {
                narrow_run::<S>(self.narrow.add(at), rows, self.len - at, buffer);
            }
        }
        buffer
    }
}

//! Sixteen rows of a matrix as columns: of each column the numbers of all rows, in the lanes of a vector.
use crate::activation::LANES;
use crate::gemm::{Matrix, Store};
use crate::quant::{EIGHTH, Eight, Four, Quantized, any_run};
use crate::simd::{Number, Simd, TurnedBytes, prefetch_far, turn_bytes};
use std::mem::MaybeUninit;
use tunesmith_cpu_slice::CpuSlice as _;

/// Columns of floats that are turned at once.
const EIGHT: usize = LANES / 2;
/// Columns that are widened at once.
const WIDENED: usize = 64;

/// What takes columns one after the other.
pub(super) trait Sink<V: Copy>: Sized {
    /// Whether it sums: columns with scales apart are then summed on their own, by [`Sink::fresh`] and [`Sink::fold`].
    const SUMS: bool;
    /// Whether it takes columns of interleaved matrices alone: others are not compiled for it.
    const ONLY_INTERLEAVED: bool = false;
    /// Column `k`.
    ///
    /// # Safety
    /// As whoever makes the sink says.
    unsafe fn take(&mut self, k: usize, column: V);
    /// One that has summed nothing yet.
    ///
    /// # Safety
    /// As whoever makes the sink says.
    unsafe fn fresh(&self) -> Self;
    /// Adds what `sums` has summed, multiplied by the rows' scales.
    ///
    /// # Safety
    /// As whoever makes the sink says.
    unsafe fn fold(&mut self, sums: Self, factor: V);
}

/// Sums of products with `TOKENS` tokens, one vector of rows each.
#[derive(Clone, Copy)]
pub(super) struct Sums<S: Simd, const TOKENS: usize, const APART: usize> {
    pub(super) sums: [S::V; TOKENS],
    /// The tokens' numbers of column 0; those of the next column are `APART` floats further.
    pub(super) x: *const f32,
}

impl<S: Simd, const TOKENS: usize, const APART: usize> Sink<S::V> for Sums<S, TOKENS, APART> {
    const SUMS: bool = true;
    const ONLY_INTERLEAVED: bool = TOKENS > 8;
    #[inline(always)]
    unsafe fn take(&mut self, k: usize, column: S::V) {
        // SAFETY: whoever made this has the features of `S`, and TOKENS numbers of each column that is taken.
        unsafe {
            let x = self.x.add(k * APART);
            for (token, sum) in self.sums.iter_mut().enumerate() {
                *sum = S::fma(column, S::splat(*x.add(token)), *sum);
            }
        }
    }
    #[inline(always)]
    unsafe fn fresh(&self) -> Self {
        // SAFETY: whoever made this has the features of `S`.
        Self { sums: [unsafe { S::splat(0.0) }; TOKENS], ..*self }
    }
    #[inline(always)]
    unsafe fn fold(&mut self, sums: Self, factor: S::V) {
        for (total, sum) in self.sums.iter_mut().zip(sums.sums) {
            // SAFETY: whoever made this has the features of `S`.
            *total = unsafe { S::fma(sum, factor, *total) };
        }
    }
}

/// Vectors end to end.
#[derive(Clone, Copy)]
pub(super) struct Kept(pub(super) *mut f32);

impl<V: Copy> Sink<V> for Kept {
    const SUMS: bool = false;
    #[inline(always)]
    unsafe fn take(&mut self, k: usize, column: V) {
        const { assert!(size_of::<V>() == 4 * LANES) };
        // SAFETY: whoever made this has room for each column that is taken; a vector is 16 floats.
        unsafe { self.0.add(k * LANES).cast::<V>().write_unaligned(column) };
    }
    #[inline(always)]
    unsafe fn fresh(&self) -> Self {
        *self
    }
    #[inline(always)]
    unsafe fn fold(&mut self, _: Self, _: V) {}
}

/// What is fetched while other numbers are multiplied: stretches of memory that lie `step` bytes apart, each as long as eight columns
/// of sixteen rows. Of an interleaved matrix it is what lies `step` bytes after these numbers.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) next: *const u8,
    pub(super) step: usize,
}

impl Ahead {
    /// Fetches so many lines.
    #[inline(always)]
    fn fetch<const LINES: usize>(&mut self) {
        for line in 0..LINES {
            prefetch_far(self.next.wrapping_add(64 * line).cast());
        }
        self.next = self.next.wrapping_add(self.step);
    }
}

/// Sixteen rows of a matrix.
pub(super) trait Source<S: Simd>: Copy {
    /// Columns that are turned at once, a power of two from 8 to 64.
    const COLUMNS: usize;
    /// As many columns.
    type Turned: Copy;
    /// Turns the columns from `k` on, and fetches as many.
    ///
    /// # Safety
    /// The features of `S`; the rows have these columns; `k` is a multiple of `COLUMNS`.
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut Self::Turned);
    /// What [`Source::turn`] writes to.
    ///
    /// # Safety
    /// The features of `S`.
    unsafe fn room() -> Self::Turned;
    /// Column `at` of those that were turned.
    ///
    /// # Safety
    /// The features of `S`.
    unsafe fn column(&self, turned: &Self::Turned, at: usize) -> S::V;
}

/// Rows of floats.
#[derive(Clone, Copy)]
pub(super) struct Plain<T> {
    pub(super) from: *const T,
    pub(super) row: usize,
}

impl<S: Simd, T: Number> Source<S> for Plain<T> {
    const COLUMNS: usize = EIGHT;
    type Turned = [S::V; EIGHT];
    #[inline(always)]
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut Self::Turned) {
        if size_of::<T>() == 4 {
            ahead.fetch::<8>();
        } else {
            ahead.fetch::<4>();
        }
        // SAFETY: as the caller says.
        *to = unsafe { S::turn_eight(self.from.add(k), self.row) };
    }
    #[inline(always)]
    unsafe fn room() -> Self::Turned {
        // SAFETY: as the caller says.
        [unsafe { S::splat(0.0) }; EIGHT]
    }
    #[inline(always)]
    unsafe fn column(&self, turned: &Self::Turned, at: usize) -> S::V {
        turned[at]
    }
}

/// Rows of int8, or of FP8.
#[derive(Clone, Copy)]
pub(super) struct Bytes<V, const FP8: bool> {
    codes: *const u8,
    row: usize,
    factor: V,
}

impl<V: Copy, const FP8: bool> Bytes<V, FP8> {
    /// The rows from `row` on, sixteen of a matrix.
    ///
    /// # Safety
    /// The features of `S`; the matrix has these rows.
    #[inline(always)]
    pub(super) unsafe fn new<S: Simd<V = V>>(eight: &Eight, row: usize) -> Self {
        let width = eight.width();
        // SAFETY: each row has its codes and a scale.
        unsafe {
            let factor = S::load(eight.scales().as_ptr().add(row));
            Self { codes: eight.codes().as_ptr().add(row * width), row: width, factor }
        }
    }
}

impl<S: Simd, const FP8: bool> Source<S> for Bytes<S::V, FP8> {
    const COLUMNS: usize = LANES;
    type Turned = TurnedBytes;
    #[inline(always)]
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut TurnedBytes) {
        ahead.fetch::<2>();
        ahead.fetch::<2>();
        // SAFETY: sixteen rows have 16 codes each from column `k` on.
        unsafe { turn_bytes(self.codes.add(k), self.row, to) }
    }
    #[inline(always)]
    unsafe fn room() -> Self::Turned {
        TurnedBytes([0; 256])
    }
    #[inline(always)]
    unsafe fn column(&self, turned: &TurnedBytes, at: usize) -> S::V {
        // SAFETY: a column has 16 codes.
        unsafe {
            let codes = turned.0[at * LANES..][..LANES].as_ptr();
            if FP8 {
                S::mul(S::load_e4m3(codes), self.factor)
            } else {
                S::mul(S::mul(S::load_i8(codes), self.factor), S::splat(EIGHTH))
            }
        }
    }
}

/// Rows of codes of 4 bits, of whole blocks each.
#[derive(Clone, Copy)]
pub(super) struct Nibbles<'a, V> {
    four: &'a Four,
    table: V,
    row: usize,
    width: usize,
    /// The block of each row that `factor` is of.
    block: usize,
    factor: V,
}

impl<'a, V: Copy> Nibbles<'a, V> {
    /// The rows from `row` on, sixteen of a matrix.
    ///
    /// # Safety
    /// The features of `S`; the matrix has these rows, of `width` numbers.
    #[inline(always)]
    pub(super) unsafe fn new<S: Simd<V = V>>(four: &'a Four, row: usize, width: usize) -> Self {
        // SAFETY: the table has sixteen numbers.
        let table = unsafe { S::load(four.table().as_ptr()) };
        Self { four, table, row, width, block: usize::MAX, factor: table }
    }
}

/// Codes of 32 columns, two a byte, and the scales of either half.
#[derive(Clone, Copy)]
pub(super) struct TurnedNibbles<V> {
    bytes: TurnedBytes,
    factors: [V; 2],
}

impl<S: Simd> Source<S> for Nibbles<'_, S::V> {
    const COLUMNS: usize = 2 * LANES;
    type Turned = TurnedNibbles<S::V>;
    #[inline(always)]
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut Self::Turned) {
        let shift = self.four.block().trailing_zeros();
        for _ in 0..4 {
            ahead.fetch::<1>();
        }
        // SAFETY: rows are of whole blocks, and so of whole bytes. Sixteen of them have 16 bytes each from column `k` on, and a scale for
        // each block.
        unsafe {
            let codes = self.four.codes().as_ptr().add(usize::midpoint(self.row * self.width, k));
            turn_bytes(codes, self.width / 2, &mut to.bytes);
            for (half, factor) in to.factors.iter_mut().enumerate() {
                let block = (k + half * LANES) >> shift;
                if block != self.block {
                    let mut scales = [0.0f32; LANES];
                    let first = ((self.row * self.width) >> shift) + block;
                    self.four.scales_of(first, self.width >> shift, &mut scales);
                    self.factor = S::load(scales.as_ptr());
                    self.block = block;
                }
                *factor = self.factor;
            }
        }
    }
    #[inline(always)]
    unsafe fn room() -> Self::Turned {
        // SAFETY: as the caller says.
        TurnedNibbles { bytes: TurnedBytes([0; 256]), factors: [unsafe { S::splat(0.0) }; 2] }
    }
    #[inline(always)]
    unsafe fn column(&self, turned: &Self::Turned, at: usize) -> S::V {
        // SAFETY: a column has 16 bytes.
        unsafe {
            let [high, low] = S::lookup_pairs(self.table, turned.bytes.0[at / 2 * LANES..][..LANES].as_ptr());
            S::mul(if at.is_multiple_of(2) { high } else { low }, turned.factors[at / LANES])
        }
    }
}

/// Rows of any quantized matrix: widened first, then turned.
#[derive(Clone, Copy)]
pub(super) struct Widened<'a> {
    pub(super) matrix: &'a Quantized,
    /// The first row, and the numbers of each.
    pub(super) row: usize,
    pub(super) width: usize,
    /// Lines of the matrix for eight columns of sixteen rows.
    pub(super) lines: usize,
}

/// Columns end to end.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct TurnedFloats([f32; WIDENED * LANES]);

impl<S: Simd> Source<S> for Widened<'_> {
    const COLUMNS: usize = WIDENED;
    type Turned = TurnedFloats;
    #[inline(always)]
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut TurnedFloats) {
        let mut rows = [MaybeUninit::<f32>::uninit(); LANES * WIDENED];
        let rows: *mut f32 = rows.as_mut_ptr().cast();
        // SAFETY: sixteen rows have these columns, each of which is written before it is read; a column has 16 places in `to`.
        unsafe {
            for row in 0..LANES {
                any_run::<S>(self.matrix, (self.row + row) * self.width + k, rows.add(row * WIDENED), WIDENED);
            }
            for first in (0..WIDENED).step_by(EIGHT) {
                if self.lines == 1 {
                    ahead.fetch::<1>();
                } else {
                    ahead.fetch::<2>();
                }
                let columns = S::turn_eight(rows.add(first).cast_const(), WIDENED);
                for (at, column) in columns.iter().enumerate() {
                    S::store(to.0[(first + at) * LANES..][..LANES].as_mut_ptr(), *column);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn room() -> TurnedFloats {
        TurnedFloats([0.0; WIDENED * LANES])
    }
    #[inline(always)]
    unsafe fn column(&self, turned: &TurnedFloats, at: usize) -> S::V {
        // SAFETY: a column has 16 floats.
        unsafe { S::load(turned.0[at * LANES..][..LANES].as_ptr()) }
    }
}

/// Hands up to 16 columns from `k` on of at most 16 rows to `sink`; other lanes get any numbers.
///
/// # Safety
/// The features of `S`; the matrix, whose columns are 1 apart, has the rows `row..row + rows` and these columns; `sink` may take them.
#[inline(always)]
pub(super) unsafe fn some<S: Simd>(
    matrix: &Matrix<'_>,
    [row, rows]: [usize; 2],
    [k, columns]: [usize; 2],
    sink: &mut impl Sink<S::V>,
) {
    let mut wide = [0.0f32; LANES * LANES];
    for (index, to) in wide.chunks_exact_mut(LANES).enumerate().take(rows) {
        let at = (row + index) * matrix.row + k;
        match matrix.data {
            Store::F32(values) => to[..columns].copy_from_slice(&values.cpu_slice()[at..at + columns]),
            Store::Bf16(values) => {
                for (to, value) in to.iter_mut().zip(&values.cpu_slice()[at..at + columns]) {
                    *to = value.to_bits().wide();
                }
            }
            // SAFETY: the row is one of the matrix, with these columns, of which `to` has room for 16.
            Store::Quantized(values) => unsafe { any_run::<S>(values, at, to.as_mut_ptr(), columns) },
            Store::Interleaved(values) => values.widen(at, &mut to[..columns]),
        }
    }
    for at in 0..columns {
        let mut column = [0.0f32; LANES];
        for (lane, row) in column.iter_mut().zip(wide.chunks_exact(LANES)) {
            *lane = row[at];
        }
        // SAFETY: as the caller says.
        unsafe { sink.take(k + at, S::load(column.as_ptr())) };
    }
}

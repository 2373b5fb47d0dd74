//! Reads sixteen rows of a matrix column by column, as products with few tokens need them: one vector holds a column's
//! numbers of all sixteen rows.
use crate::activation::LANES;
use crate::gemm::{Matrix, Store};
use crate::quant::{EIGHTH, Eight, Four, Quantized, any_run};
use crate::simd::{Number, Simd, TurnedBytes, prefetch_far, turn_bytes};
use std::mem::MaybeUninit;
use tunesmith_cpu_slice::CpuSlice as _;

/// Columns of float or bfloat16 rows that are transposed at once.
const EIGHT: usize = LANES / 2;
/// Columns of a [`Widened`] matrix that are dequantized at once.
const WIDENED: usize = 64;

/// What takes the columns of sixteen rows, one after the other.
pub(super) trait Sink<V: Copy>: Sized {
    /// Whether it adds columns up. Where numbers have scales apart, the columns of each scale are then summed on their
    /// own, by [`Sink::fresh`] and [`Sink::fold`].
    const SUMS: bool;
    /// Whether it is used for interleaved matrices only, so that no code is compiled for others.
    const ONLY_INTERLEAVED: bool = false;
    /// Takes column `k`.
    ///
    /// # Safety
    /// Whoever makes the sink says what it asks.
    unsafe fn take(&mut self, k: usize, column: V);
    /// A copy of this sink that has summed nothing yet.
    ///
    /// # Safety
    /// Whoever makes the sink says what it asks.
    unsafe fn fresh(&self) -> Self;
    /// Adds what `sums` has summed, multiplied by the rows' scales.
    ///
    /// # Safety
    /// Whoever makes the sink says what it asks.
    unsafe fn fold(&mut self, sums: Self, factor: V);
}

/// The sums of products with `TOKENS` tokens: for each token a vector of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct Sums<S: Simd, const TOKENS: usize, const APART: usize> {
    pub(super) sums: [S::V; TOKENS],
    /// The tokens' numbers for column 0. Those for the next column are `APART` floats further on.
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

/// Writes columns to memory, one vector after the other.
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

/// What to prefetch while other numbers are multiplied: stretches of memory that lie `step` bytes apart, each as long
/// as eight columns of sixteen rows. For an interleaved matrix it is what lies `step` bytes after the current numbers.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) next: *const u8,
    pub(super) step: usize,
}

impl Ahead {
    /// Prefetches the next `LINES` cache lines, and moves on by `step`.
    #[inline(always)]
    fn fetch<const LINES: usize>(&mut self) {
        for line in 0..LINES {
            prefetch_far(self.next.wrapping_add(64 * line).cast());
        }
        self.next = self.next.wrapping_add(self.step);
    }
}

/// Sixteen rows of a matrix in one storage format, transposed a few columns at a time.
pub(super) trait Source<S: Simd>: Copy {
    /// How many columns are transposed at once: a power of two from 8 to 64.
    const COLUMNS: usize;
    /// Room for that many columns, in a form of the source's own.
    type Turned: Copy;
    /// Transposes the columns from `k` on, and prefetches as many.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the rows have these columns; `k` is a multiple of `COLUMNS`.
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut Self::Turned);
    /// Fresh memory for [`Source::turn`] to write to.
    ///
    /// # Safety
    /// The CPU has the features of `S`.
    unsafe fn room() -> Self::Turned;
    /// Column `at` of those that were transposed last.
    ///
    /// # Safety
    /// The CPU has the features of `S`.
    unsafe fn column(&self, turned: &Self::Turned, at: usize) -> S::V;
}

/// Rows of float32 or bfloat16 numbers.
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

/// Rows of int8 or FP8 codes, with a scale for each row.
#[derive(Clone, Copy)]
pub(super) struct Bytes<V, const FP8: bool> {
    codes: *const u8,
    row: usize,
    factor: V,
}

impl<V: Copy, const FP8: bool> Bytes<V, FP8> {
    /// The sixteen rows of a matrix from `row` on.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the matrix has these rows.
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

/// Rows of 4-bit codes. Each row consists of whole blocks.
#[derive(Clone, Copy)]
pub(super) struct Nibbles<'a, V> {
    four: &'a Four,
    table: V,
    row: usize,
    width: usize,
    /// The number of the block within a row whose scales are in `factor`.
    block: usize,
    factor: V,
}

impl<'a, V: Copy> Nibbles<'a, V> {
    /// The sixteen rows of a matrix from `row` on, of `width` numbers each.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the matrix has these rows, of `width` numbers.
    #[inline(always)]
    pub(super) unsafe fn new<S: Simd<V = V>>(four: &'a Four, row: usize, width: usize) -> Self {
        // SAFETY: the table has sixteen numbers.
        let table = unsafe { S::load(four.table().as_ptr()) };
        Self { four, table, row, width, block: usize::MAX, factor: table }
    }
}

/// The codes of 32 columns, two in a byte, and the scales of each half.
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

/// Rows of any quantized matrix, for what has no source of its own: dequantized first, then transposed.
#[derive(Clone, Copy)]
pub(super) struct Widened<'a> {
    pub(super) matrix: &'a Quantized,
    /// The first row, and how many numbers a row has.
    pub(super) row: usize,
    pub(super) width: usize,
    /// How many cache lines of the matrix hold eight columns of sixteen rows.
    pub(super) lines: usize,
}

/// Columns in float32, one after the other.
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

/// Hands up to 16 columns from `k` on, of at most 16 rows, to `sink`. Lanes without a row get arbitrary numbers.
///
/// # Safety
/// The CPU has the features of `S`; the matrix, whose columns are 1 apart, has the rows `row..row + rows` and these columns; `sink` may take them.
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

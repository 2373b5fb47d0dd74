//! Reads columns of an interleaved matrix, in the order in which they lie in memory.
use super::columns::{Ahead, Source};
use crate::activation::LANES;
use crate::gemm::interleaved::{Interleaved, Numbers};
use crate::quant::{EIGHTH, Format};
use crate::simd::{Number, Simd, prefetch_far};

/// How many bytes ahead of the current ones a block of sixteen rows is prefetched. With less, memory has to be waited
/// for; with more, the last blocks prefetch more that nobody reads.
const AHEAD: usize = 2048;
/// The same in columns, for a block that is multiplied alone.
const ALONE: usize = 128;
/// How many blocks of a row ahead of the current ones the scales are prefetched.
const SCALES_AHEAD: usize = 8;
/// How many columns are read before prefetching goes on.
const COLUMNS: usize = 8;

/// Prefetches `BYTES` bytes that lie `ahead` bytes after `at`.
#[inline(always)]
fn fetch<const BYTES: usize>(at: *const u8, ahead: usize) {
    for line in (0..BYTES).step_by(64) {
        prefetch_far(at.wrapping_add(ahead + line).cast());
    }
}

/// The columns of sixteen interleaved rows. Where numbers have scales apart, these are the values of their codes,
/// before the scales.
pub(super) trait Columns<S: Simd>: Source<S> {
    /// Whether the format has scales apart.
    const SCALED: bool;
    /// Bytes of one column of sixteen rows.
    const BYTES: usize;
    /// How many bytes after column `k` the prefetched bytes lie. Beyond the end of the row, which has `width` columns,
    /// they belong to the row `groups` blocks later, because the blocks between are multiplied side by side. A block
    /// alone, with many tokens, prefetches further ahead.
    #[inline(always)]
    fn distance(k: usize, width: usize, groups: usize) -> usize {
        let ahead = if groups == 1 { AHEAD.max(ALONE * Self::BYTES) } else { AHEAD };
        if k + ahead / Self::BYTES < width { ahead } else { ahead + (groups - 1) * width * Self::BYTES }
    }
    /// The scales of sixteen rows at column `k`.
    ///
    /// # Safety
    /// The CPU has the features of `S`; the rows have this column.
    unsafe fn factor(&self, k: usize) -> S::V;
}

/// Sixteen rows in float32 or bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Plain<T>(*const T);

impl<S: Simd, T: Number> Source<S> for Plain<T> {
    const COLUMNS: usize = COLUMNS;
    type Turned = *const T;
    #[inline(always)]
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut *const T) {
        *to = self.0.wrapping_add(k * LANES);
        if size_of::<T>() == 4 {
            fetch::<{ 4 * COLUMNS * LANES }>(to.cast(), ahead.step);
        } else {
            fetch::<{ 2 * COLUMNS * LANES }>(to.cast(), ahead.step);
        }
    }
    #[inline(always)]
    unsafe fn room() -> *const T {
        std::ptr::null()
    }
    #[inline(always)]
    unsafe fn column(&self, turned: &*const T, at: usize) -> S::V {
        // SAFETY: a column has sixteen numbers.
        unsafe {
            let numbers = turned.add(at * LANES);
            if size_of::<T>() == 4 { S::load(numbers.cast()) } else { S::load_bf16(numbers.cast()) }
        }
    }
}

impl<S: Simd, T: Number> Columns<S> for Plain<T> {
    const SCALED: bool = false;
    const BYTES: usize = size_of::<T>() * LANES;
    #[inline(always)]
    unsafe fn factor(&self, _: usize) -> S::V {
        // SAFETY: as the caller says.
        unsafe { S::splat(1.0) }
    }
}

/// Sixteen rows in int8 or FP8.
#[derive(Clone, Copy)]
pub(super) struct Bytes<V, const FP8: bool> {
    codes: *const u8,
    factor: V,
}

impl<S: Simd, const FP8: bool> Source<S> for Bytes<S::V, FP8> {
    const COLUMNS: usize = COLUMNS;
    type Turned = *const u8;
    #[inline(always)]
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut *const u8) {
        *to = self.codes.wrapping_add(k * LANES);
        fetch::<{ COLUMNS * LANES }>(*to, ahead.step);
    }
    #[inline(always)]
    unsafe fn room() -> *const u8 {
        std::ptr::null()
    }
    #[inline(always)]
    unsafe fn column(&self, turned: &*const u8, at: usize) -> S::V {
        // SAFETY: a column has sixteen codes.
        unsafe {
            let codes = turned.add(at * LANES);
            if FP8 { S::load_e4m3(codes) } else { S::load_i8(codes) }
        }
    }
}

impl<S: Simd, const FP8: bool> Columns<S> for Bytes<S::V, FP8> {
    const SCALED: bool = true;
    const BYTES: usize = LANES;
    #[inline(always)]
    unsafe fn factor(&self, _: usize) -> S::V {
        self.factor
    }
}

/// The sources for `GROUPS` blocks of sixteen rows: `width` codes a row, with one scale for each row.
///
/// # Safety
/// The CPU has the features of `S`; the codes and scales are there.
#[inline(always)]
unsafe fn bytes<S: Simd, const FP8: bool, const GROUPS: usize>(
    codes: *const u8,
    scales: *const f32,
    width: usize,
) -> [Bytes<S::V, FP8>; GROUPS] {
    // SAFETY: as the caller says.
    unsafe {
        let mut all = [Bytes { codes, factor: S::splat(0.0) }; GROUPS];
        for (group, bytes) in all.iter_mut().enumerate() {
            let scales = S::load(scales.add(group * LANES));
            bytes.codes = codes.add(group * width * LANES);
            bytes.factor = if FP8 { scales } else { S::mul(scales, S::splat(EIGHTH)) };
        }
        all
    }
}

/// Sixteen rows of 4-bit codes.
#[derive(Clone, Copy)]
pub(super) struct Nibbles<V> {
    codes: *const u32,
    scales: *const f32,
    shift: u32,
    table: V,
    /// How many floats lie between the scales of a row and those of the next row.
    row: usize,
    /// How many floats lie from there to the scales of the row that is read after this one.
    beyond: usize,
}

impl<S: Simd> Source<S> for Nibbles<S::V> {
    const COLUMNS: usize = COLUMNS;
    type Turned = *const u32;
    #[inline(always)]
    unsafe fn turn(&mut self, k: usize, ahead: &mut Ahead, to: &mut *const u32) {
        *to = self.codes.wrapping_add(k / COLUMNS * LANES);
        fetch::<{ COLUMNS * LANES / 2 }>(to.cast(), ahead.step);
    }
    #[inline(always)]
    unsafe fn room() -> *const u32 {
        std::ptr::null()
    }
    #[inline(always)]
    unsafe fn column(&self, turned: &*const u32, at: usize) -> S::V {
        // SAFETY: eight columns have sixteen words.
        unsafe { S::lookup_words(self.table, *turned, at) }
    }
}

impl<S: Simd> Columns<S> for Nibbles<S::V> {
    const SCALED: bool = true;
    const BYTES: usize = LANES / 2;
    #[inline(always)]
    unsafe fn factor(&self, k: usize) -> S::V {
        let at = (k >> self.shift) * LANES;
        let next = at + SCALES_AHEAD * LANES;
        prefetch_far(self.scales.wrapping_add(if next < self.row { next } else { next + self.beyond }));
        let scales = self.scales.wrapping_add(at);
        // SAFETY: each block of a row has a scale.
        unsafe { S::load(scales) }
    }
}

/// What reads the columns of `GROUPS` blocks of sixteen rows, whatever their format.
pub(super) trait Reader<S: Simd, const GROUPS: usize> {
    /// # Safety
    /// The CPU has the features of `S`; the sources have the columns that the reader takes.
    unsafe fn read<R: Columns<S>>(self, sources: [R; GROUPS]);
}

/// Hands the columns of `GROUPS` blocks, from `block` on, to `reader`, in the format in which they are stored.
///
/// # Safety
/// The CPU has the features of `S`; the matrix has these blocks.
#[inline(always)]
pub(super) unsafe fn read<S: Simd, R: Reader<S, GROUPS>, const GROUPS: usize>(
    matrix: &Interleaved,
    block: usize,
    reader: R,
) {
    let width = matrix.width();
    let first = |group: usize| (block + group) * width * LANES;
    // SAFETY: as the caller says.
    unsafe {
        match &matrix.numbers {
            Numbers::F32(values) => reader.read(std::array::from_fn(|group| Plain(values.as_ptr().add(first(group))))),
            Numbers::Bf16(values) => {
                reader.read(std::array::from_fn(|group| Plain(values.as_ptr().cast::<u16>().add(first(group)))));
            }
            Numbers::Pairs(_) => unreachable!("multiplied in pairs"),
            Numbers::Eight { format, codes, scales } => {
                let (codes, scales) = (codes.as_ptr().add(first(0)), scales.as_ptr().add(block * LANES));
                if *format == Format::Fp8 {
                    reader.read(bytes::<S, true, GROUPS>(codes, scales, width));
                } else {
                    reader.read(bytes::<S, false, GROUPS>(codes, scales, width));
                }
            }
            Numbers::Four { codes, table, shift, scales } => {
                let table = S::load(table.as_ptr());
                let (codes, scales, row) = (codes.as_ptr(), scales.as_ptr(), (width >> shift) * LANES);
                let beyond = (GROUPS - 1) * row;
                let mut all = [Nibbles { codes, scales, shift: *shift, table, row, beyond }; GROUPS];
                for (group, nibbles) in all.iter_mut().enumerate() {
                    nibbles.codes = codes.add(first(group) / 8);
                    nibbles.scales = scales.add(first(group) >> shift);
                }
                reader.read(all);
            }
        }
    }
}

/// Writes columns one after the other, 16 floats each, without their scales.
struct Widen {
    /// The first column, and how many columns.
    columns: [usize; 2],
    to: *mut f32,
}

impl<S: Simd> Reader<S, 1> for Widen {
    #[inline(always)]
    unsafe fn read<R: Columns<S>>(self, [mut source]: [R; 1]) {
        let Self { columns: [first, count], to } = self;
        // SAFETY: the source has these columns, and `to` has room for them. What is fetched ahead may lie beyond the matrix: fetching
        // reads nothing.
        unsafe {
            let (mut turned, mut ahead) = (R::room(), Ahead { next: std::ptr::null(), step: AHEAD });
            let mut k = first;
            while k < first + count {
                let begin = k / R::COLUMNS * R::COLUMNS;
                let end = (begin + R::COLUMNS).min(first + count);
                source.turn(begin, &mut ahead, &mut turned);
                for at in k..end {
                    S::store(to.add((at - first) * LANES), source.column(&turned, at - begin));
                }
                k = end;
            }
        }
    }
}

/// Converts `count` columns of a block of sixteen rows, from `first` on, to float32, one after the other, without their
/// scales.
///
/// # Safety
/// The CPU has the features of `S`; the matrix has the block and these columns; `to` has room for 16 floats of each.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd>(matrix: &Interleaved, block: usize, columns: [usize; 2], to: *mut f32) {
    // SAFETY: as the caller says.
    unsafe { read::<S, _, 1>(matrix, block, Widen { columns, to }) };
}

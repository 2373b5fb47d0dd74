//! [`Interleaved`]: a weight rearranged for generation on the CPU, where products have no gradients. The numbers of
//! sixteen rows in each column lie side by side, so that a step of generation reads memory from beginning to end and
//! transposes nothing.
use super::Store;
use crate::activation::{LANES, Number};
use crate::fp8;
use crate::quant::{EIGHTH, Format, Quantized};
use crate::simd::pair_level;
use crate::upcoming::Follower;
use half::bf16;
use rayon::prelude::*;
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// A matrix `[rows, width]`, stored as `[block of 16 rows][column][16 rows]`. Missing rows of the last block are zero.
///
/// If the matrix is bfloat16 and products round their operands to it, two columns lie side by side,
/// `[block of 16 rows][pair of columns][16 rows][2]`, and an odd last column is paired with zeros. Products with such a
/// matrix are always computed in bfloat16 pairs, whatever the result's pool says.
///
/// 4-bit codes lie in words of eight columns, `[block of 16 rows][eight columns][16 rows]`, the first column in the
/// lowest bits.
///
/// Where numbers have scales apart, a product multiplies the values of the codes, sums over at most 256 columns with
/// one scale, and multiplies that sum by the scale. All products with an interleaved matrix do it in this way, so that
/// a text's answer depends on nothing but its text. A matrix that is not interleaved multiplies each number by its
/// scale first, so its results differ in the last bits.
#[derive(Debug)]
pub struct Interleaved {
    rows: usize,
    width: usize,
    pub(super) numbers: Numbers,
    follower: Arc<Follower>,
}

#[derive(Debug)]
pub(super) enum Numbers {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    /// Two columns in a word, the first in the low half.
    Pairs(Vec<u32>),
    Eight {
        format: Format,
        codes: Vec<u8>,
        /// One scale for each row.
        scales: Vec<f32>,
    },
    Four {
        codes: Vec<u32>,
        table: [f32; LANES],
        /// Each scale serves `1 << shift` numbers.
        shift: u32,
        /// `[block of 16 rows][block of a row][16 rows]`.
        scales: Vec<f32>,
    },
}

/// The most columns that are summed before the sum is multiplied by their scale; see [`Interleaved`].
pub(super) const FOLD: usize = 256;

/// Turns eight 4-bit codes, two in a byte with the first in the high half, into a word with the first code in the
/// lowest bits.
fn word(codes: [u8; 4]) -> u32 {
    u32::from_le_bytes(codes.map(|pair| pair.rotate_left(4)))
}

/// Rearranges `[rows][width]` to `[block of 16 rows][width][16 rows]`.
fn interleave<T: Copy + Default + Send + Sync>(from: &[T], width: usize) -> Vec<T> {
    let rows = from.len() / width;
    let mut to = vec![T::default(); rows.next_multiple_of(LANES) * width];
    to.par_chunks_exact_mut(LANES * width).zip(from.par_chunks(LANES * width)).for_each(|(to, from)| {
        for (lane, row) in from.chunks_exact(width).enumerate() {
            for (column, &value) in to.chunks_exact_mut(LANES).zip(row) {
                column[lane] = value;
            }
        }
    });
    to
}

/// Rearranges `[rows][width]` to `[block of 16 rows][pair of columns][16 rows]`.
fn interleave_pairs(from: &[bf16], width: usize) -> Vec<u32> {
    let (rows, pairs) = (from.len() / width, width.div_ceil(2));
    let mut to = vec![0; rows.next_multiple_of(LANES) * pairs];
    to.par_chunks_exact_mut(LANES * pairs).zip(from.par_chunks(LANES * width)).for_each(|(to, from)| {
        for (lane, row) in from.chunks_exact(width).enumerate() {
            for (column, pair) in to.chunks_exact_mut(LANES).zip(row.chunks(2)) {
                let high = pair.get(1).map_or(0, |high| u32::from(high.to_bits()));
                column[lane] = u32::from(pair[0].to_bits()) | high << 16;
            }
        }
    });
    to
}

impl Interleaved {
    /// Rearranges a matrix of rows of `width` numbers. Returns `None` if it has to stay as it is: on a GPU, in tiles,
    /// or in 4-bit blocks that cross the ends of rows. `products` is what products round their operands to
    /// ([`Pool::set_products`](crate::activation::Pool::set_products)).
    ///
    /// # Panics
    /// If `width` is 0 or does not divide the numbers of the matrix.
    pub fn new(matrix: Store<'_>, width: usize, products: Number) -> Option<Self> {
        assert!(width > 0 && matrix.len().is_multiple_of(width), "whole rows");
        if matrix.device() != Device::Cpu {
            return None;
        }
        let numbers = match matrix {
            Store::F32(values) => Numbers::F32(interleave(values.cpu_slice(), width)),
            Store::Bf16(values) if products == Number::Bf16 && pair_level().is_some() => {
                Numbers::Pairs(interleave_pairs(values.cpu_slice(), width))
            }
            Store::Bf16(values) => Numbers::Bf16(interleave(values.cpu_slice(), width)),
            Store::Quantized(Quantized::Eight(eight)) if eight.width() == width => {
                let mut scales = eight.scales().to_vec();
                scales.resize(scales.len().next_multiple_of(LANES), 0.0);
                Numbers::Eight { format: eight.format(), codes: interleave(eight.codes(), width), scales }
            }
            Store::Quantized(Quantized::Four(four)) if width.is_multiple_of(four.block()) => {
                let words: Vec<u32> = four.codes().as_chunks().0.iter().copied().map(word).collect();
                Numbers::Four {
                    codes: interleave(&words, width / 8),
                    table: *four.table(),
                    shift: four.block().trailing_zeros(),
                    scales: interleave(&four.scales().all(), width / four.block()),
                }
            }
            Store::Quantized(_) | Store::Interleaved(_) => return None,
        };
        Some(Self { rows: matrix.len() / width, width, numbers, follower: Arc::default() })
    }

    /// Numbers of a row.
    pub const fn width(&self) -> usize {
        self.width
    }

    /// How many numbers the matrix has, without padding.
    #[allow(clippy::len_without_is_empty)] // no matrix is empty
    pub const fn len(&self) -> usize {
        self.rows * self.width
    }

    /// Where the columns of a block lie from `column` on, 16 floats each; `None` unless the matrix is float32.
    pub(super) fn floats(&self, block: usize, column: usize) -> Option<*const f32> {
        let Numbers::F32(values) = &self.numbers else { return None };
        Some(values.as_ptr().wrapping_add((block * self.width + column) * LANES))
    }

    /// The words of a block, `[pair of columns][16 rows]`; `None` unless the matrix lies in pairs.
    pub(super) fn pairs(&self, block: usize) -> Option<*const f32> {
        let Numbers::Pairs(words) = &self.numbers else { return None };
        Some(words.as_ptr().wrapping_add(block * self.width.div_ceil(2) * LANES).cast())
    }

    /// Remembers which product followed the one that begins with this matrix, for prefetching.
    pub(super) const fn follower(&self) -> &Arc<Follower> {
        &self.follower
    }

    /// The address of its numbers or codes, and how many bytes they take.
    pub(super) fn stretch(&self) -> (usize, usize) {
        let (from, bytes) = match &self.numbers {
            Numbers::F32(values) => (values.as_ptr().addr(), size_of_val(&**values)),
            Numbers::Bf16(values) => (values.as_ptr().addr(), size_of_val(&**values)),
            Numbers::Pairs(words) => (words.as_ptr().addr(), size_of_val(&**words)),
            Numbers::Eight { codes, .. } => (codes.as_ptr().addr(), codes.len()),
            Numbers::Four { codes, .. } => (codes.as_ptr().addr(), size_of_val(&**codes)),
        };
        (from, bytes)
    }

    /// How many columns are summed before they are multiplied by their scale; `None` if numbers have no scales apart.
    pub(super) fn fold(&self) -> Option<usize> {
        match self.numbers {
            Numbers::F32(_) | Numbers::Bf16(_) | Numbers::Pairs(_) => None,
            Numbers::Eight { .. } => Some(FOLD),
            Numbers::Four { shift, .. } => Some(FOLD.min(1 << shift)),
        }
    }

    /// The scale of a row at a column, if there is a [`Self::fold`].
    pub(super) fn factor(&self, row: usize, column: usize) -> f32 {
        match &self.numbers {
            Numbers::F32(_) | Numbers::Bf16(_) | Numbers::Pairs(_) => 1.0,
            Numbers::Eight { format: Format::Fp8, scales, .. } => scales[row],
            Numbers::Eight { scales, .. } => scales[row] * EIGHTH,
            Numbers::Four { shift, scales, .. } => {
                scales[(row / LANES * (self.width >> shift) + (column >> shift)) * LANES + row % LANES]
            }
        }
    }

    /// The number at a row and a column.
    fn at(&self, row: usize, column: usize) -> f32 {
        let (block, lane) = (row / LANES, row % LANES);
        let place = |column: usize, width: usize| (block * width + column) * LANES + lane;
        match &self.numbers {
            Numbers::F32(values) => values[place(column, self.width)],
            Numbers::Bf16(values) => values[place(column, self.width)].to_f32(),
            Numbers::Pairs(words) => {
                let word = words[place(column / 2, self.width.div_ceil(2))];
                f32::from_bits(if column.is_multiple_of(2) { word << 16 } else { word & 0xFFFF_0000 })
            }
            Numbers::Eight { format: Format::Fp8, codes, scales } => {
                fp8::VALUES[usize::from(codes[place(column, self.width)])] * scales[row]
            }
            Numbers::Eight { codes, scales, .. } => {
                f32::from(codes[place(column, self.width)].cast_signed()) * scales[row] * EIGHTH
            }
            Numbers::Four { codes, table, shift, scales } => {
                let code = codes[place(column / 8, self.width / 8)] >> (column % 8 * 4) & 15;
                table[code as usize] * scales[place(column >> shift, self.width >> shift)]
            }
        }
    }

    /// Converts the numbers from index `start` on, in row-major order, to float32 in `out`.
    ///
    /// # Panics
    /// If the matrix has fewer.
    pub fn widen(&self, start: usize, out: &mut [f32]) {
        assert!(start.checked_add(out.len()).is_some_and(|end| end <= self.len()), "the numbers lie within the matrix");
        for (index, value) in (start..).zip(out) {
            *value = self.at(index / self.width, index % self.width);
        }
    }
}

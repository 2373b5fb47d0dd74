//! A matrix for products without gradients on the CPU: of each column, the numbers of sixteen rows lie side by side. A step of generation
//! then reads memory from end to end, and turns nothing.
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

/// A matrix `[rows, width]` as `[block of 16 rows][column][16 rows]`; missing rows of the last block are zero.
///
/// In bfloat16, where products round their operands to it, two columns lie side by side, `[block of 16 rows][pair of columns][16 rows][2]`, and
/// an odd last one is paired with zeros. Products with such a matrix are those of pairs, whatever the pool of the result says.
///
/// Codes of 4 bits lie in words of eight columns, `[block of 16 rows][eight columns][16 rows]`, the first in the lowest bits.
///
/// Where numbers have scales apart, a product multiplies the codes' values, sums them over at most 256 columns with one scale, and
/// multiplies the sum by it. All products do it alike, so that a text's answer depends on nothing but its text. A matrix that is not
/// interleaved multiplies each number by its scale first, and so differs in the last bits.
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
    /// Two columns a word, the first in the low half.
    Pairs(Vec<u32>),
    Eight {
        format: Format,
        codes: Vec<u8>,
        /// One a row.
        scales: Vec<f32>,
    },
    Four {
        codes: Vec<u32>,
        table: [f32; LANES],
        /// A scale is of `1 << shift` numbers.
        shift: u32,
        /// `[block of 16 rows][block of a row][16 rows]`.
        scales: Vec<f32>,
    },
}

/// The most columns whose products are summed before they are multiplied by their scale, as [`Interleaved`] says.
pub(super) const FOLD: usize = 256;

/// Eight codes of 4 bits, two a byte, the first in the high half, as a word with the first in the lowest bits.
fn word(codes: [u8; 4]) -> u32 {
    u32::from_le_bytes(codes.map(|pair| pair.rotate_left(4)))
}

/// `[rows][width]` as `[block of 16 rows][width][16 rows]`.
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

/// `[rows][width]` as `[block of 16 rows][pair of columns][16 rows]`.
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
    /// A matrix of rows of `width` numbers, rearranged; nothing where it stays as it is: on a GPU, in tiles, or in blocks of 4 bits that do not
    /// end with its rows. `products` is what products round their operands to ([`Pool::set_products`](crate::activation::Pool::set_products)).
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

    /// The number of values of the matrix.
    #[allow(clippy::len_without_is_empty)] // no matrix is empty
    pub const fn len(&self) -> usize {
        self.rows * self.width
    }

    /// Where the columns of a block from `column` on lie, 16 floats each, if the matrix is in float32.
    pub(super) fn floats(&self, block: usize, column: usize) -> Option<*const f32> {
        let Numbers::F32(values) = &self.numbers else { return None };
        Some(values.as_ptr().wrapping_add((block * self.width + column) * LANES))
    }

    /// The words of the block, `[pair of columns][16 rows]`, if it lies in pairs.
    pub(super) fn pairs(&self, block: usize) -> Option<*const f32> {
        let Numbers::Pairs(words) = &self.numbers else { return None };
        Some(words.as_ptr().wrapping_add(block * self.width.div_ceil(2) * LANES).cast())
    }

    /// What followed a product that begins with this matrix.
    pub(super) const fn follower(&self) -> &Arc<Follower> {
        &self.follower
    }

    /// Where its numbers or codes begin, and their bytes.
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

    /// The columns whose products are summed before they are multiplied by their scale; `None` where numbers have none.
    pub(super) fn fold(&self) -> Option<usize> {
        match self.numbers {
            Numbers::F32(_) | Numbers::Bf16(_) | Numbers::Pairs(_) => None,
            Numbers::Eight { .. } => Some(FOLD),
            Numbers::Four { shift, .. } => Some(FOLD.min(1 << shift)),
        }
    }

    /// What the sums of a row are multiplied by at a column, if there is a [`Self::fold`].
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

    /// The number of a row and a column.
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

    /// Writes the numbers from `start` on, as row-major ones are counted, to `out`.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn widen(&self, start: usize, out: &mut [f32]) {
        assert!(start.checked_add(out.len()).is_some_and(|end| end <= self.len()), "the numbers lie within the matrix");
        for (index, value) in (start..).zip(out) {
            *value = self.at(index / self.width, index % self.width);
        }
    }
}

//! The operands of matrix products: matrices in their storage formats, terms, and what a product is added to.
use super::interleaved::Interleaved;
use crate::activation::Activation;
use crate::floats::{Floats, FloatsMut};
use crate::quant::Quantized;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Device, Slice};

/// The numbers of a matrix, in the format in which they are stored.
#[derive(Debug, Clone, Copy)]
pub enum Store<'a> {
    /// float32.
    F32(Floats<'a>),
    /// bfloat16, converted tile by tile while it is multiplied.
    Bf16(Slice<'a, bf16>),
    /// Quantized to 4 or 8 bits a number, and dequantized tile by tile while it is multiplied.
    Quantized(&'a Quantized),
    /// Rearranged for products without gradients on the CPU; its rows have to be read as rows ([`Matrix::rows`]).
    Interleaved(&'a Interleaved),
}

impl<'a, V: Into<Floats<'a>>> From<V> for Store<'a> {
    fn from(values: V) -> Self {
        Self::F32(values.into())
    }
}

impl Store<'_> {
    /// The device that its numbers are on.
    pub fn device(self) -> Device {
        match self {
            Self::F32(values) => values.device(),
            Self::Bf16(values) => values.device(),
            Self::Quantized(matrix) => matrix.device(),
            Self::Interleaved(_) => Device::Cpu,
        }
    }

    /// How many numbers the matrix has.
    #[allow(clippy::len_without_is_empty)] // no matrix is empty
    pub fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Quantized(matrix) => matrix.len(),
            Self::Interleaved(matrix) => matrix.len(),
        }
    }

    /// The matrix without its first `start` numbers.
    ///
    /// # Panics
    /// If there are fewer, or the matrix is quantized or interleaved.
    #[must_use]
    pub fn after(self, start: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(values.slice(start..values.len())),
            Self::Bf16(values) => Self::Bf16(values.slice(start..values.len())),
            Self::Quantized(_) | Self::Interleaved(_) => panic!("a quantized or interleaved matrix is not cut"),
        }
    }

    /// Converts the numbers from index `start` on to float32 in `out`.
    pub fn widen(self, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(values) => values.slice(start..start + out.len()).read_into(out),
            Self::Bf16(values) => values.slice(start..start + out.len()).to_host().convert_to_f32_slice(out),
            Self::Quantized(matrix) => matrix.widen(start, out),
            Self::Interleaved(matrix) => matrix.widen(start, out),
        }
    }
}

/// A matrix `[rows, cols]` as a view of stored numbers with two strides.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    pub(super) data: Store<'a>,
    pub(super) row: usize,
    pub(super) col: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major `data: [rows, width]` as it is: element (m, k) is `data[m * width + k]`.
    pub fn rows(data: impl Into<Store<'a>>, width: usize) -> Self {
        Self { data: data.into(), row: width, col: 1 }
    }

    /// The interleaved matrix, if it is stored as one.
    pub(super) const fn interleaved(&self) -> Option<&'a Interleaved> {
        match self.data {
            Store::Interleaved(matrix) => Some(matrix),
            _ => None,
        }
    }

    /// Whether it is stored in bfloat16 pairs, so that products have to multiply it in pairs.
    pub(super) fn lies_in_pairs(&self) -> bool {
        self.interleaved().is_some_and(|matrix| matrix.pairs(0).is_some())
    }

    /// A view with any two strides: element (m, k) is `data[m * row + k * col]`.
    pub fn strided(data: impl Into<Store<'a>>, row: usize, col: usize) -> Self {
        Self { data: data.into(), row, col }
    }

    /// All of its numbers, if they are float32 and its rows of `width` numbers lie one after the other; else `None`.
    ///
    /// # Panics
    /// If they are not on the CPU.
    pub fn on_host(self, width: usize) -> Option<&'a [f32]> {
        match self.data {
            Store::F32(values) if [self.row, self.col] == [width, 1] => Some(values.cpu_slice()),
            _ => None,
        }
    }

    /// Row-major `data: [rows, width]` transposed: element (m, k) is `data[k * width + m]`.
    pub fn transposed(data: impl Into<Store<'a>>, width: usize) -> Self {
        Self { data: data.into(), row: 1, col: width }
    }
}

/// What a product is added to.
#[derive(Debug, Clone, Copy)]
pub enum Init<'a> {
    /// The result starts at zero.
    Zero,
    /// The result starts as a bias `[m]` for each token.
    Bias(Floats<'a>),
    /// The result is added to `out`.
    Out,
    /// The result is added to another activation of `out`'s shape, such as the residual stream.
    Add(&'a Activation),
}

/// One summand: `matrix [m, k]` times `x [tokens, k]`.
#[derive(Debug, Clone, Copy)]
pub struct Term<'a> {
    /// The matrix `[m, k]`, whose values are broadcast over tokens.
    pub matrix: Matrix<'a>,
    /// The activation `[tokens, k]`, whose tokens are vector lanes.
    pub x: &'a Activation,
}

/// One product of a group: `out[t, m] = init + sum over terms of sum_k matrix[m, k] x[t, k]`.
#[derive(Debug)]
pub struct Product<'a> {
    /// The result `[tokens, m]`.
    pub out: &'a mut Activation,
    /// What the terms are added to.
    pub init: Init<'a>,
    /// At least one; each matrix is `[m, k]`, with a `k` of its own.
    pub terms: &'a [Term<'a>],
}

/// Where [`outer`](super::outer) adds its result.
#[derive(Debug)]
pub enum Target<'a> {
    /// Row-major `[m, n]`.
    Rows(FloatsMut<'a>),
    /// Row-major `[n, m]`: the transposed result.
    Transposed(FloatsMut<'a>),
    /// Element (m, n) is `out[m * row + n * col]`: out, row, col.
    Strided(FloatsMut<'a>, usize, usize),
}

/// Whether `length` numbers hold a matrix `[rows, cols]` with strides `[row, col]`. No size is 0.
pub(super) fn holds([rows, cols]: [usize; 2], [row, col]: [usize; 2], length: usize) -> bool {
    let last = (rows - 1).checked_mul(row).zip((cols - 1).checked_mul(col));
    last.and_then(|(row, col)| row.checked_add(col)).is_some_and(|last| last < length)
}

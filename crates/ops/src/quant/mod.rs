//! Quantized weights: matrices with 4 or 8 bits per number, and their conversion to float32. NF4, FP4 and int8 are
//! stored byte for byte as bitsandbytes stores them.
//!
//! **4 bits: NF4 and FP4** (Dettmers et al., "QLoRA", 2023): the row-major matrix is one run of blocks. A number is
//! `table[code] * scale`; the scale of a block is its largest magnitude. A byte holds two codes, the first in the high
//! half. A block may begin in the middle of a row, and a row of odd length in the middle of a byte. With *double
//! quantization* a scale is itself a code, `map[code] * absmax + offset`, with one absmax for each 256 scales.
//!
//! **int8**: a number is `code * scale / 127`; the scale of a row is its largest magnitude.
//!
//! **FP8**: a number is `e4m3(code) * scale`; the scale of a row is its largest magnitude divided by 448. GPUs with
//! tensor cores for FP8 multiply the codes themselves. They can sum only along a matrix's rows, so on such a GPU a
//! matrix also has a copy of its transpose, quantized by its own rows.
//!
//! **MXFP4** (Open Compute Project, "Microscaling Formats", 2023): 4 bits, `e2m1(code) * 2^(scale - 127)` with a byte
//! of scale for each 32 numbers of a row. gpt-oss stores its experts in this format.
//!
//! **NVFP4** (NVIDIA): 4 bits, `e2m1(code) * scale` with a scale for each 16 numbers of a row: `e4m3(byte)` times a
//! number of the matrix, or divided by one. Nothing here quantizes to it.
//!
//! [`tiles`] has the other formats of checkpoints: FP8 with a scale for each tile, and integers in groups (GPTQ, AWQ,
//! compressed-tensors).
//!
//! [`encode`] quantizes, on the device of the numbers; [`Quantized::widen`] dequantizes a range. Codes, scales and
//! numbers have the same bits on every device.
mod cpu;
mod cuda;
pub mod encode;
mod form;
mod four;
pub mod map;
#[cfg(test)]
mod reference;
mod rule;
#[cfg(test)]
mod tests;
pub mod tiles;
#[cfg(test)]
pub(crate) mod tiles_tests;

pub(crate) use cpu::any_run;
pub(crate) use cuda::fp8_rows;
pub use form::{Form, Numbers, Stored};
pub use four::{BLOCKS, Four};
pub use tiles::Tiled;

use crate::activation::Number;
use crate::floats::FloatsMut;
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Array, Device, Slice, gpu};

/// A format of quantized numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    /// 4 bits whose 16 values are quantiles of a normal distribution.
    Nf4,
    /// 4 bits: a sign, two bits of exponent, one of mantissa.
    Fp4,
    /// 8-bit integers with a scale for each row.
    Int8,
    /// 8-bit floating point ([`fp8`](crate::fp8)) with a scale for each row.
    Fp8,
    /// 4-bit floating point ([`E2M1`]) with a power of two for each 32 numbers of a row: the Open Compute Project's MX
    /// format.
    Mxfp4,
    /// 8-bit floating point with a scale for each tile of that many rows and columns, as checkpoints store it
    /// ([`tiles`]).
    Fp8Tiles([u32; 2]),
    /// 4-bit integers with a scale for each group of a row: GPTQ, AWQ, compressed-tensors ([`tiles`]).
    Int4Groups,
    /// As [`Format::Int4Groups`], with 8-bit integers.
    Int8Groups,
    /// 4-bit floating point ([`E2M1`]) with an 8-bit scale for each 16 numbers of a row: NVIDIA's format.
    Nvfp4,
}

/// The values of the codes of MXFP4 and NVFP4: a sign, two bits of exponent, one of mantissa.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// How many numbers share a scale in MXFP4.
pub const MX_BLOCK: usize = 32;
/// How many numbers share a scale in NVFP4.
pub const NV_BLOCK: usize = 16;
/// The largest byte of scale in MXFP4 for which every code stands for a finite number.
const MX_LARGEST: u8 = 252;

/// 1 / 127, with the digits that bitsandbytes has.
pub(crate) const EIGHTH: f32 = 7.874_016e-3;

impl Format {
    /// The format's name in configurations and in `quant_type`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
            Self::Fp4 => "fp4",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Mxfp4 => "mxfp4",
            Self::Fp8Tiles(_) => "fp8_tiles",
            Self::Int4Groups => "int4_groups",
            Self::Int8Groups => "int8_groups",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// The format's name in messages, such as `8-bit integers in groups`.
    pub fn words(self) -> String {
        match self {
            Self::Fp8Tiles([rows, columns]) => format!("FP8 in blocks of {rows} x {columns}"),
            Self::Int4Groups => "4-bit integers in groups".to_owned(),
            Self::Int8Groups => "8-bit integers in groups".to_owned(),
            _ => self.name().to_owned(),
        }
    }

    /// Whether it is a format of checkpoints, which a run keeps as the files have it, and not one of bitsandbytes.
    pub const fn is_makers(self) -> bool {
        matches!(self, Self::Mxfp4 | Self::Fp8Tiles(_) | Self::Int4Groups | Self::Int8Groups | Self::Nvfp4)
    }

    /// How many codes a byte holds.
    const fn per_byte(self) -> usize {
        match self {
            Self::Nf4 | Self::Fp4 | Self::Mxfp4 | Self::Nvfp4 | Self::Int4Groups => 2,
            Self::Int8 | Self::Fp8 | Self::Fp8Tiles(_) | Self::Int8Groups => 1,
        }
    }
}

/// The scales of a [`Four`], one for each block.
#[derive(Debug, Clone)]
pub enum Scales {
    /// float32 scales.
    Plain(Stored<f32>),
    /// Scales that are quantized themselves: double quantization, or the scales of MXFP4 and NVFP4.
    Nested(Nested),
}

/// Scales of one byte each: scale i is `map[codes[i]] * absmax[i / block] + offset`.
#[derive(Debug, Clone)]
pub struct Nested {
    /// The code of each block's scale.
    pub codes: Stored<u8>,
    /// The value of each code, before its factor.
    pub map: Arc<[f32; 256]>,
    /// One factor for each `block` codes.
    pub absmax: Stored<f32>,
    /// How many codes share a factor.
    pub block: usize,
    /// Added to each scale: with double quantization, the mean of the scales.
    pub offset: f32,
}

impl Scales {
    /// The number of scales: one for each block of the matrix.
    #[allow(clippy::len_without_is_empty)] // no matrix is empty
    pub fn len(&self) -> usize {
        match self {
            Self::Plain(scales) => scales.len(),
            Self::Nested(nested) => nested.codes.len(),
        }
    }

    #[inline]
    fn look(&self) -> Look<'_> {
        match self {
            Self::Plain(scales) => Look::Plain(scales),
            Self::Nested(Nested { codes, map, absmax, block, offset }) => {
                Look::Nested(codes, map, absmax, *block, *offset)
            }
        }
    }

    /// All scales in float32, on the host.
    pub fn all(&self) -> Vec<f32> {
        self.wide().view().read()
    }

    /// All scales in float32, on their device.
    fn wide(&self) -> Stored<f32> {
        let nested = match self {
            Self::Plain(scales) => return scales.clone(),
            Self::Nested(nested) => nested,
        };
        let mut wide = Array::zeros(nested.codes.device(), nested.codes.len());
        match nested.codes.device() {
            Device::Cpu => cpu::scales(self.look(), wide.view_mut().cpu_slice()),
            Device::Cuda(_) => cuda::scales(nested, wide.view_mut()),
            Device::Meta => {}
        }
        wide.into()
    }

    fn to(&self, device: Device) -> Self {
        match self {
            Self::Plain(scales) => Self::Plain(scales.to(device)),
            Self::Nested(nested) => Self::Nested(Nested {
                codes: nested.codes.to(device),
                map: Arc::clone(&nested.map),
                absmax: nested.absmax.to(device),
                ..*nested
            }),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Plain(scales) => 4 * scales.len(),
            Self::Nested(nested) => nested.codes.len() + 4 * nested.absmax.len(),
        }
    }
}

/// [`Scales`] as plain slices, so that a loop need not look them up each time.
#[derive(Clone, Copy)]
enum Look<'a> {
    Plain(&'a [f32]),
    Nested(&'a [u8], &'a [f32; 256], &'a [f32], usize, f32),
}

impl Look<'_> {
    /// The scales of sixteen blocks: block `first`, and every `step`-th block after it.
    ///
    /// # Safety
    /// The matrix has these blocks.
    #[inline(always)]
    unsafe fn every(self, first: usize, step: usize, to: &mut [f32; 16]) {
        // SAFETY: the caller answers for the blocks. A nested scale has a code, and a factor for each `size` of them.
        unsafe {
            match self {
                Look::Plain(scales) => {
                    for (index, scale) in to.iter_mut().enumerate() {
                        *scale = *scales.get_unchecked(first + index * step);
                    }
                }
                Look::Nested(codes, map, absmax, size, offset) => {
                    // A shift, because a division would take longer than everything else here.
                    let shift = size.is_power_of_two().then(|| size.trailing_zeros());
                    for (index, scale) in to.iter_mut().enumerate() {
                        let block = first + index * step;
                        let factor = shift.map_or_else(|| block / size, |shift| block >> shift);
                        let code = usize::from(*codes.get_unchecked(block));
                        *scale = map[code] * *absmax.get_unchecked(factor) + offset;
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn at(self, block: usize) -> f32 {
        match self {
            Self::Plain(scales) => scales[block],
            Self::Nested(codes, map, absmax, size, offset) => {
                map[usize::from(codes[block])] * absmax[block / size] + offset
            }
        }
    }
}

/// A matrix of 8 bits a number with a scale for each row: int8 or FP8.
#[derive(Debug, Clone)]
pub struct Eight {
    format: Format,
    codes: Stored<u8>,
    scales: Stored<f32>,
    width: usize,
    /// What [`turned`] returned.
    turned: Option<Arc<Turned>>,
}

/// The transpose of a matrix in FP8, quantized by its own rows: `[width, rows]`.
#[derive(Debug)]
pub(crate) struct Turned {
    pub(crate) codes: Array<u8>,
    pub(crate) scales: Array<f32>,
}

/// The transpose of an FP8 matrix on a GPU that multiplies FP8; `None` for others.
fn turned(format: Format, codes: &Stored<u8>, scales: &Stored<f32>, width: usize) -> Option<Arc<Turned>> {
    match codes.device() {
        Device::Cuda(ordinal) if format == Format::Fp8 && gpu::multiplies_fp8(ordinal) => {
            Some(Arc::new(cuda::turned(codes.view(), scales.view(), width)))
        }
        Device::Cpu | Device::Cuda(_) | Device::Meta => None,
    }
}

impl Eight {
    /// An int8 matrix from its codes (signed numbers, as bytes) and the scale of each row, which is `width` numbers
    /// long.
    ///
    /// # Errors
    /// A text that says which part does not fit the others.
    pub fn new(codes: Vec<u8>, scales: Vec<f32>, width: usize) -> Result<Self, String> {
        Self::of(Format::Int8, codes.into(), scales.into(), width)
    }

    /// As [`Eight::new`], for parts on any device and either format.
    fn of(format: Format, codes: Stored<u8>, scales: Stored<f32>, width: usize) -> Result<Self, String> {
        if width == 0 || scales.is_empty() || scales.len().checked_mul(width) != Some(codes.len()) {
            return Err(format!("codes: {}, scales of rows of {width}: {}", codes.len(), scales.len()));
        }
        if !scales.view().to_host().iter().all(|scale| scale.is_finite()) {
            return Err("a scale that is NaN or infinite".into());
        }
        Ok(Self::assembled(format, codes, scales, width))
    }

    /// As [`Eight::of`], for parts that are known to fit each other.
    fn assembled(format: Format, codes: Stored<u8>, scales: Stored<f32>, width: usize) -> Self {
        let turned = turned(format, &codes, &scales, width);
        Self { format, codes, scales, width, turned }
    }

    /// How it is coded: int8 or FP8.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// Codes and scales of the rows, and those of the transpose; `None` unless the GPU multiplies them.
    pub(crate) fn products(&self) -> Option<(Slice<'_, u8>, Slice<'_, f32>, &Turned)> {
        let turned = self.turned.as_deref()?;
        Some((self.codes.view(), self.scales.view(), turned))
    }

    /// How many numbers a row has.
    pub(crate) const fn width(&self) -> usize {
        self.width
    }

    fn to(&self, device: Device) -> Self {
        Self::assembled(self.format, self.codes.to(device), self.scales.to(device), self.width)
    }

    /// The codes of a matrix on the CPU. Those of int8 are signed numbers, as bytes.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The scale of each row, for a matrix on the CPU. For int8 it is the row's largest magnitude.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }
}

/// A quantized matrix: its codes and its scales.
#[derive(Debug, Clone)]
pub enum Quantized {
    /// 4 bits a number, with a scale for each block.
    Four(Four),
    /// Int8 or FP8, with a scale for each row.
    Eight(Eight),
    /// A format of checkpoints with a scale for each tile.
    Tiled(Tiled),
}

impl Quantized {
    /// The format of the matrix.
    pub const fn format(&self) -> Format {
        match self {
            Self::Four(four) => four.format,
            Self::Eight(eight) => eight.format,
            Self::Tiled(tiled) => tiled.format,
        }
    }

    /// How many numbers the matrix has.
    #[allow(clippy::len_without_is_empty)] // no matrix is empty
    pub fn len(&self) -> usize {
        match self {
            Self::Four(four) => four.len,
            Self::Eight(eight) => eight.codes.len(),
            Self::Tiled(tiled) => tiled.len(),
        }
    }

    /// How many bytes of memory the matrix takes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Four(four) => four.codes.len() + four.scales.bytes(),
            Self::Eight(eight) => {
                let turned = eight.turned.as_ref().map_or(0, |turned| turned.codes.len() + 4 * turned.scales.len());
                eight.codes.len() + 4 * eight.scales.len() + turned
            }
            Self::Tiled(tiled) => tiled.bytes(),
        }
    }

    /// The device of its codes and scales.
    pub fn device(&self) -> Device {
        match self {
            Self::Four(four) => four.codes.device(),
            Self::Eight(eight) => eight.codes.device(),
            Self::Tiled(tiled) => tiled.codes.device(),
        }
    }

    /// The same matrix on `device`. What is there already is shared, not copied.
    #[must_use]
    pub fn to(&self, device: Device) -> Self {
        match self {
            Self::Four(four) => Self::Four(four.to(device)),
            Self::Eight(eight) => Self::Eight(eight.to(device)),
            Self::Tiled(tiled) => Self::Tiled(tiled.to(device)),
        }
    }

    /// Dequantizes the numbers from index `start` on to `out`, on the host.
    ///
    /// # Panics
    /// If the matrix has fewer.
    pub fn widen(&self, start: usize, out: &mut [f32]) {
        if self.device() == Device::Cpu {
            return self.widen_to(start, out.into());
        }
        let mut wide = Array::zeros(self.device(), out.len());
        self.widen_to(start, wide.view_mut());
        wide.view().read_into(out);
    }

    /// Dequantizes the numbers from index `start` on to `out`, which is on the matrix's device.
    ///
    /// # Panics
    /// If the matrix has fewer, or `out` is on another device.
    pub fn widen_to(&self, start: usize, out: FloatsMut<'_>) {
        let within = start.checked_add(out.len()).is_some_and(|end| end <= self.len());
        assert!(within, "the numbers lie within the matrix");
        assert_eq!(out.device(), self.device(), "numbers go where the matrix is");
        match self.device() {
            Device::Cpu => cpu::widen(self, start, out.cpu_slice()),
            Device::Cuda(_) => cuda::widen(self, start, out.len(), (out.address(), Number::F32)),
            Device::Meta => {}
        }
    }

    /// Dequantizes `count` numbers from index `start` on to an address in a GPU's memory, in the number type given with
    /// it. There has to be room for them.
    pub(crate) fn widen_as(&self, start: usize, count: usize, to: (u64, Number)) {
        let within = start.checked_add(count).is_some_and(|end| end <= self.len());
        assert!(within, "the numbers lie within the matrix");
        cuda::widen(self, start, count, to);
    }

    /// All numbers in float32, on the host.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.len()];
        self.widen(0, &mut out);
        out
    }

    /// The rows of `self` followed by those of `below`, which has the same width and device, as one matrix. `None` if
    /// they are quantized differently or `self` ends within a block.
    pub fn joined(&self, below: &Self) -> Option<Self> {
        match (self, below) {
            (Self::Four(above), Self::Four(below)) => above.joined(below).map(Self::Four),
            (Self::Eight(above), Self::Eight(below)) if (above.width, above.format) == (below.width, below.format) => {
                let (codes, scales) = (above.codes.joined(&below.codes), above.scales.joined(&below.scales));
                Some(Self::Eight(Eight::assembled(above.format, codes, scales, above.width)))
            }
            (Self::Tiled(above), Self::Tiled(below)) => above.joined(below).map(Self::Tiled),
            _ => None,
        }
    }
}

//! Coding a matrix, to the byte as bitsandbytes does it on a CPU with AVX2: on every device the same bytes.
use super::{Eight, Format, Four, Nested, Quantized, Scales, cpu, cuda, map};
use crate::floats::Floats;
use tunesmith_base::error::{Error, Result};
use tunesmith_device::{Array, Device};

/// Numbers that share a scale, unless a file says otherwise.
pub const BLOCK: usize = 64;
/// Scales that share a factor.
pub const NESTED_BLOCK: usize = 256;

/// The values of NF4 (Dettmers et al., 2023, appendix E).
#[allow(clippy::excessive_precision, reason = "as published")]
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_800_998_687_7,
    -0.525_073_051_452_636_7,
    -0.394_917_488_098_144_53,
    -0.284_441_381_692_886_35,
    -0.184_773_430_228_233_34,
    -0.091_050_036_251_544_95,
    0.0,
    0.079_580_299_556_255_34,
    0.160_930_201_411_247_25,
    0.246_112_301_945_686_34,
    0.337_915_241_718_292_24,
    0.440_709_829_330_444_34,
    0.562_617_003_917_694_1,
    0.722_956_836_223_602_3,
    1.0,
];

/// The values of FP4 by code.
pub const FP4: [f32; 16] = [
    0.0,
    0.0625 / 12.0,
    8.0 / 12.0,
    1.0,
    4.0 / 12.0,
    6.0 / 12.0,
    2.0 / 12.0,
    3.0 / 12.0,
    0.0,
    -0.0625 / 12.0,
    -8.0 / 12.0,
    -1.0,
    -4.0 / 12.0,
    -6.0 / 12.0,
    -2.0 / 12.0,
    -3.0 / 12.0,
];

/// The codes of FP4 by rising value. The two zeros stand for what is not above and what is above zero.
const FP4_ORDER: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];
const NF4_ORDER: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The values of a format of 4 bits.
pub const fn table(format: Format) -> &'static [f32; 16] {
    match format {
        Format::Fp4 => &FP4,
        Format::Nf4 | Format::Int8 => &NF4,
    }
}

/// What a number is held against, and which code follows.
pub(super) struct Rule {
    pub(super) bounds: [f32; 15],
    pub(super) order: [u8; 16],
}

impl Rule {
    fn new(format: Format) -> Self {
        let (table, order) = match format {
            Format::Fp4 => (FP4, FP4_ORDER),
            Format::Nf4 | Format::Int8 => (NF4, NF4_ORDER),
        };
        let sorted = order.map(|code| table[usize::from(code)]);
        Self { bounds: std::array::from_fn(|at| f32::midpoint(sorted[at], sorted[at + 1])), order }
    }

    /// The code of a number in -1..1: the lower one at a bound.
    pub(super) fn code(&self, value: f32) -> u8 {
        self.order[self.bounds.iter().filter(|&&bound| bound < value).count()]
    }
}

/// Codes `values` in 4 bits each, in blocks of `block`; `double` codes the scales too.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: a number is NaN or infinite, or the format or block does not exist.
pub fn four(values: &[f32], format: Format, block: usize, double: bool) -> Result<Four> {
    four_there(values.into(), format, block, double)
}

/// Codes rows of `width` numbers in 8 bits each, as `int8_vectorwise_quant` does it.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: a number is NaN or infinite, or `values` are no rows of that width.
pub fn eight(values: &[f32], width: usize) -> Result<Eight> {
    eight_there(values.into(), width)
}

/// Codes a matrix whose rows are `width` numbers long: in blocks of 64, or by rows for int8.
///
/// # Errors
/// As [`four`] and [`eight`].
pub fn quantize(values: &[f32], width: usize, format: Format, double: bool) -> Result<Quantized> {
    quantize_there(values.into(), width, format, double)
}

/// As [`quantize`], where the numbers are. The matrix stays there.
///
/// # Errors
/// As there.
pub fn quantize_there(values: Floats<'_>, width: usize, format: Format, double: bool) -> Result<Quantized> {
    match format {
        Format::Nf4 | Format::Fp4 => four_there(values, format, BLOCK, double).map(Quantized::Four),
        Format::Int8 => eight_there(values, width).map(Quantized::Eight),
    }
}

pub(super) fn four_there(values: Floats<'_>, format: Format, block: usize, double: bool) -> Result<Four> {
    if !super::BLOCKS.contains(&block) {
        return Err(Error::model(format!("blocks of {block} numbers, expected one of {:?}", super::BLOCKS)));
    }
    let (rule, len, device) = (Rule::new(format), values.len(), values.device());
    let (mut codes, mut scales) = (Array::zeros(device, len.div_ceil(2)), Array::zeros(device, len.div_ceil(block)));
    let (codes_to, scales_to) = (codes.view_mut(), scales.view_mut());
    let finite = match device {
        Device::Cpu => cpu::four(&rule, values.cpu_slice(), block, codes_to.cpu_slice(), scales_to.cpu_slice()),
        Device::Cuda(_) => cuda::four(&rule, values, block, codes_to, scales_to),
        Device::Meta => true,
    };
    if !finite {
        return Err(odd());
    }
    let scales = if double { Scales::Nested(nested(&scales)) } else { Scales::Plain(scales.into()) };
    Four::of(format, codes.into(), len, block, *table(format), scales).map_err(Error::model)
}

fn odd() -> Error {
    Error::model("has a number that is NaN or infinite, which cannot be quantized")
}

/// Codes scales in a byte each.
fn nested(scales: &Array<f32>) -> Nested {
    let (device, len) = (scales.device(), scales.len());
    let (mut codes, mut absmax) = (Array::zeros(device, len), Array::zeros(device, len.div_ceil(NESTED_BLOCK)));
    let (values, codes_to, absmax_to) = (scales.view(), codes.view_mut(), absmax.view_mut());
    let mean = |sum: f32| sum / len as f32;
    let offset = match device {
        Device::Cpu => {
            let offset = mean(cpu::torch_sum(values.cpu_slice()));
            cpu::nested(values.cpu_slice(), offset, codes_to.cpu_slice(), absmax_to.cpu_slice());
            offset
        }
        Device::Cuda(_) => {
            let offset = mean(cuda::torch_sum(values));
            cuda::nested(values, offset, codes_to, absmax_to);
            offset
        }
        Device::Meta => 0.0,
    };
    Nested { codes: codes.into(), map: map::signed(), absmax: absmax.into(), block: NESTED_BLOCK, offset }
}

fn eight_there(values: Floats<'_>, width: usize) -> Result<Eight> {
    let (len, device, line) = (values.len(), values.device(), width.max(1));
    let (mut codes, mut scales) = (Array::zeros(device, len), Array::zeros(device, len.div_ceil(line)));
    let (codes_to, scales_to) = (codes.view_mut(), scales.view_mut());
    let finite = match device {
        Device::Cpu => cpu::eight(values.cpu_slice(), line, codes_to.cpu_slice(), scales_to.cpu_slice()),
        Device::Cuda(_) => cuda::eight(values, line, codes_to, scales_to),
        Device::Meta => true,
    };
    if !finite {
        return Err(odd());
    }
    Eight::of(codes.into(), scales.into(), width).map_err(Error::model)
}

//! Quantizes matrices. NF4, FP4 and int8 have the bytes that bitsandbytes makes on a CPU with AVX2. Every device makes
//! the same bytes.
use super::rule::Rule;
use super::tiles::{TileForm, Tiled};
use super::{E2M1, Eight, Format, Four, MX_BLOCK, Nested, Quantized, Scales, cpu, cuda, map};
use crate::floats::Floats;
use tunesmith_base::error::{Error, Result};
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Array, Device};

pub use super::rule::{BLOCK, FP4, NESTED_BLOCK, NF4, table};

/// Quantizes `values` to 4 bits each, NF4 or FP4, in blocks of `block` numbers. With `double`, the scales are quantized
/// too.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: a number is NaN or infinite, or the format or blocks of that size do not exist.
pub fn four(values: &[f32], format: Format, block: usize, double: bool) -> Result<Four> {
    four_there(values.into(), format, block, double)
}

/// Quantizes rows of `width` numbers to int8, as bitsandbytes' `int8_vectorwise_quant` does it.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: a number is NaN or infinite, or `values` are not rows of that width.
pub fn eight(values: &[f32], width: usize) -> Result<Eight> {
    eight_there(values.into(), Format::Int8, width)
}

/// Quantizes a matrix whose rows are `width` numbers long: to NF4 or FP4 in blocks of 64, to int8 or FP8 by rows, to
/// FP8 by tiles, or to MXFP4 in blocks of 32. `double` quantizes the scales of NF4 and FP4 too.
///
/// # Errors
/// As [`four`] and [`eight`]; or nothing here quantizes to the format (integers in groups, NVFP4).
pub fn quantize(values: &[f32], width: usize, format: Format, double: bool) -> Result<Quantized> {
    quantize_there(values.into(), width, format, double)
}

/// As [`quantize`], for numbers on any device. The quantized matrix stays on that device.
///
/// # Errors
/// As [`quantize`].
pub fn quantize_there(values: Floats<'_>, width: usize, format: Format, double: bool) -> Result<Quantized> {
    match format {
        Format::Nf4 | Format::Fp4 => four_there(values, format, BLOCK, double).map(Quantized::Four),
        Format::Int8 | Format::Fp8 => eight_there(values, format, width).map(Quantized::Eight),
        Format::Mxfp4 => mxfp4(values, width).map(Quantized::Four),
        Format::Fp8Tiles(tile) => fp8_tiles(values, width, tile).map(Quantized::Tiled),
        Format::Int4Groups | Format::Int8Groups | Format::Nvfp4 => {
            Err(Error::model(format!("not yet: numbers cannot be coded in {}", format.words()))
                .hint("use the unquantized model, or set model.quantization: nf4 or none"))
        }
    }
}

/// Quantizes a matrix to FP8 with a scale for each tile, on the host.
fn fp8_tiles(values: Floats<'_>, width: usize, tile: [u32; 2]) -> Result<Tiled> {
    let (device, tile) = (values.device(), tile.map(|size| size as usize));
    if device.only_counts() {
        let form = TileForm { format: Format::Fp8Tiles([0, 0]), tile, zeros: false, grouped: false };
        return Ok(Tiled::counted(form, [values.len() / width.max(1), width], device));
    }
    Tiled::coded_fp8(&values.read(), width, tile, |scale| scale).map(|tiled| tiled.to(device)).map_err(Error::model)
}

/// Quantizes a matrix to MXFP4, on the host. As the format's specification says, the scale of 32 numbers is the power
/// of two that brings their largest magnitude below 8.
fn mxfp4(values: Floats<'_>, width: usize) -> Result<Four> {
    if !width.is_multiple_of(MX_BLOCK) {
        return Err(Error::model(format!("rows of {width} numbers, expected a multiple of {MX_BLOCK} for mxfp4")));
    }
    let device = values.device();
    if device.only_counts() {
        return Ok(Four::counted(Format::Mxfp4, values.len(), device));
    }
    let host = values.read();
    let (mut codes, mut scales) = (Vec::with_capacity(host.len() / 2), Vec::with_capacity(host.len() / MX_BLOCK));
    for block in host.chunks_exact(MX_BLOCK) {
        let largest = block.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        if !block.iter().all(|value| value.is_finite()) {
            return Err(odd());
        }
        // The largest code is 6, whose exponent is 2.
        let exponent = if largest == 0.0 { -127 } else { largest.log2().floor() as i32 - 2 };
        let exponent = exponent.clamp(-127, 125);
        let scale = 2.0f32.powi(exponent);
        codes.extend(block.chunks_exact(2).map(|pair| e2m1(pair[0] / scale) | e2m1(pair[1] / scale) << 4));
        scales.push((exponent + 127) as u8);
    }
    Four::mxfp4(codes, scales).map(|four| four.to(device)).map_err(Error::model)
}

/// The code of the nearest value; of two equally near values, the one whose mantissa is even.
fn e2m1(value: f32) -> u8 {
    let size = value.abs();
    let above = |code: &usize| {
        let bound = f32::midpoint(E2M1[*code], E2M1[code + 1]);
        size > bound || (size == bound && code % 2 == 1)
    };
    let code = (0..7).take_while(above).count() as u8;
    if value < 0.0 { code | 8 } else { code }
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

/// Double quantization: quantizes scales to one byte each.
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

fn eight_there(values: Floats<'_>, format: Format, width: usize) -> Result<Eight> {
    let (len, device, line) = (values.len(), values.device(), width.max(1));
    let (mut codes, mut scales) = (Array::zeros(device, len), Array::zeros(device, len.div_ceil(line)));
    let (codes_to, scales_to) = (codes.view_mut(), scales.view_mut());
    let finite = match device {
        Device::Cpu => {
            let code = if format == Format::Fp8 { cpu::fp8 } else { cpu::eight };
            code(values.cpu_slice(), line, codes_to.cpu_slice(), scales_to.cpu_slice())
        }
        Device::Cuda(_) => cuda::eight(format, values, line, codes_to, scales_to),
        Device::Meta => true,
    };
    if !finite {
        return Err(odd());
    }
    Eight::of(format, codes.into(), scales.into(), width).map_err(Error::model)
}

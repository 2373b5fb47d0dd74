//! Quantizes and dequantizes matrices on a GPU.
use super::rule::{NESTED_BLOCK, Rule};
use super::tiles::Zeros;
use super::{Format, Four, Nested, Quantized, Scales, Turned, map};
use crate::activation::{Activation, Number};
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};
use tunesmith_device::{Array, Slice, SliceMut};

static KERNELS: Source = Source::new("quant", include_str!("quant.cu"));

/// How many numbers one thread dequantizes.
const PER_THREAD: usize = 4;
/// Warps of a block.
const WARPS: usize = 8;
/// How many accumulators [`torch_sum`] has, each in its own lane.
const LANES: usize = 32;

/// As [`super::cpu::widen`], for `count` numbers that are written to an address, and rounded if their type there has 16
/// bits. The caller has checked that `start` and `count` lie within the matrix.
pub(super) fn widen(matrix: &Quantized, start: usize, count: usize, (out, number): (u64, Number)) {
    let grid = Grid::items(count.div_ceil(PER_THREAD));
    let [start, count] = [start, count].map(Arg::count);
    let (kernel, args) = match matrix {
        Quantized::Four(four) => {
            let [table, scales, nested, map, size, offset] = meanings(four);
            let (codes, shift) = (four.codes.view().into(), four.shift.into());
            let kernel = match number {
                Number::F32 => "quant_widen_four_float",
                Number::F16 => "quant_widen_four_f16",
                Number::Bf16 => "quant_widen_four_bf16",
            };
            (kernel, vec![codes, table, scales, nested, map, size, offset, shift, start, count, Arg::address(out)])
        }
        Quantized::Eight(eight) => {
            let (codes, scales, width) = (eight.codes.view().into(), eight.scales.view().into(), eight.width);
            let fp8 = eight.format == Format::Fp8;
            let kernel = match number {
                Number::F32 => "quant_widen_eight_float",
                Number::F16 => "quant_widen_eight_f16",
                Number::Bf16 => "quant_widen_eight_bf16",
            };
            (kernel, vec![codes, scales, Arg::count(width), fp8.into(), start, count, Arg::address(out)])
        }
        Quantized::Tiled(tiled) => {
            let kernel = match number {
                Number::F32 => "quant_widen_tiles_float",
                Number::F16 => "quant_widen_tiles_f16",
                Number::Bf16 => "quant_widen_tiles_bf16",
            };
            let (zeros, zero) = match &tiled.zeros {
                Zeros::All(zero) => (Arg::NULL, f32::from(*zero)),
                Zeros::Each(zeros) => (zeros.view().into(), 0.0),
            };
            let groups = tiled.groups.as_ref().map_or(Arg::NULL, |groups| groups.view().into());
            let kind = match tiled.format {
                Format::Fp8Tiles(_) => 0u32,
                Format::Int8Groups => 1,
                _ => 2,
            };
            let (codes, scales) = (tiled.codes.view().into(), tiled.scales.view().into());
            let [width, high, wide, across] = [tiled.width, tiled.tile[0], tiled.tile[1], tiled.across].map(Arg::count);
            let (zero, kind, to) = (zero.into(), kind.into(), Arg::address(out));
            (kernel, vec![codes, scales, zeros, zero, groups, width, high, wide, across, kind, start, count, to])
        }
    };
    cuda::launch(matrix.device(), &KERNELS, kernel, grid, &args);
}

/// The kernel arguments that say what codes mean: the table, and the scales; for nested scales their factors with their
/// codes, map, block and offset.
fn meanings(four: &Four) -> [Arg; 6] {
    let lookup = four.lookup.as_ref().expect("a matrix on a GPU has its tables there");
    let table = lookup.slice(0..16).into();
    match &four.scales {
        Scales::Plain(scales) => [table, scales.view().into(), Arg::NULL, Arg::NULL, Arg::count(1), 0.0f32.into()],
        Scales::Nested(nested) => {
            let map = lookup.slice(16..lookup.len()).into();
            let (absmax, codes) = (nested.absmax.view().into(), nested.codes.view().into());
            [table, absmax, codes, map, Arg::count(nested.block), nested.offset.into()]
        }
    }
}

/// Writes the scale of every block to `out`, in float32.
pub(super) fn scales(nested: &Nested, out: FloatsMut<'_>) {
    let (device, count) = (out.device(), out.len());
    let map = cuda::upload(device, &nested.map[..]);
    let (absmax, codes) = (nested.absmax.view().into(), nested.codes.view().into());
    let [size, len] = [nested.block, count].map(Arg::count);
    let args = [absmax, codes, (&map).into(), size, nested.offset.into(), len, out.into()];
    cuda::launch(device, &KERNELS, "quant_scales", Grid::items(count), &args);
}

/// As [`super::cpu::four`], on a GPU.
pub(super) fn four(
    rule: &Rule,
    values: Floats<'_>,
    block: usize,
    codes: SliceMut<'_, u8>,
    scales: FloatsMut<'_>,
) -> bool {
    let (device, blocks) = (values.device(), scales.len());
    let (bounds, order) = (cuda::upload(device, &rule.bounds), cuda::upload(device, &rule.order));
    let mut odd = Array::<u32>::zeros(device, 1);
    let [len, block] = [values.len(), block].map(Arg::count);
    let (bounds, order, seen) = ((&bounds).into(), (&order).into(), (&mut odd).into());
    let args = [values.into(), len, block, bounds, order, codes.into(), scales.into(), seen];
    cuda::launch(device, &KERNELS, "quant_code_four", Grid::blocks(blocks.div_ceil(WARPS)), &args);
    odd.read() == [0]
}

/// As [`super::cpu::torch_sum`], with the same bits, because it adds up the same parts in the same order.
pub(super) fn torch_sum(values: Floats<'_>) -> f32 {
    const LEVELS: usize = 4;
    let (device, len) = (values.device(), values.len());
    let size = len / LANES;
    let power = (size.max(1).next_power_of_two().trailing_zeros() as usize / LEVELS).max(4);
    let chunks = size >> power;
    let mut parts = Array::<f32>::zeros(device, chunks * LANES);
    let args = [values.into(), Arg::count(1 << power), Arg::count(chunks), (&mut parts).into()];
    cuda::launch(device, &KERNELS, "quant_sum_chunks", Grid::blocks(chunks.div_ceil(WARPS)), &args);
    let mut sum = Array::<f32>::zeros(device, 1);
    let args = [values.into(), Arg::count(len), (&parts).into(), (power as u32).into(), (&mut sum).into()];
    cuda::launch(device, &KERNELS, "quant_sum", Grid::blocks(1).threads(LANES as u32), &args);
    sum.read()[0]
}

/// As [`super::cpu::nested`], on a GPU.
pub(super) fn nested(scales: Floats<'_>, offset: f32, codes: SliceMut<'_, u8>, absmax: FloatsMut<'_>) {
    let (device, count, blocks) = (scales.device(), scales.len(), absmax.len());
    let bounds = cuda::upload(device, &map::bounds());
    let args = [scales.into(), Arg::count(count), offset.into(), (&bounds).into(), codes.into(), absmax.into()];
    cuda::launch(device, &KERNELS, "quant_code_scales", Grid::blocks(blocks).threads(NESTED_BLOCK as u32), &args);
}

/// As [`super::cpu::eight`] or [`super::cpu::fp8`], on a GPU.
pub(super) fn eight(
    format: Format,
    values: Floats<'_>,
    width: usize,
    codes: SliceMut<'_, u8>,
    scales: FloatsMut<'_>,
) -> bool {
    let (device, len, rows) = (values.device(), values.len(), scales.len());
    let mut odd = Array::<u32>::zeros(device, 1);
    let kernel = if format == Format::Fp8 { "quant_code_fp8_float" } else { "quant_code_eight" };
    let [len, line] = [len, width].map(Arg::count);
    let args = [values.into(), len, line, codes.into(), scales.into(), (&mut odd).into()];
    cuda::launch(device, &KERNELS, kernel, Grid::rows(rows, width), &args);
    odd.read() == [0]
}

/// Quantizes an activation `[tokens, features]` to FP8 with one scale for each token. Returns codes and scales.
pub(crate) fn fp8_rows(x: &Activation) -> (Array<u8>, Array<f32>) {
    let (device, tokens, features) = (x.device(), x.tokens(), x.features());
    let (mut codes, mut scales) = (Array::<u8>::zeros(device, tokens * features), Array::<f32>::zeros(device, tokens));
    let kernel = match x.number() {
        Number::F32 => "quant_code_fp8_float",
        Number::F16 => "quant_code_fp8_f16",
        Number::Bf16 => "quant_code_fp8_bf16",
    };
    let [len, line] = [tokens * features, features].map(Arg::count);
    // A number that is not finite gets the code of NaN, and so is NaN when it is dequantized.
    let args = [x.into(), len, line, (&mut codes).into(), (&mut scales).into(), Arg::NULL];
    cuda::launch(device, &KERNELS, kernel, Grid::rows(tokens, features), &args);
    (codes, scales)
}

/// The transpose of a matrix in FP8, quantized again by its own rows.
pub(super) fn turned(codes: Slice<'_, u8>, scales: Slice<'_, f32>, width: usize) -> Turned {
    let (device, rows) = (codes.device(), scales.len());
    let mut to = Turned { codes: Array::zeros(device, codes.len()), scales: Array::zeros(device, width) };
    let args = [
        codes.into(),
        scales.into(),
        Arg::count(rows),
        Arg::count(width),
        (&mut to.codes).into(),
        (&mut to.scales).into(),
    ];
    cuda::launch(device, &KERNELS, "quant_turn_fp8", Grid::columns(width), &args);
    to
}

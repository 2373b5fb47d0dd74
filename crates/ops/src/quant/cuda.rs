//! Quantized matrices in a GPU's memory.
use super::{Four, Quantized, Scales};
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::FloatsMut;
use tunesmith_device::{Array, Device};

static KERNELS: Source = Source::new("quant", include_str!("quant.cu"));

/// What [`Four`]'s codes mean, and those of its scales: 16 numbers and 256.
pub(super) fn lookup(four: &Four, device: Device) -> Array<f32> {
    let map = match &four.scales {
        Scales::Plain(_) => &[][..],
        Scales::Nested(nested) => &nested.map[..],
    };
    cuda::upload(device, &[&four.table[..], map].concat())
}

/// Writes the numbers from `start` on to `out`, which lies on the matrix's GPU.
pub(super) fn widen(matrix: &Quantized, start: usize, out: FloatsMut<'_>) {
    let (device, count) = (out.device(), out.len());
    let grid = Grid::items(count);
    match matrix {
        Quantized::Four(four) => {
            let (scales, nested, outer, offset) = match &four.scales {
                Scales::Plain(scales) => (scales, Arg::NULL, 1, 0.0),
                Scales::Nested(it) => (&it.absmax, it.codes.numbers().into(), it.block, it.offset),
            };
            let args = [
                four.codes.numbers().into(),
                scales.numbers().into(),
                nested,
                four.lookup.as_deref().expect("a matrix on a GPU has its tables there").into(),
                four.shift.into(),
                Arg::count(outer),
                offset.into(),
                Arg::count(start),
                out.into(),
                Arg::count(count),
            ];
            cuda::launch(device, &KERNELS, "quant_widen_four", grid, &args);
        }
        Quantized::Eight(eight) => {
            let args = [
                eight.codes.numbers().into(),
                eight.scales.numbers().into(),
                Arg::count(eight.width),
                Arg::count(start),
                out.into(),
                Arg::count(count),
            ];
            cuda::launch(device, &KERNELS, "quant_widen_eight", grid, &args);
        }
    }
}

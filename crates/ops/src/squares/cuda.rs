//! The sum on a GPU, and the verdict on a step's gradients.
use super::Limits;
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::Floats;
use half::bf16;
use tunesmith_device::{Array, Element, Slice};

static KERNELS: Source = Source::new("squares", include_str!("squares.cu"));

/// How many numbers one block sums.
const SPAN: usize = 16_384;

pub(super) fn sum(x: Floats<'_>) -> f64 {
    of(x, "squares_sum")
}

/// The sum for bfloat16 numbers, which are converted as they are read, without a copy.
pub(crate) fn sum_bf16(x: Slice<'_, bf16>) -> f64 {
    of(x, "squares_sum_bf16")
}

/// The sum of all blocks' sums, added in the order of the blocks on the host.
fn of<T: Element>(x: Slice<'_, T>, kernel: &'static str) -> f64 {
    parts(x, kernel).read().iter().sum()
}

/// The sum of each block, on the GPU.
pub(super) fn parts<T: Element>(x: Slice<'_, T>, kernel: &'static str) -> Array<f64> {
    let blocks = x.len().div_ceil(SPAN);
    let sums = Array::<f64>::zeros(x.device(), blocks);
    let args = [x.into(), (&sums).into(), Arg::count(x.len())];
    cuda::launch(x.device(), &KERNELS, kernel, Grid::rows(blocks, x.len()), &args);
    sums
}

/// As [`super::verdict`], from the sums of blocks. Returns the factor; and the norm with both totals.
pub(super) fn verdict(sums: &Array<f64>, limits: Limits<'_>) -> (Array<f32>, Array<f64>) {
    let device = sums.device();
    let (mut factor, mut found) = (Array::<f32>::zeros(device, 1), Array::<f64>::zeros(device, 3));
    let Limits { totals, other, most, scale } = limits;
    let args = [
        sums.into(),
        Arg::count(sums.len()),
        totals.into(),
        other.into(),
        most.into(),
        scale.into(),
        (&mut factor).into(),
        (&mut found).into(),
    ];
    cuda::launch(device, &KERNELS, "squares_verdict", Grid::blocks(1), &args);
    (factor, found)
}

//! Sums of squares in a GPU's memory.
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::Floats;
use half::bf16;
use tunesmith_device::{Array, Element, Slice};

static KERNELS: Source = Source::new("squares", include_str!("squares.cu"));

/// Numbers that one block sums.
const SPAN: usize = 16_384;

pub(super) fn sum(x: Floats<'_>) -> f64 {
    of(x, "squares_sum")
}

/// Of numbers in bfloat16, which are widened as they are read: no copy of them is made.
pub(crate) fn sum_bf16(x: Slice<'_, bf16>) -> f64 {
    of(x, "squares_sum_bf16")
}

/// The sums of the blocks, added in their order.
fn of<T: Element>(x: Slice<'_, T>, kernel: &'static str) -> f64 {
    let blocks = x.len().div_ceil(SPAN);
    let sums = Array::<f64>::zeros(x.device(), blocks);
    let args = [x.into(), (&sums).into(), Arg::count(x.len())];
    cuda::launch(x.device(), &KERNELS, kernel, Grid::rows(blocks, x.len()), &args);
    sums.read().iter().sum()
}

//! Sums of squares in a GPU's memory.
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::Floats;
use tunesmith_device::Array;

static KERNELS: Source = Source::new("squares", include_str!("squares.cu"));

/// Numbers that one block sums.
const SPAN: usize = 16_384;

pub(super) fn sum(x: Floats<'_>) -> f64 {
    let blocks = x.len().div_ceil(SPAN);
    let sums = Array::<f64>::zeros(x.device(), blocks);
    let args = [x.into(), (&sums).into(), Arg::count(x.len())];
    cuda::launch(x.device(), &KERNELS, "squares_sum", Grid::rows(blocks, x.len()), &args);
    sums.read().iter().sum()
}

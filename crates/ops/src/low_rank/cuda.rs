//! Row norms on a GPU.
use super::Update;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Source};
use tunesmith_device::Array;

static KERNELS: Source = Source::new("low_rank", include_str!("low_rank.cu"));

/// The norm of each row. `aw` is A W^T `[rank, out_features]`, `aa` is A A^T `[rank, rank]`.
pub(super) fn row_norms(squares: &Array<f64>, update: Update<'_>, aw: &Activation, aa: &Activation) -> Array<f32> {
    let (device, rows) = (aw.device(), squares.len());
    let norms = Array::<f32>::zeros(device, rows);
    let args = [
        squares.into(),
        update.b.into(),
        aw.floats().into(),
        aa.floats().into(),
        f64::from(update.scale).into(),
        (&norms).into(),
        Arg::count(rows),
        Arg::count(update.rank),
    ];
    cuda::launch(device, &KERNELS, "low_rank_row_norms", Grid::items(rows), &args);
    norms
}

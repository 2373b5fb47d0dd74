//! The moving average on a GPU.
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};

static KERNELS: Source = Source::new("ema", include_str!("ema.cu"));

pub(super) fn update(averages: FloatsMut<'_>, values: Floats<'_>, weight: f32) {
    let (device, count) = (values.device(), values.len());
    let args = [averages.into(), values.into(), weight.into(), Arg::count(count)];
    cuda::launch(device, &KERNELS, "ema_update", Grid::items(count), &args);
}

//! Noise in a GPU's memory, with the CPU's bits.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Source};

static KERNELS: Source = Source::new("noise", include_str!("noise.cu"));

pub(super) fn add(x: &mut Activation, bounds: &[f32], key: u64, first_row: u64) {
    let (device, features) = (x.device(), x.features());
    let tokens = bounds.len().min(x.tokens());
    let bounds = cuda::upload(device, bounds);
    let args = [x.into(), (&bounds).into(), key.into(), first_row.into(), Arg::count(tokens), Arg::count(features)];
    cuda::launch(device, &KERNELS, "noise_add", Grid::items(tokens * features), &args);
}

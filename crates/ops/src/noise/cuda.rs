//! The noise on a GPU, with the same random bits as on the CPU.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("noise", include_str!("noise.cu"));

pub(super) fn add(x: &mut Activation, bounds: &[f32], key: u64, first_row: u64) {
    let (device, features) = (x.device(), x.features());
    let tokens = bounds.len().min(x.tokens());
    let bounds = cuda::upload(device, bounds);
    let args = [x.into(), (&bounds).into(), key.into(), first_row.into(), Arg::count(tokens), Arg::count(features)];
    cuda::launch(device, KERNELS.same(&[x]), "noise_add", Grid::items(tokens * features), &args);
}

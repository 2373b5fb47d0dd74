//! Repeated features on a GPU.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("feature_repeat", include_str!("feature_repeat.cu"));

pub(super) fn forward(x: &Activation, y: &mut Activation, times: usize) {
    let (device, count) = (x.device(), y.tokens() * y.features());
    let kernels = KERNELS.same(&[x, y]);
    let args = [x.into(), y.into(), Arg::count(times), Arg::count(count)];
    cuda::launch(device, kernels, "feature_repeat_forward", Grid::items(count), &args);
}

pub(super) fn backward(dy: &Activation, dx: &mut Activation, times: usize) {
    let (device, count) = (dy.device(), dx.tokens() * dx.features());
    let kernels = KERNELS.same(&[dy, dx]);
    let args = [dy.into(), dx.into(), Arg::count(times), Arg::count(count)];
    cuda::launch(device, kernels, "feature_repeat_backward", Grid::items(count), &args);
}

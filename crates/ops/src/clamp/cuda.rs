//! Clamping on a GPU.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("clamp", include_str!("clamp.cu"));

pub(super) fn forward(x: &Activation, [low, high]: [f32; 2], y: &mut Activation) {
    let count = x.tokens() * x.features();
    let args = [x.into(), low.into(), high.into(), y.into(), Arg::count(count)];
    cuda::launch(x.device(), KERNELS.same(&[x, y]), "clamp_forward", Grid::items(count), &args);
}

pub(super) fn backward(x: &Activation, [low, high]: [f32; 2], gradient: &mut Activation) {
    let count = x.tokens() * x.features();
    let args = [x.into(), low.into(), high.into(), gradient.into(), Arg::count(count)];
    cuda::launch(x.device(), KERNELS.same(&[x, gradient]), "clamp_backward", Grid::items(count), &args);
}

//! The cut at a quantile on a GPU: one block for each token.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("gaussian_topk", include_str!("gaussian_topk.cu"));

pub(super) fn forward(x: &Activation, multiplier: f32, out: &mut Activation) {
    let (device, dim) = (x.device(), x.features());
    let kernels = KERNELS.same(&[x, out]);
    let args = [x.into(), out.into(), multiplier.into(), Arg::count(dim)];
    cuda::launch(device, kernels, "gaussian_topk_forward", Grid::rows(x.tokens(), dim), &args);
}

pub(super) fn backward(x: &Activation, multiplier: f32, dy: &mut Activation) {
    let (device, dim) = (x.device(), x.features());
    let kernels = KERNELS.same(&[x, dy]);
    let args = [x.into(), dy.into(), multiplier.into(), Arg::count(dim)];
    cuda::launch(device, kernels, "gaussian_topk_backward", Grid::rows(x.tokens(), dim), &args);
}

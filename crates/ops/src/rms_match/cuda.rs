//! Rescaling to another root mean square on a GPU: one block for each token.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("rms_match", include_str!("rms_match.cu"));

pub(super) fn forward(x: &Activation, r: &Activation, out: &mut Activation) {
    let (device, dim) = (x.device(), x.features());
    let kernels = KERNELS.same(&[x, r, out]);
    let args = [x.into(), r.into(), out.into(), super::FLOOR.into(), Arg::count(dim)];
    cuda::launch(device, kernels, "rms_match_forward", Grid::rows(x.tokens(), dim), &args);
}

pub(super) fn backward(x: &Activation, r: &Activation, dy: &Activation, dx: &mut Activation, dr: &mut Activation) {
    let (device, dim) = (x.device(), x.features());
    let kernels = KERNELS.same(&[x, r, dy, dx, dr]);
    let args = [x.into(), r.into(), dy.into(), dx.into(), dr.into(), super::FLOOR.into(), Arg::count(dim)];
    cuda::launch(device, kernels, "rms_match_backward", Grid::rows(x.tokens(), dim), &args);
}

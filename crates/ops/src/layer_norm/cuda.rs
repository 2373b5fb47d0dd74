//! `LayerNorm` on a GPU: one block for each token where features are summed, else one thread for each number.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::floats::{Floats, FloatsMut};

static KERNELS: Typed = Typed::new("layer_norm", include_str!("layer_norm.cu"));

pub(super) fn stats(x: &Activation, eps: f32, out: &mut Activation) {
    let args = [x.into(), out.into(), Arg::count(x.features()), eps.into()];
    cuda::launch(x.device(), KERNELS.same(&[x]), "layer_norm_stats", Grid::rows(x.tokens(), x.features()), &args);
}

pub(super) fn apply(x: &Activation, stats: &Activation, weight: Floats<'_>, bias: Floats<'_>, out: &mut Activation) {
    let count = x.tokens() * x.features();
    let args =
        [x.into(), stats.into(), weight.into(), bias.into(), out.into(), Arg::count(count), Arg::count(x.features())];
    cuda::launch(x.device(), KERNELS.same(&[x, out]), "layer_norm_apply", Grid::items(count), &args);
}

pub(super) fn backward(
    x: &Activation,
    stats: &Activation,
    weight: Floats<'_>,
    dh: &Activation,
    dx: &mut Activation,
    add: bool,
) {
    let args = [x.into(), stats.into(), weight.into(), dh.into(), dx.into(), add.into(), Arg::count(x.features())];
    cuda::launch(
        x.device(),
        KERNELS.same(&[x, dh, dx]),
        "layer_norm_backward",
        Grid::rows(x.tokens(), x.features()),
        &args,
    );
}

pub(super) fn backward_weight(x: &Activation, stats: &Activation, dh: &Activation, dw: FloatsMut<'_>) {
    let dim = dw.len();
    let args = [x.into(), stats.into(), dh.into(), dw.into(), Arg::count(x.tokens()), Arg::count(dim)];
    cuda::launch(x.device(), KERNELS.same(&[x, dh]), "layer_norm_backward_weight", Grid::columns(dim), &args);
}

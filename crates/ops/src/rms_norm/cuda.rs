//! `RMSNorm` on a GPU: one block for each token and group.
use super::Gain;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::floats::FloatsMut;

static KERNELS: Typed = Typed::new("rms_norm", include_str!("rms_norm.cu"));

pub(super) fn stats(x: &Activation, eps: f32, out: &mut Activation) {
    let (rows, dim) = (out.tokens() * out.features(), x.features() / out.features());
    let args = [x.into(), out.into(), Arg::count(dim), eps.into()];
    cuda::launch(x.device(), KERNELS.same(&[x]), "rms_norm_stats", Grid::rows_of_packs(rows, dim, x.number()), &args);
}

pub(super) fn apply(x: &Activation, rstd: &Activation, gain: Gain<'_>, out: &mut Activation) {
    let (rows, dim) = (rstd.tokens() * rstd.features(), x.features() / rstd.features());
    let args = [
        x.into(),
        rstd.into(),
        gain.weight.into(),
        Arg::count(gain.weight.len()),
        gain.offset.into(),
        out.into(),
        Arg::count(dim),
    ];
    let grid = Grid::rows_of_packs(rows, dim, x.number());
    cuda::launch(x.device(), KERNELS.same(&[x, out]), "rms_norm_apply", grid, &args);
}

pub(super) fn backward(
    x: &Activation,
    rstd: &Activation,
    gain: Gain<'_>,
    dh: &Activation,
    dx: &mut Activation,
    add: bool,
) {
    let (rows, dim) = (rstd.tokens() * rstd.features(), x.features() / rstd.features());
    let args = [
        x.into(),
        rstd.into(),
        gain.weight.into(),
        Arg::count(gain.weight.len()),
        gain.offset.into(),
        dh.into(),
        dx.into(),
        add.into(),
        Arg::count(dim),
    ];
    cuda::launch(
        x.device(),
        KERNELS.same(&[x, dh, dx]),
        "rms_norm_backward",
        Grid::rows_of_packs(rows, dim, x.number()),
        &args,
    );
}

pub(super) fn backward_weight(x: &Activation, rstd: &Activation, dh: &Activation, dw: FloatsMut<'_>) {
    let (dim, weights) = (x.features() / rstd.features(), dw.len());
    let rows = x.tokens() * x.features() / weights;
    let args = [x.into(), rstd.into(), dh.into(), dw.into(), Arg::count(rows), Arg::count(weights), Arg::count(dim)];
    cuda::launch(x.device(), KERNELS.same(&[x, dh]), "rms_norm_backward_weight", Grid::columns(weights), &args);
}

//! `AltUp` on a GPU: one thread for each number, and one block for each sum over features.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use std::ops::Range;

static KERNELS: Typed = Typed::new("altup", include_str!("altup.cu"));

fn mix(x: &Activation, coefs: &Activation, streams: usize, turned: bool, out: &mut Activation) {
    let (count, dim) = (x.tokens() * x.features(), x.features() / streams);
    let kernels = KERNELS.same(&[x, coefs, out]);
    let args =
        [x.into(), coefs.into(), out.into(), turned.into(), Arg::count(streams), Arg::count(dim), Arg::count(count)];
    cuda::launch(x.device(), kernels, "altup_mix", Grid::items(count), &args);
}

pub(super) fn predict(x: &Activation, coefs: &Activation, streams: usize, out: &mut Activation) {
    mix(x, coefs, streams, false, out);
}

pub(super) fn predict_backward(
    x: &Activation,
    coefs: &Activation,
    streams: usize,
    d_out: &Activation,
    dx: &mut Activation,
    d_coefs: &mut Activation,
) {
    mix(d_out, coefs, streams, true, dx);
    let (blocks, dim) = (d_coefs.tokens() * d_coefs.features(), x.features() / streams);
    let kernels = KERNELS.same(&[d_out, x, d_coefs]);
    let args = [d_out.into(), x.into(), d_coefs.into(), Arg::count(streams), Arg::count(dim)];
    cuda::launch(x.device(), kernels, "altup_products", Grid::rows(blocks, dim), &args);
}

pub(super) fn correct(p: &mut Activation, u: &Activation, coefs: &Activation, active: usize) {
    let (device, count) = (u.device(), u.tokens() * u.features());
    let kernels = KERNELS.same(&[p, u, coefs]);
    let sizes = [coefs.features(), u.features(), active, count].map(Arg::count);
    let args = [&[p.into(), u.into(), coefs.into()][..], &sizes].concat();
    cuda::launch(device, kernels, "altup_correct", Grid::items(count), &args);
}

pub(super) fn correct_backward(
    [p, u, coefs]: [&Activation; 3],
    active: usize,
    d: &mut Activation,
    du: &mut Activation,
    d_coefs: &mut Activation,
) {
    let (device, streams, dim) = (u.device(), coefs.features(), u.features());
    let kernels = KERNELS.same(&[p, u, coefs, d, du, d_coefs]);
    let args = [(&*d).into(), u.into(), p.into(), d_coefs.into(), Arg::count(streams), Arg::count(dim)];
    cuda::launch(device, kernels, "altup_changes", Grid::rows(u.tokens() * streams, dim), &args);
    let count = u.tokens() * dim;
    let sizes = [streams, dim, active, count].map(Arg::count);
    let args = [&[d.into(), coefs.into(), du.into()][..], &sizes].concat();
    cuda::launch(device, kernels, "altup_correct_backward", Grid::items(count), &args);
}

pub(super) fn add(y: &mut Activation, x: &Activation, to: Range<usize>) {
    let (device, count) = (x.device(), x.tokens() * x.features());
    let kernels = KERNELS.same(&[y, x]);
    let sizes = [y.features(), x.features(), to.start, to.end, count].map(Arg::count);
    let args = [&[y.into(), x.into()][..], &sizes].concat();
    cuda::launch(device, kernels, "altup_add", Grid::items(count), &args);
}

pub(super) fn sum(y: &Activation, of: Range<usize>, out: &mut Activation) {
    let (device, count) = (y.device(), out.tokens() * out.features());
    let kernels = KERNELS.same(&[y, out]);
    let sizes = [y.features(), out.features(), of.start, of.end, count].map(Arg::count);
    let args = [&[y.into(), out.into()][..], &sizes].concat();
    cuda::launch(device, kernels, "altup_sum", Grid::items(count), &args);
}

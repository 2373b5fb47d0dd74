//! Elementwise arithmetic on a GPU.
use super::{Both, One};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::floats::{Floats, FloatsMut};

static KERNELS: Typed = Typed::new("elementwise", include_str!("elementwise.cu"));

pub(super) fn map(x: &mut Activation, One { factor, addend }: One) {
    let (device, count, number) = (x.device(), x.tokens() * x.features(), x.number());
    let args = [x.into(), factor.into(), addend.into(), Arg::count(count)];
    cuda::launch(device, KERNELS.same(&[x]), "elementwise_map", Grid::packs(count, number), &args);
}

pub(super) fn zip(y: &mut Activation, x: &Activation, Both { a, b }: Both) {
    let count = x.tokens() * x.features();
    let args = [y.into(), x.into(), a.into(), b.into(), Arg::count(count)];
    cuda::launch(x.device(), KERNELS.same(&[x, y]), "elementwise_zip", Grid::packs(count, x.number()), &args);
}

pub(super) fn add_bias(y: &mut Activation, bias: Floats<'_>) {
    let (device, tokens, features) = (y.device(), y.tokens(), y.features());
    let args = [y.into(), bias.into(), Arg::count(tokens), Arg::count(features)];
    cuda::launch(device, KERNELS.same(&[y]), "elementwise_add_bias", Grid::packs(tokens * features, y.number()), &args);
}

pub(super) fn sum_tokens(dy: &Activation, sums: FloatsMut<'_>) {
    let args = [dy.into(), sums.into(), Arg::count(dy.tokens()), Arg::count(dy.features())];
    cuda::launch(dy.device(), KERNELS.same(&[dy]), "elementwise_sum_tokens", Grid::columns(dy.features()), &args);
}

//! Sums of activations in a GPU's memory.
use super::{Both, One};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};

static KERNELS: Source = Source::new("elementwise", include_str!("elementwise.cu"));

pub(super) fn map(x: &mut Activation, One { factor, addend }: One) {
    let (device, count) = (x.device(), x.tokens() * x.features());
    let args = [x.into(), factor.into(), addend.into(), Arg::count(count)];
    cuda::launch(device, &KERNELS, "elementwise_map", Grid::items(count), &args);
}

pub(super) fn zip(y: &mut Activation, x: &Activation, Both { a, b }: Both) {
    let count = x.tokens() * x.features();
    let args = [y.into(), x.into(), a.into(), b.into(), Arg::count(count)];
    cuda::launch(x.device(), &KERNELS, "elementwise_zip", Grid::items(count), &args);
}

pub(super) fn add_bias(y: &mut Activation, bias: Floats<'_>) {
    let (device, tokens, features) = (y.device(), y.tokens(), y.features());
    let args = [y.into(), bias.into(), Arg::count(tokens), Arg::count(features)];
    cuda::launch(device, &KERNELS, "elementwise_add_bias", Grid::items(tokens * features), &args);
}

pub(super) fn sum_tokens(dy: &Activation, sums: FloatsMut<'_>) {
    let args = [dy.into(), sums.into(), Arg::count(dy.tokens()), Arg::count(dy.features())];
    cuda::launch(dy.device(), &KERNELS, "elementwise_sum_tokens", Grid::columns(dy.features()), &args);
}

//! A factor for each feature, on a GPU.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Source, Typed};
use crate::floats::{Floats, FloatsMut};
use tunesmith_device::Array;

static KERNELS: Typed = Typed::new("feature_scale", include_str!("feature_scale.cu"));
static RATIO: Source = Source::new("ratio", include_str!("ratio.cu"));

pub(super) fn times(v: &Activation, gain: Floats<'_>, out: &mut Activation) {
    scale(v, gain, out, false);
}

pub(super) fn add(y: &mut Activation, v: &Activation, gain: Floats<'_>) {
    scale(v, gain, y, true);
}

fn scale(v: &Activation, gain: Floats<'_>, out: &mut Activation, add: bool) {
    let (tokens, features) = (v.tokens(), v.features());
    let args = [v.into(), gain.into(), out.into(), add.into(), Arg::count(tokens), Arg::count(features)];
    cuda::launch(v.device(), KERNELS.same(&[v, out]), "feature_scale_times", Grid::items(tokens * features), &args);
}

pub(super) fn ratio(magnitudes: Floats<'_>, norms: Floats<'_>) -> Array<f32> {
    let (device, count) = (norms.device(), norms.len());
    let mut out = Array::zeros(device, count);
    let args = [magnitudes.into(), norms.into(), (&mut out).into(), Arg::count(count)];
    cuda::launch(device, &RATIO, "feature_scale_ratio", Grid::items(count), &args);
    out
}

pub(super) fn backward(dy: &Activation, v: &Activation, norm: Floats<'_>, d_magnitude: FloatsMut<'_>) {
    let (tokens, features) = (dy.tokens(), dy.features());
    let args = [dy.into(), v.into(), norm.into(), d_magnitude.into(), Arg::count(tokens), Arg::count(features)];
    cuda::launch(dy.device(), KERNELS.same(&[dy, v]), "feature_scale_backward", Grid::columns(features), &args);
}

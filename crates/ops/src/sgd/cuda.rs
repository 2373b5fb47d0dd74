//! Stochastic gradient descent on a GPU.
use super::Step;
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};

static KERNELS: Source = Source::new("sgd", include_str!("sgd.cu"));

pub(super) fn update(values: FloatsMut<'_>, grads: Floats<'_>, buffer: Option<FloatsMut<'_>>, step: &Step) {
    let Step { factor, rate, momentum, dampening, nesterov, weight_decay } = *step;
    let (device, count) = (grads.device(), grads.len());
    let [found, factor] = factor.args();
    let args = [
        values.into(),
        grads.into(),
        buffer.map_or(Arg::NULL, Arg::from),
        found,
        factor,
        (rate as f32).into(),
        (momentum as f32).into(),
        ((1.0 - dampening) as f32).into(),
        (weight_decay as f32).into(),
        nesterov.into(),
        Arg::count(count),
    ];
    cuda::launch(device, &KERNELS, "sgd_update", Grid::items(count), &args);
}

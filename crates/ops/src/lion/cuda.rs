//! Lion's update on a GPU.
use super::Step;
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};

static KERNELS: Source = Source::new("lion", include_str!("lion.cu"));

pub(super) fn update(values: FloatsMut<'_>, grads: Floats<'_>, exp_avg: FloatsMut<'_>, step: &Step) {
    let Step { factor, rate, beta1, beta2, weight_decay } = *step;
    let (device, count) = (grads.device(), grads.len());
    let [found, factor] = factor.args();
    let args = [
        values.into(),
        grads.into(),
        exp_avg.into(),
        found,
        factor,
        ((1.0 - rate * weight_decay) as f32).into(),
        (rate as f32).into(),
        (beta1 as f32).into(),
        ((1.0 - beta1) as f32).into(),
        (beta2 as f32).into(),
        ((1.0 - beta2) as f32).into(),
        Arg::count(count),
    ];
    cuda::launch(device, &KERNELS, "lion_update", Grid::items(count), &args);
}

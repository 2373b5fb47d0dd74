//! `AdamW`'s update with 8-bit moments on a GPU.
use super::{BLOCK, CodeMap};
use crate::adamw::Step;
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};
use tunesmith_device::SliceMut;

static KERNELS: Source = Source::new("adamw_8bit", include_str!("adamw_8bit.cu"));

pub(super) fn update(
    values: FloatsMut<'_>,
    grads: Floats<'_>,
    [codes1, codes2]: [SliceMut<'_, u8>; 2],
    [absmax1, absmax2]: [FloatsMut<'_>; 2],
    maps: [&CodeMap; 2],
    step: &Step,
) {
    let (device, count) = (grads.device(), grads.len());
    let maps: Vec<f32> = maps.into_iter().flat_map(|map| map.values.iter().chain(&map.bounds)).copied().collect();
    let maps = cuda::upload(device, &maps);
    let mut args: Vec<Arg> =
        vec![values.into(), grads.into(), codes1.into(), codes2.into(), absmax1.into(), absmax2.into(), (&maps).into()];
    args.extend(step.args());
    args.push(Arg::count(count));
    cuda::launch(device, &KERNELS, "adamw_8bit_update", Grid::blocks(count.div_ceil(BLOCK)), &args);
}

pub(super) fn update_small(
    values: FloatsMut<'_>,
    grads: Floats<'_>,
    exp_avg: FloatsMut<'_>,
    exp_avg_sq: FloatsMut<'_>,
    step: &Step,
) {
    let (device, count) = (grads.device(), grads.len());
    let mut args = vec![values.into(), grads.into(), exp_avg.into(), exp_avg_sq.into()];
    args.extend(step.args());
    args.push(Arg::count(count));
    cuda::launch(device, &KERNELS, "adamw_8bit_small", Grid::items(count), &args);
}

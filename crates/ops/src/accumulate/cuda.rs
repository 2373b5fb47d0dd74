//! Gradient sums on a GPU: launches the kernels of `accumulate.cu`.
use super::Sum;
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};
use crate::squares;
use half::bf16;
use tunesmith_device::{Slice, SliceMut};

static KERNELS: Source = Source::new("accumulate", include_str!("accumulate.cu"));

pub(super) fn add<T: Sum>(sums: SliceMut<'_, T>, grads: Floats<'_>) {
    let (device, count) = (grads.device(), grads.len());
    let kernel = if T::NARROW { "accumulate_add_bf16" } else { "accumulate_add_f32" };
    cuda::launch(device, &KERNELS, kernel, Grid::items(count), &[sums.into(), grads.into(), Arg::count(count)]);
}

pub(super) fn take<T: Sum>(sums: SliceMut<'_, T>, grads: FloatsMut<'_>) {
    let (device, count) = (grads.device(), grads.len());
    let kernel = if T::NARROW { "accumulate_take_bf16" } else { "accumulate_take_f32" };
    cuda::launch(device, &KERNELS, kernel, Grid::items(count), &[sums.into(), grads.into(), Arg::count(count)]);
}

pub(super) fn to_f32(sums: Slice<'_, bf16>, floats: FloatsMut<'_>) {
    let (device, count) = (sums.device(), sums.len());
    let args = [sums.into(), floats.into(), Arg::count(count)];
    cuda::launch(device, &KERNELS, "accumulate_to_f32", Grid::items(count), &args);
}

pub(super) fn squares(sums: Slice<'_, bf16>) -> f64 {
    squares::cuda::sum_bf16(sums)
}

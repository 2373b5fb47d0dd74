//! Activations in 16 bits in a GPU's memory: row-major, without gaps.
use super::{Half, Narrow};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Source};

static KERNELS: Source = Source::new("narrow", include_str!("narrow.cu"));

pub(super) fn narrow(act: &Activation, half: Half, halves: &mut Activation) {
    let kernel = match half {
        Half::Bf16 => "narrow_to_bf16",
        Half::F16 => "narrow_to_f16",
    };
    let count = act.tokens() * act.features();
    cuda::launch(act.device(), &KERNELS, kernel, Grid::items(count), &[act.into(), halves.into(), Arg::count(count)]);
}

pub(super) fn widen(Narrow { half, halves, features }: &Narrow, out: &mut Activation) {
    let kernel = match half {
        Half::Bf16 => "narrow_from_bf16",
        Half::F16 => "narrow_from_f16",
    };
    let count = halves.tokens() * features;
    cuda::launch(
        halves.device(),
        &KERNELS,
        kernel,
        Grid::items(count),
        &[halves.into(), out.into(), Arg::count(count)],
    );
}

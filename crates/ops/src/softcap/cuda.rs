//! Soft capping on a GPU.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Source};

static KERNELS: Source = Source::new("softcap", include_str!("softcap.cu"));

pub(super) fn forward(x: &mut Activation, cap: f32) {
    let (device, count) = (x.device(), x.tokens() * x.features());
    cuda::launch(
        device,
        &KERNELS,
        "softcap_forward",
        Grid::items(count),
        &[x.floats_mut().into(), cap.into(), Arg::count(count)],
    );
}

pub(super) fn backward(capped: &Activation, cap: f32, gradient: &mut Activation) {
    let count = capped.tokens() * capped.features();
    let args = [capped.floats().into(), cap.into(), gradient.floats_mut().into(), Arg::count(count)];
    cuda::launch(capped.device(), &KERNELS, "softcap_backward", Grid::items(count), &args);
}

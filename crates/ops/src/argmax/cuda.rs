//! The argmax on a GPU.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Source};
use tunesmith_device::Array;

static KERNELS: Source = Source::new("argmax", include_str!("argmax.cu"));

pub(super) fn argmax(x: &Activation) -> Vec<u32> {
    let out = Array::<u32>::zeros(x.device(), x.tokens());
    let args = [x.floats().into(), (&out).into(), Arg::count(x.features())];
    cuda::launch(x.device(), &KERNELS, "argmax_rows", Grid::rows(x.tokens(), x.features()), &args);
    out.read()
}

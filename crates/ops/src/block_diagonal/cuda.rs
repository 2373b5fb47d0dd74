//! Products with a block-diagonal matrix on a GPU.
use super::Diagonal;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use tunesmith_device::Array;

static KERNELS: Typed = Typed::new("block_diagonal", include_str!("block_diagonal.cu"));

pub(super) fn times(diagonal: Diagonal<'_>, x: &Activation, transposed: bool, out: &mut Activation, adds: bool) {
    let (tokens, features) = (x.tokens(), x.features());
    let args = [
        diagonal.matrices.into(),
        x.into(),
        out.into(),
        Arg::count(diagonal.count()),
        Arg::count(diagonal.size),
        transposed.into(),
        adds.into(),
        Arg::count(tokens),
        Arg::count(features),
    ];
    cuda::launch(x.device(), KERNELS.same(&[x, out]), "block_diagonal_times", Grid::items(tokens * features), &args);
}

pub(super) fn outer(size: usize, x: &Activation, d: &Activation, out: &mut [f32]) {
    let sums = Array::<f32>::zeros(x.device(), out.len());
    let args = [x.into(), d.into(), (&sums).into(), Arg::count(size), Arg::count(x.tokens()), Arg::count(x.features())];
    cuda::launch(x.device(), KERNELS.same(&[x, d]), "block_diagonal_outer", Grid::items(out.len()), &args);
    sums.view().read_into(out);
}

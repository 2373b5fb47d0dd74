//! The convolution on a GPU.
use super::Conv;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::floats::FloatsMut;

static KERNELS: Typed = Typed::new("causal_conv1d", include_str!("causal_conv1d.cu"));

pub(super) fn forward(conv: Conv<'_>, kernel: usize, x: &Activation, positions: &[u32], out: &mut Activation) {
    let (device, tokens, channels) = (x.device(), x.tokens(), x.features());
    let positions = cuda::upload(device, positions);
    let args = [
        x.into(),
        conv.weight.into(),
        conv.bias.map_or(Arg::NULL, Arg::from),
        (&positions).into(),
        out.into(),
        Arg::count(tokens),
        Arg::count(channels),
        (kernel as u32).into(),
        conv.silu.into(),
    ];
    let grid = Grid::items(tokens * channels);
    cuda::launch(device, KERNELS.same(&[x, out]), "causal_conv1d_forward", grid, &args);
}

pub(super) fn backward(
    conv: Conv<'_>,
    kernel: usize,
    x: &Activation,
    dz: &mut Activation,
    positions: &[u32],
    dx: &mut Activation,
    d_weight: Option<FloatsMut<'_>>,
) {
    let (device, tokens, channels) = (x.device(), x.tokens(), x.features());
    let positions = cuda::upload(device, positions);
    let source = KERNELS.same(&[x, dz, dx]);
    let sizes = [Arg::count(tokens), Arg::count(channels), (kernel as u32).into()];
    let grid = Grid::items(tokens * channels);
    if conv.silu {
        let bias = conv.bias.map_or(Arg::NULL, Arg::from);
        let args = [x.into(), conv.weight.into(), bias, (&positions).into(), (&mut *dz).into()];
        cuda::launch(device, source, "causal_conv1d_silu", grid, &[&args[..], &sizes].concat());
    }
    let args = [(&*dz).into(), conv.weight.into(), (&positions).into(), dx.into()];
    cuda::launch(device, source, "causal_conv1d_input", grid, &[&args[..], &sizes].concat());
    if let Some(d_weight) = d_weight {
        let args = [x.into(), (&*dz).into(), (&positions).into(), d_weight.into()];
        let mut grid = Grid::columns(channels);
        grid.blocks[1] = kernel as u32;
        cuda::launch(device, source, "causal_conv1d_weight", grid, &[&args[..], &sizes].concat());
    }
}

//! Keys and values of latent attention on a GPU.
use super::LatentHeads;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("latent_heads", include_str!("latent_heads.cu"));

pub(super) fn forward(kv: &Activation, k_rot: &Activation, k: &mut Activation, v: &mut Activation, how: LatentHeads) {
    let (device, tokens, LatentHeads { heads, nope, rope, value }) = (kv.device(), kv.tokens(), how);
    let kernels = KERNELS.same(&[kv, k_rot, k, v]);
    let mut args = vec![kv.into(), k_rot.into(), k.into(), v.into()];
    args.extend([tokens, heads, nope, rope, value].map(Arg::count));
    let count = tokens * heads * (how.key() + value);
    cuda::launch(device, kernels, "latent_heads_forward", Grid::items(count), &args);
}

pub(super) fn backward(
    dk: &Activation,
    dv: &Activation,
    d_kv: &mut Activation,
    d_k_rot: &mut Activation,
    how: LatentHeads,
) {
    let (device, tokens, LatentHeads { heads, nope, rope, value }) = (dk.device(), dk.tokens(), how);
    let kernels = KERNELS.same(&[dk, dv, d_kv, d_k_rot]);
    let mut args = vec![dk.into(), dv.into(), d_kv.into()];
    args.extend([tokens * heads, nope, rope, value].map(Arg::count));
    let count = tokens * heads * (nope + value);
    cuda::launch(device, kernels, "latent_heads_backward", Grid::items(count), &args);
    let mut args = vec![dk.into(), d_k_rot.into()];
    args.extend([tokens, heads, nope, rope].map(Arg::count));
    cuda::launch(device, kernels, "latent_heads_sum", Grid::items(tokens * rope), &args);
}

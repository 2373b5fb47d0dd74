//! The rotation on a GPU.
use super::{Pairing, Rope};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use rayon::prelude::*;

static KERNELS: Typed = Typed::new("rope", include_str!("rope.cu"));

/// Fills both tables with `angle(token, frequency)`, which gives cosine and sine: on the host, in double precision.
pub(super) fn tables(cos: &mut Activation, sin: &mut Activation, angle: impl Fn(usize, usize) -> (f32, f32) + Sync) {
    let (tokens, pairs) = (cos.tokens(), cos.features());
    let both = (0..tokens * pairs).into_par_iter().map(|index| angle(index / pairs, index % pairs));
    let (cosines, sines): (Vec<f32>, Vec<f32>) = both.unzip();
    cos.floats_mut().write(&cosines);
    sin.floats_mut().write(&sines);
}

/// Rotates all heads of `x`. The caller has checked the shapes.
pub(super) fn turn(rope: &Rope, x: &mut Activation, head_dim: usize, offset: usize, sign: f32) {
    let (device, tokens, heads, pairs) = (x.device(), x.tokens(), x.features() / head_dim, rope.cos.features());
    let (step, apart) = match rope.pairing {
        Pairing::Half => (1, pairs),
        Pairing::Interleaved => (2, 1),
    };
    let mut args = vec![x.into(), (&rope.cos).into(), (&rope.sin).into()];
    args.extend([tokens, heads, head_dim, offset, pairs, step, apart].map(Arg::count));
    args.push(sign.into());
    cuda::launch(device, KERNELS.same(&[x]), "rope_turn", Grid::items(tokens * heads * pairs), &args);
}

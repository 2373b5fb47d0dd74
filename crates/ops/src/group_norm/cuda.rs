//! `GroupNorm` on a GPU: one block finds the mean and deviation of a group; then one thread normalizes each number.
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::floats::Floats;

static KERNELS: Typed = Typed::new("group_norm", include_str!("group_norm.cu"));

pub(super) fn forward(x: &Activation, groups: usize, eps: f32, [weight, bias]: [Floats<'_>; 2], out: &mut Activation) {
    let (count, size) = (x.tokens() * x.features(), x.features() / groups);
    let mut stats = x.pool().act_f32(groups, 2);
    let sizes = [Arg::count(x.tokens()), Arg::count(x.features()), Arg::count(size)];
    let args = [&[x.into(), (&mut stats).into()][..], &sizes, &[eps.into()]].concat();
    cuda::launch(x.device(), KERNELS.same(&[x]), "group_norm_stats", Grid::blocks(groups), &args);
    let operands = [x.into(), (&stats).into(), weight.into(), bias.into(), out.into()];
    let args = [&operands[..], &[Arg::count(count)], &sizes[1..]].concat();
    cuda::launch(x.device(), KERNELS.same(&[x, out]), "group_norm_apply", Grid::items(count), &args);
}

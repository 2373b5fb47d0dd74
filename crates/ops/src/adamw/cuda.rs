//! `AdamW`'s update on a GPU.
use super::Step;
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};

static KERNELS: Source = Source::new("adamw", include_str!("adamw.cu"));

impl Step<'_> {
    /// The constants that kernels take: factor (two arguments), `beta1`, `1 - beta1`, `beta2`, `1 - beta2`, epsilon,
    /// and the three of [`Step::rounded`].
    pub(crate) fn args(&self) -> [Arg; 10] {
        let [keep, pace, root] = self.rounded();
        let (beta1, rest1) = (self.beta1 as f32, (1.0 - self.beta1) as f32);
        let (beta2, rest2) = (self.beta2 as f32, (1.0 - self.beta2) as f32);
        let [found, factor] = self.factor.args();
        let [beta1, rest1, beta2, rest2, epsilon, keep, pace, root] =
            [beta1, rest1, beta2, rest2, self.epsilon as f32, keep, pace, root].map(Arg::from);
        [found, factor, beta1, rest1, beta2, rest2, epsilon, keep, pace, root]
    }
}

pub(super) fn update(
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
    cuda::launch(device, &KERNELS, "adamw_update", Grid::items(count), &args);
}

//! Cross-entropy on a GPU.
use super::Terms;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Source};
use tunesmith_device::Array;

static KERNELS: Source = Source::new("loss", include_str!("loss.cu"));

/// The results, four numbers for each token, which [`super::Losses`] reads.
pub(super) fn cross_entropy(logits: &mut Activation, targets: &[u32]) -> Array<f32> {
    let (device, tokens, vocabulary) = (logits.device(), logits.tokens(), logits.features());
    assert!(targets.iter().all(|&target| (target as usize) < vocabulary), "a target inside the vocabulary");
    let losses = Array::<f32>::zeros(device, 4 * tokens);
    let targets = cuda::upload(device, targets);
    let args = [logits.floats_mut().into(), (&targets).into(), (&losses).into(), Arg::count(vocabulary)];
    cuda::launch(device, &KERNELS, "loss_cross_entropy", Grid::rows(tokens, vocabulary), &args);
    losses
}

pub(super) fn gradient(
    exponentials: &mut Activation,
    targets: &[u32],
    scales: &[f32],
    terms: Terms,
    losses: &Array<f32>,
) {
    let (device, tokens, vocabulary) = (exponentials.device(), exponentials.tokens(), exponentials.features());
    let (targets, scales) = (cuda::upload(device, targets), cuda::upload(device, scales));
    let args = [
        exponentials.floats_mut().into(),
        (&targets).into(),
        (&scales).into(),
        losses.into(),
        terms.smoothing.into(),
        terms.z.into(),
        Arg::count(vocabulary),
    ];
    cuda::launch(device, &KERNELS, "loss_gradient", Grid::rows(tokens, vocabulary), &args);
}

pub(super) fn squared(values: &mut Activation, targets: &[u32], scales: &[f32]) -> Array<f32> {
    let (device, count) = (values.device(), targets.len());
    let losses = Array::<f32>::zeros(device, 4 * count);
    let (targets, scales) = (cuda::upload(device, targets), cuda::upload(device, scales));
    let args = [values.floats_mut().into(), (&targets).into(), (&scales).into(), (&losses).into(), Arg::count(count)];
    cuda::launch(device, &KERNELS, "loss_squared", Grid::items(count), &args);
    losses
}

/// Adds the sum of the losses, each times its weight, to `to[0]`, and the number of right tokens to `to[1]`. Without
/// `weights`, each loss counts once.
pub(super) fn totals(losses: &Array<f32>, weights: &[f32], to: &mut Array<f64>) {
    let device = losses.device();
    let weights = (!weights.is_empty()).then(|| cuda::upload(device, weights));
    let args = [losses.into(), weights.as_ref().map_or(Arg::NULL, Arg::from), Arg::count(losses.len() / 4), to.into()];
    cuda::launch(device, &KERNELS, "loss_totals", Grid::blocks(1), &args);
}

//! Corrects a chunk's gradients on a GPU.
use crate::activation::{Activation, Number};
use crate::cuda::{self, Arg, Grid, Typed};
use crate::embedding;
use crate::floats::FloatsMut;
use crate::gemm::Store;
use tunesmith_device::Array;

static KERNELS: Typed = Typed::new("loss_linear", include_str!("linear.cu"));

/// As [`super::Projection::correct`]; `losses` has four numbers for each token.
pub(super) fn correct(
    weight: Store<'_>,
    d_part: &mut Activation,
    h_over_s: Option<&mut Activation>,
    losses: &Array<f32>,
    targets: &[u32],
    scale: f32,
) {
    let (device, tokens, hidden) = (d_part.device(), d_part.tokens(), d_part.features());
    let (kernel, weight) = match weight {
        Store::F32(values) => ("loss_linear_correct_f32", Arg::from(values)),
        Store::Bf16(values) => ("loss_linear_correct_bf16", Arg::from(values)),
        Store::Quantized(_) | Store::Interleaved(_) => panic!("a head on a GPU is in floats"),
    };
    let targets = cuda::upload(device, targets);
    let number = h_over_s.as_ref().map_or(Number::F32, |h| h.number());
    let h = h_over_s.map_or(Arg::NULL, Arg::from);
    let args = [weight, d_part.into(), h, losses.into(), (&targets).into(), scale.into(), Arg::count(hidden)];
    cuda::launch(device, KERNELS.of(number), kernel, Grid::rows(tokens, hidden), &args);
}

/// `columns[t, i] = d[t, ids[i]]`.
pub(super) fn pick_columns(d: &Activation, ids: &[u32], columns: &mut Activation) {
    let (device, tokens, count) = (d.device(), d.tokens(), ids.len());
    let ids = cuda::upload(device, ids);
    let args =
        [d.into(), (&ids).into(), columns.into(), Arg::count(tokens), Arg::count(d.features()), Arg::count(count)];
    cuda::launch(device, KERNELS.same(&[d, columns]), "loss_linear_pick", Grid::items(tokens * count), &args);
}

/// As [`super::subtract_targets`]: it is the gradient of an embedding with the factor `-scale`.
pub(super) fn subtract_targets(
    gradients: FloatsMut<'_>,
    ids: Option<&[u32]>,
    targets: &[u32],
    h: &Activation,
    first: usize,
    scale: f32,
) {
    let part = h.rows(h.pool(), first..first + targets.len());
    let Some(ids) = ids else { return embedding::backward(&part, targets, -scale, None, gradients) };
    // One place past the last stands for all targets that are not among `ids`.
    let other = ids.len() as u32;
    let place = |target: &u32| ids.iter().position(|id| id == target).map_or(other, |at| at as u32);
    let places: Vec<u32> = targets.iter().map(place).collect();
    embedding::backward(&part, &places, -scale, Some(other), gradients);
}

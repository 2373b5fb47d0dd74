//! Dropout on a GPU, with the same masks as on the CPU.
use super::Dropout;
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};

static KERNELS: Typed = Typed::new("dropout", include_str!("dropout.cu"));

pub(super) fn apply(dropout: &Dropout<'_>, x: &Activation, out: &mut Activation) {
    let (device, tokens, features) = (x.device(), x.tokens(), x.features());
    let rows = dropout.rows.map(|rows| {
        // As on the CPU, a token past the end of `rows` counts as its own row.
        let row = |token: usize| rows.get(token).copied().unwrap_or(token) as u32;
        cuda::upload(device, &(0..tokens).map(row).collect::<Vec<_>>())
    });
    let threshold = (f64::from(dropout.rate) * 4_294_967_296.0) as u64;
    let args = [
        x.into(),
        rows.as_ref().map_or(Arg::NULL, Arg::from),
        out.into(),
        dropout.key.into(),
        dropout.first_row.into(),
        threshold.into(),
        (1.0 / (1.0 - dropout.rate)).into(),
        Arg::count(tokens),
        Arg::count(features),
    ];
    cuda::launch(device, KERNELS.same(&[x, out]), "dropout_apply", Grid::items(tokens * features), &args);
}

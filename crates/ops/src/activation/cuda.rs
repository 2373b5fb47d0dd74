//! Copies between rows in a GPU's memory.
use super::Activation;
use crate::cuda::{self, Arg, Grid, Source};
use std::ops::Range;
use tunesmith_device::Array;

static KERNELS: Source = Source::new("activation", include_str!("activation.cu"));

impl From<&Activation> for Arg {
    fn from(x: &Activation) -> Self {
        x.floats().into()
    }
}

impl From<&mut Activation> for Arg {
    fn from(x: &mut Activation) -> Self {
        x.floats().into()
    }
}

/// Row numbers of `of` as kernels, which do not check them, read them.
fn indices(of: &Activation, rows: &[usize]) -> Array<u32> {
    assert!(rows.iter().all(|&row| row < of.tokens()), "rows below {}", of.tokens());
    let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
    cuda::upload(of.device(), &rows)
}

/// As [`indices`], of rows that are written: threads have one each, so that none may come twice.
fn written(of: &Activation, rows: &[usize]) -> Array<u32> {
    assert!(rows.is_sorted_by(|row, next| row < next), "rows that rise");
    indices(of, rows)
}

pub(super) fn rows(x: &Activation, first: usize, out: &mut Activation) {
    let start = first * x.features();
    let count = out.tokens() * out.features();
    out.floats_mut().copy_from(x.floats().slice(start..start + count));
}

pub(super) fn put_rows(x: &mut Activation, first: usize, part: &Activation) {
    let start = first * part.features();
    let count = part.tokens() * part.features();
    x.floats_mut().slice(start..start + count).copy_from(part.floats());
}

pub(super) fn row(x: &Activation, token: usize) -> Vec<f32> {
    x.floats().slice(token * x.features()..(token + 1) * x.features()).read()
}

fn copy_columns(from: &Activation, first: usize, to: &mut Activation, to_first: usize, width: usize) {
    let (tokens, features, to_features) = (from.tokens(), from.features(), to.features());
    let args = [
        from.into(),
        Arg::count(features),
        Arg::count(first),
        to.into(),
        Arg::count(to_features),
        Arg::count(to_first),
        Arg::count(tokens),
        Arg::count(width),
    ];
    cuda::launch(from.device(), &KERNELS, "activation_columns", Grid::items(tokens * width), &args);
}

pub(super) fn columns(x: &Activation, columns: Range<usize>, out: &mut Activation) {
    assert!(columns.end <= x.features(), "columns below {}", x.features());
    copy_columns(x, columns.start, out, 0, columns.len());
}

pub(super) fn side_by_side(parts: &[&Activation], out: &mut Activation) {
    let mut first = 0;
    for part in parts {
        copy_columns(part, 0, out, first, part.features());
        first += part.features();
    }
}

pub(super) fn gather(x: &Activation, rows: &[usize], out: &mut Activation) {
    move_rows("activation_gather", x, &indices(x, rows), out);
}

pub(super) fn scatter(x: &Activation, rows: &[usize], out: &mut Activation) {
    assert_eq!(rows.len(), x.tokens(), "a row for each token");
    out.floats_mut().zero();
    move_rows("activation_scatter", x, &written(out, rows), out);
}

fn move_rows(kernel: &'static str, x: &Activation, rows: &Array<u32>, out: &mut Activation) {
    let features = x.features();
    let args = [x.into(), rows.into(), out.into(), Arg::count(rows.len()), Arg::count(features)];
    cuda::launch(x.device(), &KERNELS, kernel, Grid::items(rows.len() * features), &args);
}

pub(super) fn times(x: &mut Activation, factors: &[f32]) {
    let (device, tokens, features) = (x.device(), x.tokens(), x.features());
    let factors = cuda::upload(device, factors);
    let args = [x.into(), (&factors).into(), Arg::count(tokens), Arg::count(features)];
    cuda::launch(device, &KERNELS, "activation_times", Grid::items(tokens * features), &args);
}

pub(super) fn dot(x: &Activation, other: &Activation) -> Vec<f32> {
    let sums = Array::<f32>::zeros(x.device(), x.tokens());
    let args = [x.into(), other.into(), (&sums).into(), Arg::count(x.features())];
    cuda::launch(x.device(), &KERNELS, "activation_dot", Grid::rows(x.tokens(), x.features()), &args);
    sums.read()
}

pub(super) fn scatter_add(x: &mut Activation, rows: &[usize], factors: Option<&[f32]>, from: &Activation) {
    assert!(factors.is_none_or(|factors| factors.len() == rows.len()), "a factor for each row");
    let indices = written(x, rows);
    let factors = factors.map(|factors| cuda::upload(from.device(), factors));
    let args = [
        from.into(),
        (&indices).into(),
        factors.as_ref().map_or(Arg::NULL, Arg::from),
        x.into(),
        Arg::count(rows.len()),
        Arg::count(from.features()),
    ];
    let grid = Grid::items(rows.len() * from.features());
    cuda::launch(from.device(), &KERNELS, "activation_scatter_add", grid, &args);
}

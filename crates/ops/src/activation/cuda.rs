//! Copies and type conversions of activations in a GPU's memory.
use super::{Activation, Number};
use crate::cuda::{self, Arg, Grid, Source, Typed};
use crate::floats::{Floats, FloatsMut};
use std::ops::Range;
use tunesmith_device::{Array, Buffer, Device};

static KERNELS: Typed = Typed::new("activation", include_str!("activation.cu"));

impl Typed {
    /// The kernels for the number type that all of `operands` have.
    ///
    /// # Panics
    /// If the operands have different types.
    pub(crate) fn same(&'static self, operands: &[&Activation]) -> &'static Source {
        let number = operands[0].number();
        assert!(operands.iter().all(|operand| operand.number() == number), "activations of one type");
        self.of(number)
    }
}

impl From<&Activation> for Arg {
    fn from(x: &Activation) -> Self {
        Self::address(x.address())
    }
}

impl From<&mut Activation> for Arg {
    fn from(x: &mut Activation) -> Self {
        Self::address(x.address())
    }
}

/// Uploads row numbers of `of` for a kernel. They are checked here, because kernels do not check them.
fn indices(of: &Activation, rows: &[usize]) -> Array<u32> {
    if of.device().only_counts() {
        return Array::zeros(of.device(), rows.len());
    }
    assert!(rows.iter().all(|&row| row < of.tokens()), "rows below {}", of.tokens());
    let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
    cuda::upload(of.device(), &rows)
}

/// As [`indices`], for rows that a kernel writes. Each row has a thread of its own, so no row may come twice: they
/// rise.
fn written(of: &Activation, rows: &[usize]) -> Array<u32> {
    assert!(of.device().only_counts() || rows.is_sorted_by(|row, next| row < next), "rows that rise");
    indices(of, rows)
}

/// `to[to_first + i] = from[first + i]` for `count` numbers, converted to the type of `to` (rounded if that has fewer
/// bits).
pub(super) fn convert(from: &Activation, first: usize, to: &mut Activation, to_first: usize, count: usize) {
    assert!(first + count <= from.tokens() * from.features(), "numbers of the one");
    assert!(to_first + count <= to.tokens() * to.features(), "places of the other");
    let number = to.number();
    convert_at(to.device(), (from.address(), from.number()), first, (to.address(), number), to_first, count);
}

/// As [`convert`], where source and destination are given as addresses and number types.
pub(crate) fn convert_at(
    device: Device,
    (from, number): (u64, Number),
    first: usize,
    (to, to_number): (u64, Number),
    to_first: usize,
    count: usize,
) {
    // A thread converts as many numbers as fill 16 bytes in the wider of the two types.
    let per_thread = 16 / number.bytes().max(to_number.bytes()) as usize;
    let kernel = match number {
        Number::F32 => "activation_from_float",
        Number::F16 => "activation_from_f16",
        Number::Bf16 => "activation_from_bf16",
    };
    let args = [Arg::address(from), Arg::address(to), Arg::count(first), Arg::count(to_first), Arg::count(count)];
    cuda::launch(device, KERNELS.of(to_number), kernel, Grid::items(count.div_ceil(per_thread)), &args);
}

/// The memory of `x` as float32 words, whatever the type of its numbers.
fn words(x: &mut Activation) -> FloatsMut<'_> {
    let words = x.words();
    x.buffer.as_mut().expect("an activation has memory until it is dropped").floats_mut(0..words)
}

pub(super) fn zero(x: &mut Activation) {
    words(x).zero();
}

pub(super) fn copy(x: &Activation, out: &mut Activation) {
    let from = x.buffer.as_ref().expect("an activation has memory until it is dropped").floats(0..x.words());
    words(out).copy_from(from);
}

pub(super) fn rows(x: &Activation, first: usize, out: &mut Activation) {
    convert(x, first * x.features(), out, 0, out.tokens() * out.features());
}

pub(super) fn put_rows(x: &mut Activation, first: usize, part: &Activation) {
    convert(part, 0, x, first * part.features(), part.tokens() * part.features());
}

pub(super) fn row(x: &Activation, token: usize) -> Vec<f32> {
    assert!(token < x.tokens(), "a row of the activation");
    let floats = Buffer::new(x.device(), x.features());
    let floats = floats.floats(0..x.features());
    let (from, to) = ((x.address(), x.number()), (floats.address(), Number::F32));
    convert_at(x.device(), from, token * x.features(), to, 0, x.features());
    floats.read()
}

pub(super) fn from_rows(rows: &[f32], act: &mut Activation) {
    let device = act.device();
    match act.number() {
        Number::F32 => act.floats_mut().write(rows),
        Number::F16 | Number::Bf16 => from_floats(cuda::upload(device, rows).view(), act),
    }
}

pub(super) fn from_floats(rows: Floats<'_>, act: &mut Activation) {
    assert_eq!(rows.len(), act.tokens() * act.features(), "a number for each place");
    let to = (act.address(), act.number());
    convert_at(act.device(), (rows.address(), Number::F32), 0, to, 0, rows.len());
}

pub(super) fn to_rows(x: &Activation, rows: &mut [f32]) {
    match x.number() {
        Number::F32 => x.floats().read_into(rows),
        Number::F16 | Number::Bf16 => x.to(Number::F32).floats().read_into(rows),
    }
}

fn copy_columns(from: &Activation, first: usize, to: &mut Activation, to_first: usize, width: usize) {
    let (features, to_features) = (from.features(), to.features());
    copy_blocks((from, features, first), (to, to_features, to_first), from.tokens(), width);
}

/// Copies `width` numbers of each of `count` rows. Source and destination are given with the width of their rows and
/// the place of their first number.
fn copy_blocks(
    (from, features, first): (&Activation, usize, usize),
    (to, to_features, to_first): (&mut Activation, usize, usize),
    count: usize,
    width: usize,
) {
    let args = [
        from.into(),
        Arg::count(features),
        Arg::count(first),
        (&mut *to).into(),
        Arg::count(to_features),
        Arg::count(to_first),
        Arg::count(count),
        Arg::count(width),
    ];
    cuda::launch(from.device(), KERNELS.same(&[from, to]), "activation_columns", Grid::items(count * width), &args);
}

pub(super) fn split_parts(x: &Activation, widths: &[usize], parts: &mut [Activation]) {
    let group: usize = widths.iter().sum();
    let (mut first, count) = (0, x.tokens() * x.features() / group);
    for (part, &width) in parts.iter_mut().zip(widths) {
        copy_blocks((x, group, first), (part, width, 0), count, width);
        first += width;
    }
}

pub(super) fn join_parts(parts: &[&Activation], widths: &[usize], out: &mut Activation) {
    let group: usize = widths.iter().sum();
    let (mut first, count) = (0, out.tokens() * out.features() / group);
    for (part, &width) in parts.iter().zip(widths) {
        copy_blocks((part, width, 0), (out, group, first), count, width);
        first += width;
    }
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
    zero(out);
    move_rows("activation_scatter", x, &written(out, rows), out);
}

fn move_rows(kernel: &'static str, x: &Activation, rows: &Array<u32>, out: &mut Activation) {
    let features = x.features();
    let args = [x.into(), rows.into(), out.into(), Arg::count(rows.len()), Arg::count(features)];
    cuda::launch(x.device(), KERNELS.same(&[x, out]), kernel, Grid::items(rows.len() * features), &args);
}

pub(super) fn times(x: &mut Activation, factors: &[f32]) {
    times_by(x, cuda::upload(x.device(), factors).view());
}

/// As [`Activation::times`], with factors that are in the GPU's memory.
pub(crate) fn times_by(x: &mut Activation, factors: Floats<'_>) {
    let (device, tokens, features) = (x.device(), x.tokens(), x.features());
    assert_eq!(factors.len(), tokens, "a factor for each token");
    let args = [x.into(), factors.into(), Arg::count(tokens), Arg::count(features)];
    cuda::launch(device, KERNELS.same(&[x]), "activation_times", Grid::items(tokens * features), &args);
}

pub(super) fn dot(x: &Activation, other: &Activation) -> Vec<f32> {
    let mut sums = Array::<f32>::zeros(x.device(), x.tokens());
    dot_to(x, other, sums.view_mut());
    sums.read()
}

/// As [`Activation::dot`], but writes the sums to the GPU's memory, so that the host does not wait.
pub(crate) fn dot_to(x: &Activation, other: &Activation, sums: FloatsMut<'_>) {
    assert_eq!((x.tokens(), x.features()), (other.tokens(), other.features()), "both have one shape");
    assert_eq!(sums.len(), x.tokens(), "a place for each token");
    let args = [x.into(), other.into(), sums.into(), Arg::count(x.features())];
    cuda::launch(x.device(), KERNELS.same(&[x, other]), "activation_dot", Grid::rows(x.tokens(), x.features()), &args);
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
    cuda::launch(from.device(), KERNELS.same(&[from, x]), "activation_scatter_add", grid, &args);
}

//! Products in a GPU's memory, by cublasLt. It sees matrices column by column: an activation `[tokens, features]` is
//! `[features, tokens]` there, and `out = W x` needs nothing turned.
use super::{Init, Matrix, Store, Transposed};
use crate::activation::{Activation, Products};
use crate::cuda::{self, Arg, Grid, Source};
use crate::floats::{Floats, FloatsMut};
use tunesmith_device::cuda::{Number, Operand, Product};
use tunesmith_device::{Buffer, Device};

static KERNELS: Source = Source::new("gemm", include_str!("gemm.cu"));

/// Numbers of a matrix that are widened at once: 64 MiB.
const SLAB: usize = 16 << 20;

const fn operand(address: u64, number: Number, leading: usize, transposed: bool) -> Operand {
    Operand { address, number, leading: leading as u64, transposed, batch_stride: 0 }
}

/// The type that operands of products are rounded to.
const fn number(products: Products) -> Number {
    match products {
        Products::F32 => Number::F32,
        Products::Bf16 => Number::Bf16,
    }
}

/// Where numbers begin that products read: the floats themselves, or the same rounded to bfloat16, in memory that `kept` holds.
fn rounded(device: Device, floats: Floats<'_>, products: Products, kept: &mut Option<Buffer>) -> u64 {
    match products {
        Products::F32 => floats.address(),
        Products::Bf16 => {
            let count = floats.len();
            let halves = kept.get_or_insert_with(|| Buffer::new(device, count.div_ceil(2)));
            let to = halves.floats_mut(0..count.div_ceil(2));
            let address = to.address();
            cuda::launch(
                device,
                &KERNELS,
                "gemm_round",
                Grid::items(count),
                &[floats.into(), to.into(), Arg::count(count)],
            );
            address
        }
    }
}

/// A matrix `[rows, depth]` in a GPU's memory, as cublasLt reads it.
#[derive(Clone, Copy)]
struct Dense {
    address: u64,
    /// Each row's numbers lie side by side; else each column's.
    by_rows: bool,
    leading: usize,
}

pub(super) fn matmul_grouped(products: &mut [super::Product<'_>]) {
    for product in products {
        matmul(product, SLAB);
    }
}

/// Matrices that are not floats are widened in slabs of that many numbers, and at least a line.
pub(super) fn matmul(super::Product { out, init, terms }: &mut super::Product<'_>, slab: usize) {
    let (device, tokens, rows) = (out.device(), out.tokens(), out.features());
    if tokens == 0 {
        return;
    }
    if let Init::Bias(bias) = *init {
        let args = [bias.into(), (&mut **out).into(), Arg::count(tokens), Arg::count(rows)];
        cuda::launch(device, &KERNELS, "gemm_bias", Grid::items(tokens * rows), &args);
    }
    let to = out.floats().address();
    // What the next product is added to; nothing before the first where it starts at zero.
    let mut addend = match init {
        Init::Zero => None,
        Init::Bias(_) | Init::Out => Some(to),
        Init::Add(other) => Some(other.floats().address()),
    };
    let products = out.pool().products();
    let kind = number(products);
    for term in *terms {
        let (matrix, shape) = (term.matrix, [rows, term.x.features()]);
        let mut kept = None;
        let from = rounded(device, term.x.floats(), products, &mut kept);
        each_slab(device, slab, products, matrix, shape, |dense, row, column, [part_rows, part_depth]| {
            let x = operand(from + kind.bytes() * column as u64, kind, term.x.features(), false);
            let at = |address: u64| operand(address + 4 * row as u64, Number::F32, rows, false);
            let product = Product {
                m: part_rows as u64,
                n: tokens as u64,
                k: part_depth as u64,
                alpha: 1.0,
                beta: if addend.is_some() || column > 0 { 1.0 } else { 0.0 },
                a: operand(dense.address, kind, dense.leading, dense.by_rows),
                b: x,
                c: at(if column > 0 { to } else { addend.unwrap_or(to) }),
                d: at(to),
                batch: 1,
                tf32: false,
            };
            cuda::matmul(device, &product);
        });
        addend = Some(to);
    }
}

/// Calls `product` with the matrix `[rows, depth]` as floats: whole, or in slabs that are widened one after the other. Its
/// arguments: the slab, its first row and column, its shape.
fn each_slab(
    device: Device,
    slab: usize,
    products: Products,
    matrix: Matrix<'_>,
    [rows, depth]: [usize; 2],
    mut product: impl FnMut(Dense, usize, usize, [usize; 2]),
) {
    let Matrix { data, row, col } = matrix;
    // The stored lines that a slab is cut between: rows, or columns of a matrix that is seen transposed.
    let (by_rows, lines, width, stride) =
        if col == 1 && (row >= depth || rows == 1) { (true, rows, depth, row) } else { (false, depth, rows, col) };
    let regular = by_rows || (row == 1 && (col >= rows || depth == 1));
    if !regular {
        let numbers = (rows - 1) * row + (depth - 1) * col + 1;
        let mut wide = None;
        let floats = widened(device, data, 0..numbers, &mut wide);
        let packed = Buffer::new(device, rows * depth);
        let args = [floats.into(), packed.floats(0..rows * depth).into()];
        let counts = [rows, depth, row, col].map(Arg::count);
        cuda::launch(device, &KERNELS, "gemm_pack", Grid::items(rows * depth), &[&args[..], &counts].concat());
        let mut kept = None;
        let address = rounded(device, packed.floats(0..rows * depth), products, &mut kept);
        let dense = Dense { address, by_rows: true, leading: depth };
        return product(dense, 0, 0, [rows, depth]);
    }
    let leading = stride.max(width);
    let per_slab = match (data, products) {
        // As they are stored.
        (Store::F32(_), Products::F32) | (Store::Bf16(_), Products::Bf16) => lines,
        _ => (slab / leading).clamp(1, lines),
    };
    let (mut wide, mut kept) = (None, None);
    for first in (0..lines).step_by(per_slab) {
        let count = per_slab.min(lines - first);
        let start = first * stride;
        let range = start..start + (count - 1) * stride + width;
        let address = match (data, products) {
            (Store::Bf16(values), Products::Bf16) => values.slice(range).address(),
            _ => rounded(device, widened(device, data, range, &mut wide), products, &mut kept),
        };
        let dense = Dense { address, by_rows, leading };
        if by_rows {
            product(dense, first, 0, [count, depth]);
        } else {
            product(dense, 0, first, [rows, count]);
        }
    }
}

/// The numbers `range` as floats: themselves, or widened into `wide`, which is made for the first of several ranges, the longest.
fn widened<'a>(
    device: Device,
    data: Store<'a>,
    range: std::ops::Range<usize>,
    wide: &'a mut Option<Buffer>,
) -> Floats<'a> {
    let count = range.len();
    if let Store::F32(values) = data {
        return values.slice(range);
    }
    let wide = wide.get_or_insert_with(|| Buffer::new(device, count));
    match data {
        Store::F32(_) => {}
        Store::Bf16(values) => {
            let args = [values.slice(range).into(), wide.floats_mut(0..count).into(), Arg::count(count)];
            cuda::launch(device, &KERNELS, "gemm_widen", Grid::items(count), &args);
        }
        Store::Quantized(matrix) => matrix.widen_to(range.start, wide.floats_mut(0..count)),
    }
    wide.floats(0..count)
}

/// A copy as it is: cublasLt multiplies it transposed.
pub(super) fn transposed(x: &Activation) -> Activation {
    x.copy()
}

pub(super) fn outer(out: FloatsMut<'_>, [row, col]: [usize; 2], y: &Activation, x: &Transposed) {
    let (device, tokens, rows, cols) = (y.device(), y.tokens(), y.features(), x.features);
    if tokens == 0 {
        return;
    }
    let (products, mut kept) = (y.pool().products(), [None, None]);
    let [kept_y, kept_x] = &mut kept;
    let kind = number(products);
    let y = operand(rounded(device, y.floats(), products, kept_y), kind, rows, false);
    let x = operand(rounded(device, x.act.floats(), products, kept_x), kind, cols, false);
    let product = |to: u64, by_rows: bool, leading: usize, beta: f32| {
        let (left, right, m, n) = if by_rows { (x, y, cols, rows) } else { (y, x, rows, cols) };
        let d = operand(to, Number::F32, leading, false);
        let right = Operand { transposed: true, ..right };
        let (m, n, k) = (m as u64, n as u64, tokens as u64);
        let product = Product { m, n, k, alpha: 1.0, beta, a: left, b: right, c: d, d, batch: 1, tf32: false };
        cuda::matmul(device, &product);
    };
    if col == 1 && (row >= cols || rows == 1) {
        product(out.address(), true, row.max(cols), 1.0);
    } else if row == 1 && (col >= rows || cols == 1) {
        product(out.address(), false, col.max(rows), 1.0);
    } else {
        let sums = Buffer::new(device, rows * cols);
        let sums = sums.floats(0..rows * cols);
        product(sums.address(), true, cols, 0.0);
        let args = [sums.into(), out.into()];
        let counts = [rows, cols, row, col].map(Arg::count);
        cuda::launch(device, &KERNELS, "gemm_unpack_add", Grid::items(rows * cols), &[&args[..], &counts].concat());
    }
}

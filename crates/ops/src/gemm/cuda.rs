//! Matrix products on a GPU, by cublasLt. It sees matrices in column-major order: an activation `[tokens, features]` is
//! `[features, tokens]` there, and `out = W x` needs no transposed copy.
use super::{Init, Matrix, Store, Transposed};
use crate::activation::{Activation, Number, convert_at};
use crate::cuda::{self, Arg, Grid, Typed};
use crate::floats::{Floats, FloatsMut};
use crate::quant::{Quantized, fp8_rows};
use tunesmith_device::cuda::{Operand, OperandType, Product};
use tunesmith_device::{Buffer, Device, Slice};

pub(super) static KERNELS: Typed = Typed::new("gemm", include_str!("gemm.cu"));

/// The most bytes of a matrix that are converted at once: 128 MiB.
const SLAB: usize = 128 << 20;

fn operand(address: u64, number: impl Into<OperandType>, leading: usize, transposed: bool) -> Operand {
    Operand { address, number: number.into(), leading: leading as u64, transposed, batch_stride: 0 }
}

/// The number type of the operands of a product with `x` whose result goes to `out`: of 16 bits if `x` is, or if the
/// result's pool asks for it.
fn number_of(x: &Activation, out: &Activation) -> Number {
    match x.number() {
        Number::F32 => out.pool().products(),
        half => half,
    }
}

/// The address of memory for `count` numbers, which `kept` holds. It is allocated for the first of several uses, which
/// has to be the largest.
fn memory(device: Device, kept: &mut Option<Buffer>, count: usize, number: Number) -> u64 {
    let floats = (count * number.bytes() as usize).div_ceil(size_of::<f32>());
    kept.get_or_insert_with(|| Buffer::new(device, floats)).floats(0..floats).address()
}

/// The address of the numbers of `x` in the type `number`: its own, or those of a converted copy, which `kept` holds.
fn converted(x: &Activation, number: Number, kept: &mut Option<Buffer>) -> u64 {
    convert(x.device(), (x.address(), x.number()), x.tokens() * x.features(), number, kept)
}

/// As [`converted`], for numbers that are given by address and type.
fn convert(device: Device, (from, its): (u64, Number), count: usize, number: Number, kept: &mut Option<Buffer>) -> u64 {
    if its == number {
        return from;
    }
    let to = memory(device, kept, count, number);
    convert_at(device, (from, its), 0, (to, number), 0, count);
    to
}

/// A matrix `[rows, depth]` in a GPU's memory, as cublasLt can read it.
#[derive(Clone, Copy)]
struct Dense {
    address: u64,
    /// Whether the numbers of each row lie side by side; else those of each column do.
    by_rows: bool,
    leading: usize,
}

pub(super) fn matmul_grouped(products: &mut [super::Product<'_>]) {
    for product in products {
        matmul(product, SLAB);
    }
}

/// A matrix that is not stored in the operands' type is converted in slabs of `slab` bytes, of at least one line each.
pub(super) fn matmul(super::Product { out, init, terms }: &mut super::Product<'_>, slab: usize) {
    let (device, tokens, rows, number) = (out.device(), out.tokens(), out.features(), out.number());
    if tokens == 0 {
        return;
    }
    if let Init::Bias(bias) = *init {
        let args = [bias.into(), (&mut **out).into(), Arg::count(tokens), Arg::count(rows)];
        cuda::launch(device, KERNELS.of(number), "gemm_bias", Grid::items(tokens * rows), &args);
    }
    let to = out.address();
    // Where the sums that the next product is added to are; `None` before the first product if the result starts at
    // zero.
    let mut kept_addend = None;
    let mut addend = match init {
        Init::Zero => None,
        Init::Bias(_) | Init::Out => Some(to),
        Init::Add(other) => Some(converted(other, number, &mut kept_addend)),
    };
    // In 16 bits the last term comes first. It is an adapter's, which is small beside the weight's: the weight's
    // product is then added to it before the sum is rounded.
    let turned = number != Number::F32;
    for index in 0..terms.len() {
        let term = &terms[if turned { terms.len() - 1 - index } else { index }];
        let (matrix, shape) = (term.matrix, [rows, term.x.features()]);
        let kind = number_of(term.x, out);
        if kind != Number::F32
            && let Some(codes) = Codes::of(matrix, shape)
        {
            multiply_fp8(&codes, term.x, shape, (to, number), addend);
            addend = Some(to);
            continue;
        }
        let mut kept = None;
        let from = converted(term.x, kind, &mut kept);
        each_slab(device, slab, kind, matrix, shape, |dense, row, column, [part_rows, part_depth]| {
            let x = operand(from + kind.bytes() * column as u64, kind, term.x.features(), false);
            let at = |address: u64| operand(address + number.bytes() * row as u64, number, rows, false);
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
                tf32: out.pool().tf32(),
            };
            cuda::matmul(device, &product);
        });
        addend = Some(to);
    }
}

/// A matrix `[rows, depth]` in FP8, in the layout that tensor cores need, which sum along stored rows: the stored
/// matrix, or the copy of its transpose.
struct Codes<'a> {
    codes: Slice<'a, u8>,
    /// A scale for each row.
    scales: Floats<'a>,
}

impl<'a> Codes<'a> {
    /// The codes of a whole FP8 matrix, straight or transposed, on a GPU that multiplies FP8; `None` for other
    /// matrices.
    fn of(Matrix { data, row, col }: Matrix<'a>, [rows, depth]: [usize; 2]) -> Option<Self> {
        let Store::Quantized(Quantized::Eight(eight)) = data else { return None };
        let (codes, scales, turned) = eight.products()?;
        let fits = rows.is_multiple_of(16) && depth.is_multiple_of(16) && rows * depth == codes.len();
        if !fits {
            None
        } else if (row, col) == (depth, 1) && eight.width() == depth {
            Some(Self { codes, scales })
        } else if (row, col) == (1, rows) && eight.width() == rows {
            Some(Self { codes: turned.codes.view(), scales: turned.scales.view() })
        } else {
            None
        }
    }
}

/// `to = addend + matrix x` in FP8. `x` is quantized with one scale for each token. Sums are in float32 and come as
/// bfloat16; then both scales multiply them, and the addend is added.
fn multiply_fp8(
    matrix: &Codes<'_>,
    x: &Activation,
    [rows, depth]: [usize; 2],
    (to, number): (u64, Number),
    addend: Option<u64>,
) {
    let (device, tokens) = (x.device(), x.tokens());
    let (codes, scales) = fp8_rows(x);
    let mut kept = None;
    let sums = memory(device, &mut kept, tokens * rows, Number::Bf16);
    let d = operand(sums, Number::Bf16, rows, false);
    let product = Product {
        m: rows as u64,
        n: tokens as u64,
        k: depth as u64,
        alpha: 1.0,
        beta: 0.0,
        a: operand(matrix.codes.address(), OperandType::E4m3, depth, true),
        b: operand(codes.view().address(), OperandType::E4m3, depth, false),
        c: d,
        d,
        batch: 1,
        tf32: false,
    };
    cuda::matmul(device, &product);
    let args = [
        Arg::address(sums),
        matrix.scales.into(),
        (&scales).into(),
        addend.map_or(Arg::NULL, Arg::address),
        Arg::address(to),
        Arg::count(tokens),
        Arg::count(rows),
    ];
    cuda::launch(device, KERNELS.of(number), "gemm_scale", Grid::packs(tokens * rows, Number::Bf16), &args);
}

/// Calls `product` with the matrix `[rows, depth]` in the type `number`: as a whole, or in slabs that are converted one
/// after the other. The arguments of `product` are the slab, its first row and column, and its shape.
fn each_slab(
    device: Device,
    slab: usize,
    number: Number,
    matrix: Matrix<'_>,
    [rows, depth]: [usize; 2],
    mut product: impl FnMut(Dense, usize, usize, [usize; 2]),
) {
    let Matrix { data, row, col } = matrix;
    // A slab consists of whole stored lines: rows, or columns if the matrix is seen transposed.
    let (by_rows, lines, width, stride) =
        if col == 1 && (row >= depth || rows == 1) { (true, rows, depth, row) } else { (false, depth, rows, col) };
    let regular = by_rows || (row == 1 && (col >= rows || depth == 1));
    let (mut wide, mut kept) = (None, None);
    if !regular {
        let numbers = (rows - 1) * row + (depth - 1) * col + 1;
        let floats = stored(device, data, 0..numbers, Number::F32, &mut wide);
        let packed = Buffer::new(device, rows * depth);
        let packed = packed.floats(0..rows * depth);
        let args = [Arg::address(floats), packed.into()];
        let counts = [rows, depth, row, col].map(Arg::count);
        let source = KERNELS.of(Number::F32);
        cuda::launch(device, source, "gemm_pack", Grid::items(rows * depth), &[&args[..], &counts].concat());
        let address = convert(device, (packed.address(), Number::F32), rows * depth, number, &mut kept);
        let dense = Dense { address, by_rows: true, leading: depth };
        return product(dense, 0, 0, [rows, depth]);
    }
    let leading = stride.max(width);
    let per_slab = match (data, number) {
        // Used as they are stored.
        (Store::F32(_), Number::F32) | (Store::Bf16(_), Number::Bf16) => lines,
        // Slabs begin at addresses that tensor cores read fast.
        _ => match slab / number.bytes() as usize / leading {
            few @ ..16 => few.clamp(1, lines),
            many => (many / 16 * 16).min(lines),
        },
    };
    for first in (0..lines).step_by(per_slab) {
        let count = per_slab.min(lines - first);
        let start = first * stride;
        let range = start..start + (count - 1) * stride + width;
        let address = stored(device, data, range, number, &mut wide);
        let dense = Dense { address, by_rows, leading };
        if by_rows {
            product(dense, first, 0, [count, depth]);
        } else {
            product(dense, 0, first, [rows, count]);
        }
    }
}

/// The address of the numbers `range` in the type `number`: as they are stored, or of a converted copy, which `kept`
/// holds.
fn stored(
    device: Device,
    data: Store<'_>,
    range: std::ops::Range<usize>,
    number: Number,
    kept: &mut Option<Buffer>,
) -> u64 {
    let count = range.len();
    match data {
        Store::F32(values) => convert(device, (values.slice(range).address(), Number::F32), count, number, kept),
        Store::Bf16(values) => convert(device, (values.slice(range).address(), Number::Bf16), count, number, kept),
        Store::Quantized(matrix) => {
            let to = memory(device, kept, count, number);
            matrix.widen_as(range.start, count, (to, number));
            to
        }
        Store::Interleaved(_) => panic!("an interleaved matrix is on the CPU"),
    }
}

/// A plain copy, because cublasLt can multiply it transposed.
pub(super) fn transposed(x: &Activation) -> Activation {
    x.copy()
}

pub(super) fn outer(out: FloatsMut<'_>, [row, col]: [usize; 2], y: &Activation, x: &Transposed) {
    let (device, tokens, rows, cols) = (y.device(), y.tokens(), y.features(), x.features);
    if tokens == 0 {
        return;
    }
    let [mut kept_y, mut kept_x] = [None, None];
    let kind = match number_of(y, y) {
        Number::F32 => number_of(&x.act, &x.act),
        half => half,
    };
    let tf32 = y.pool().tf32();
    let y = operand(converted(y, kind, &mut kept_y), kind, rows, false);
    let x = operand(converted(&x.act, kind, &mut kept_x), kind, cols, false);
    let product = |to: u64, by_rows: bool, leading: usize, beta: f32| {
        let (left, right, m, n) = if by_rows { (x, y, cols, rows) } else { (y, x, rows, cols) };
        let d = operand(to, Number::F32, leading, false);
        let right = Operand { transposed: true, ..right };
        let (m, n, k) = (m as u64, n as u64, tokens as u64);
        let product = Product { m, n, k, alpha: 1.0, beta, a: left, b: right, c: d, d, batch: 1, tf32 };
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
        let source = KERNELS.of(Number::F32);
        cuda::launch(device, source, "gemm_unpack_add", Grid::items(rows * cols), &[&args[..], &counts].concat());
    }
}

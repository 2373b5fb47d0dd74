//! Matrix products of activations `[tokens, features]` with weights. A weight may be in floats or quantized, and may
//! have any two strides, so that one row-major weight serves forward and backward:
//!
//! - [`matmul`]: `out[t, m] = init + sum_k matrix[m, k] x[t, k]`, over terms (a weight and its LoRA B).
//! - [`matmul_grouped`]: several of these at once (q, k and v).
//! - [`outer`]: `out[m, n] += sum_t y[t, m] x[t, n]`, a weight's gradient.
#[cfg(test)]
mod amx_tests;
pub(crate) mod cpu;
mod cuda;
#[cfg(test)]
mod fp8_tests;
pub(crate) mod interleaved;
#[cfg(test)]
mod interleaved_tests;
mod operands;
#[cfg(test)]
mod pairs_tests;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use interleaved::Interleaved;
pub use operands::{Init, Matrix, Product, Store, Target, Term};

use crate::activation::{Activation, LANES, Pool};
use operands::holds;
use smallvec::SmallVec;
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// `out[t, m] = init + sum over terms of sum_k matrix[m, k] x[t, k]`.
///
/// `out` is `[tokens, m]`; each term's `x` is `[tokens, k]` and its matrix `[m, k]`. Terms are summed in their order;
/// the result has the bits of separate products that are added to `out` one after the other.
///
/// # Panics
/// If the shapes do not fit, or there is no term.
pub fn matmul(out: &mut Activation, init: Init<'_>, terms: &[Term<'_>]) {
    matmul_grouped(&mut [Product { out, init, terms }]);
}

/// Independent products as one parallel job (a grouped GEMM). Each result has the bits of [`matmul`]. The products may
/// share operands, and may differ in shape and in tokens.
///
/// # Panics
/// As [`matmul`], or if the products are not on one device.
pub fn matmul_grouped(products: &mut [Product<'_>]) {
    let Some(device) = products.first().map(|product| product.out.device()) else { return };
    for Product { out, init, terms } in &*products {
        let rows = out.features();
        assert_eq!(out.device(), device, "all products are on one device");
        assert!(!terms.is_empty(), "a product has a term");
        for term in *terms {
            assert_eq!(term.x.tokens(), out.tokens(), "x and out have the same tokens");
            check_matrix(&term.matrix, [rows, term.x.features()]);
        }
        check_init(*init, out);
    }
    match device {
        Device::Cpu => cpu::matmul_grouped(products),
        Device::Cuda(_) => cuda::matmul_grouped(products),
        Device::Meta => {}
    }
}

/// A product of few tokens with the transposed result `out[m, t] = sum_k matrix[m, k] x[t, k]`, `[rows, tokens]`, with
/// the bits of [`matmul`]. On the CPU, where tokens are lanes, this layout takes the bytes of one number for each sum
/// instead of those of a vector. `None` if there is no such product: on other devices, for more than sixteen tokens, or
/// for another layout of the matrix. `pool` is that of the result.
///
/// # Panics
/// If the matrix does not hold `[rows, x's features]`.
pub(crate) fn matmul_transposed(pool: &Arc<Pool>, rows: usize, term: Term<'_>) -> Option<Activation> {
    if pool.device() != Device::Cpu || !cpu::has_transposed(pool, &term) {
        return None;
    }
    check_matrix(&term.matrix, [rows, term.x.features()]);
    let mut out = pool.blank(rows, term.x.tokens());
    cpu::matmul_transposed(&mut out, term);
    Some(out)
}

/// Several products `y[m] = init + sum_k matrix[m, k] x[k]` with the same vector `x [k, 1]`
/// ([`Activation::to_vector`]), as one parallel job. Each entry has its number of rows `m`; each result is a vector
/// `[m, 1]` with the bits of [`matmul`] for one token.
///
/// # Panics
/// If the shapes do not fit, a sum starts with an activation, a matrix does not lie in rows, or the device is not the
/// CPU.
pub fn matvec_grouped(products: &[(usize, Init<'_>, Matrix<'_>)], x: &Activation) -> SmallVec<[Activation; 4]> {
    for &(rows, init, matrix) in products {
        check_vector(&matrix, rows, x);
        match init {
            Init::Zero => {}
            Init::Bias(bias) => assert_eq!(bias.len(), rows, "a bias for each row"),
            Init::Out | Init::Add(_) => panic!("a sum that begins with nothing or a bias"),
        }
    }
    let mut outs: SmallVec<_> = products.iter().map(|&(rows, ..)| x.pool().blank(rows, 1)).collect();
    cpu::matvec_grouped(&mut outs, products, x);
    outs
}

/// As [`matmul`] for one token, whose features are the vector `x [k, 1]` ([`Activation::to_vector`]), with the same
/// bits. `out` is `[1, m]`.
///
/// # Panics
/// If the shapes do not fit, the matrix does not lie in rows, or the device is not the CPU.
pub fn matvec(out: &mut Activation, init: Init<'_>, matrix: Matrix<'_>, x: &Activation) {
    assert_eq!(out.tokens(), 1, "one token");
    check_vector(&matrix, out.features(), x);
    check_init(init, out);
    cpu::matvec(out, init, matrix, x);
}

/// Asserts that the matrix can multiply a vector on the CPU.
fn check_vector(matrix: &Matrix<'_>, rows: usize, x: &Activation) {
    assert_eq!((x.device(), x.features(), matrix.col), (Device::Cpu, 1, 1), "a vector on the CPU, a matrix in rows");
    check_matrix(matrix, [rows, x.tokens()]);
}

/// Asserts that `init` fits a result of this shape.
fn check_init(init: Init<'_>, out: &Activation) {
    match init {
        Init::Zero | Init::Out => {}
        Init::Bias(bias) => assert_eq!(bias.len(), out.features(), "a bias for each row"),
        Init::Add(other) => {
            let fits = (other.tokens(), other.features()) == (out.tokens(), out.features());
            assert!(fits, "the addend has out's shape");
        }
    }
}

/// Asserts that a matrix has these rows and columns.
fn check_matrix(matrix: &Matrix<'_>, size: [usize; 2]) {
    assert!(size.iter().all(|&side| side > 0), "no empty product");
    assert!(holds(size, [matrix.row, matrix.col], matrix.data.len()), "the matrix holds {size:?}");
    if let Store::Interleaved(interleaved) = matrix.data {
        let by_rows = [matrix.row, matrix.col] == [interleaved.width(), 1];
        assert!(by_rows, "an interleaved matrix is read by rows");
    }
}

/// A transposed copy of an activation `[tokens, features]`, for products that sum over tokens ([`outer`]).
///
/// On the CPU its layout is `[block of 16 features][panel][16 tokens][16 features]`, with features padded by zeros to a
/// multiple of 16; or, if products round their operands,
/// `[block of 16 features][panel][8 pairs of tokens][16 features]` in bfloat16.
#[derive(Debug)]
pub struct Transposed {
    act: Activation,
    features: usize,
    in_pairs: bool,
}

impl Transposed {
    /// The transposed copy of `x [tokens, features]`.
    pub fn new(x: &Activation) -> Self {
        let padded = x.features().next_multiple_of(LANES);
        let in_pairs = x.device() == Device::Cpu && x.pool().in_pairs();
        let act = match x.device() {
            Device::Cpu => {
                // In pairs only half of this memory is used. It has the same size nevertheless, so that predictions of
                // memory, which know no processor, hold on every processor.
                let mut act = x.pool().act(x.panels() * LANES, padded);
                cpu::transposed(x, &mut act, in_pairs);
                act
            }
            Device::Cuda(_) => cuda::transposed(x),
            Device::Meta => x.pool().act(x.panels() * LANES, padded),
        };
        Self { act, features: x.features(), in_pairs }
    }
}

/// Adds `sum_t y[t, m] x[t, n]` to `out`: the gradient of a weight. `y` is `[tokens, m]`, `x` is `[tokens, n]`. Lanes
/// without a token have to be zero in one of them.
///
/// # Panics
/// If the shapes do not fit.
pub fn outer(out: Target<'_>, y: &Activation, x: &Transposed) {
    let (rows, cols) = (y.features(), x.features);
    assert_eq!(x.act.panels(), y.panels(), "the same tokens");
    let (out, row, col) = match out {
        Target::Rows(out) => (out, cols, 1),
        Target::Transposed(out) => (out, 1, rows),
        Target::Strided(out, row, col) => (out, row, col),
    };
    assert!(rows > 0 && cols > 0 && holds([rows, cols], [row, col], out.len()), "out holds [{rows}, {cols}]");
    assert!(row > (cols - 1) * col || col > (rows - 1) * row, "each number of out has a place of its own");
    match y.device() {
        Device::Cpu => cpu::outer(out.cpu_slice(), [row, col], y, x),
        Device::Cuda(_) => cuda::outer(out, [row, col], y, x),
        Device::Meta => {}
    }
}

//! Matrix products of activations `[tokens, features]`. A weight may be in floats or quantized, and has any two strides, so
//! that one row-major weight serves forward and backward:
//!
//! - [`matmul`]: `out[t, m] = init + sum_k matrix[m, k] x[t, k]`, over terms (a weight and its LoRA B).
//! - [`matmul_grouped`]: several of these at once (q, k and v).
//! - [`outer`]: `out[m, n] += sum_t y[t, m] x[t, n]`, a weight's gradient.
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
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::Device;

/// `out[t, m] = init + sum over terms of sum_k matrix[m, k] x[t, k]`.
///
/// `out` is `[tokens, m]`; each term's `x` is `[tokens, k]` and its matrix `[m, k]`. Terms are summed in their order, to the
/// bit as one product after the other would that adds to `out`.
///
/// # Panics
/// If the shapes do not fit, or there is no term.
pub fn matmul(out: &mut Activation, init: Init<'_>, terms: &[Term<'_>]) {
    matmul_grouped(&mut [Product { out, init, terms }]);
}

/// Products that do not depend on each other, as one parallel job (a grouped GEMM). Each is as [`matmul`] computes it, to the
/// bit. They may share operands, and differ in shape and in tokens.
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
            check(term, rows);
        }
        match init {
            Init::Zero | Init::Out => {}
            Init::Bias(bias) => assert_eq!(bias.len(), rows, "a bias for each row"),
            Init::Add(other) => {
                assert_eq!((other.tokens(), other.features()), (out.tokens(), rows), "the addend has out's shape");
            }
        }
    }
    match device {
        Device::Cpu => cpu::matmul_grouped(products),
        Device::Cuda(_) => cuda::matmul_grouped(products),
        Device::Meta => {}
    }
}

/// A product `sum_k matrix[m, k] x[t, k]` of few tokens as `[rows, tokens]`, which has the sums of [`matmul`] to the bit. On the CPU, where
/// tokens are lanes, that takes a number's bytes for each sum instead of a vector's. `None` where there is no such product: on other
/// devices, with more than sixteen tokens, or of another layout of the matrix. `pool` is that of the result.
///
/// # Panics
/// If the matrix does not hold `[rows, x's features]`.
pub(crate) fn matmul_transposed(pool: &Arc<Pool>, rows: usize, term: Term<'_>) -> Option<Activation> {
    if pool.device() != Device::Cpu || !cpu::has_transposed(pool.in_pairs(), &term) {
        return None;
    }
    check(&term, rows);
    let mut out = pool.blank(rows, term.x.tokens());
    cpu::matmul_transposed(&mut out, term);
    Some(out)
}

/// Asserts that a term has so many rows.
fn check(term: &Term<'_>, rows: usize) {
    let depth = term.x.features();
    assert!(rows > 0 && depth > 0, "no empty product");
    let fits = holds([rows, depth], [term.matrix.row, term.matrix.col], term.matrix.data.len());
    assert!(fits, "the matrix holds [{rows}, {depth}]");
    if let Store::Interleaved(matrix) = term.matrix.data {
        let by_rows = [term.matrix.row, term.matrix.col] == [matrix.width(), 1];
        assert!(by_rows, "an interleaved matrix is read by rows");
    }
}

/// An activation `[tokens, features]` with tokens as rows, for products that sum over tokens.
///
/// On the CPU it is `[panel][block of 16 features][16 tokens][16 features]`, features padded with zeros to a multiple of 16; or,
/// where products round their operands, `[panel][block of 16 features][8 pairs of tokens][16 features]` in bfloat16.
#[derive(Debug)]
pub struct Transposed {
    act: Activation,
    features: usize,
    in_pairs: bool,
}

impl Transposed {
    /// Copies `x [tokens, features]` to `[features, tokens]`.
    pub fn new(x: &Activation) -> Self {
        let padded = x.features().next_multiple_of(LANES);
        let in_pairs = x.device() == Device::Cpu && x.pool().in_pairs();
        let act = match x.device() {
            Device::Cpu => {
                // In pairs half of it is used: predictions of memory, which know no processor, hold on each.
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

/// Adds `sum_t y[t, m] x[t, n]` to `out`. `y` is `[tokens, m]`, `x` is `[tokens, n]`; unused lanes must be zero in one of them.
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

//! The norm of each row of a weight with a low-rank update, `||W_j + s (B A)_j||`, as `DoRA` needs it (Liu et al.,
//! 2024, <https://arxiv.org/abs/2402.09353>).
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::{Activation, Pool};
use crate::floats::Floats;
use crate::gemm::{Init, Matrix, Store, Term, matmul};
use std::sync::Arc;
use tunesmith_cpu_slice::CpuSlice as _;
use tunesmith_device::{Array, Device, FloatBuffer};

/// The low-rank update of a weight: `scale * B A`.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// A `[rank, in_features]`.
    pub a: Floats<'a>,
    /// B `[out_features, rank]`.
    pub b: Floats<'a>,
    /// The rank: rows of A, columns of B.
    pub rank: usize,
    /// What the product is multiplied by.
    pub scale: f32,
}

/// `||W_j + s (B A)_j||` for each row j of `weight [out_features, in_features]`, given `squares[j] = ||W_j||²`:
/// `[out_features]`, on the device of the weight, where `squares` has to be too.
///
/// The updated weight is never formed: `||W_j||² + 2 s (W A^T)_j · B_j + s² B_j (A A^T) B_j^T`.
pub fn row_norms(
    pool: &Arc<Pool>,
    weight: Store<'_>,
    squares: &Array<f64>,
    update: Update<'_>,
    in_features: usize,
) -> FloatBuffer {
    let Update { a, rank, .. } = update;
    let rows = Activation::from_floats(pool, a, in_features);
    // A W^T `[rank, out_features]` and A A^T `[rank, rank]`.
    let (mut aw, mut aa) = (pool.act_f32(rank, squares.len()), pool.act_f32(rank, rank));
    matmul(&mut aw, Init::Zero, &[Term { matrix: Matrix::rows(weight, in_features), x: &rows }]);
    matmul(&mut aa, Init::Zero, &[Term { matrix: Matrix::rows(a, in_features), x: &rows }]);
    match rows.device() {
        Device::Cpu => cpu::row_norms(squares.view().cpu_slice(), update, &aw, &aa).into(),
        Device::Cuda(_) => cuda::row_norms(squares, update, &aw, &aa),
        Device::Meta => FloatBuffer::zeros(Device::Meta, squares.len()),
    }
}

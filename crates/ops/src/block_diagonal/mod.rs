//! Products with a block-diagonal matrix D, for the rotations of OFT (Qiu et al., 2023,
//! <https://arxiv.org/abs/2306.07280>): each block of a token's features, as a row vector, is multiplied by its own
//! matrix, `out[t, b] = x[t, b] D_b`.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::Floats;
use tunesmith_device::Device;

/// The matrices on the diagonal, `[count, size, size]`.
#[derive(Debug, Clone, Copy)]
pub struct Diagonal<'a> {
    /// The matrices end to end, each row-major.
    pub matrices: Floats<'a>,
    /// Rows and columns of each.
    pub size: usize,
}

impl Diagonal<'_> {
    const fn count(&self) -> usize {
        self.matrices.len() / (self.size * self.size)
    }
}

/// `out = x D`, or `out = x D^T` if `transposed`; with `adds`, the product is added to what `out` holds. `x` and `out`
/// are `[tokens, features]`. If there are fewer matrices than blocks, the last matrix serves all further blocks.
///
/// # Panics
/// If the shapes do not fit.
pub fn times(diagonal: Diagonal<'_>, x: &Activation, transposed: bool, out: &mut Activation, adds: bool) {
    let size = diagonal.size;
    assert!(x.features().is_multiple_of(size) && diagonal.count() > 0, "whole blocks of {size}");
    assert_eq!((x.tokens(), x.features()), (out.tokens(), out.features()), "one shape");
    match x.device() {
        Device::Cpu => cpu::times(diagonal, x, transposed, out, adds),
        Device::Cuda(_) => cuda::times(diagonal, x, transposed, out, adds),
        Device::Meta => {}
    }
}

/// The gradient of each block's matrix, `sum_t x[t, b]^T d[t, b]`: `[features / size, size, size]` on the host, for
/// blocks of `size` features. `x` and `d` are `[tokens, features]`. Zeros on the meta device.
///
/// # Panics
/// If the shapes do not fit.
pub fn outer(size: usize, x: &Activation, d: &Activation) -> Vec<f32> {
    assert!(x.features().is_multiple_of(size), "whole blocks of {size}");
    assert_eq!((x.tokens(), x.features()), (d.tokens(), d.features()), "one shape");
    let mut out = vec![0.0f32; x.features() * size];
    match x.device() {
        Device::Cpu => cpu::outer(size, x, d, &mut out),
        Device::Cuda(_) => cuda::outer(size, x, d, &mut out),
        Device::Meta => {}
    }
    out
}

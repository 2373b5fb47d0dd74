//! The largest feature of each token, `argmax_j x[t, j]`: the most probable token of a vocabulary.
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// Each token's largest feature of `x [tokens, features]`, the first of equal ones: `[tokens]`. Zeros on the meta device.
pub fn argmax(x: &Activation) -> Vec<u32> {
    match x.device() {
        Device::Cpu => cpu::argmax(x),
        Device::Cuda(_) => cuda::argmax(x),
        Device::Meta => vec![0; x.tokens()],
    }
}

//! The largest feature of each token, `argmax_j x[t, j]`: the most probable token of a vocabulary.
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// What a kernel writes for a token without a valid argmax.
const NONE: u32 = u32::MAX;

/// The number of each token's largest feature of `x [tokens, features]`, the first of equal ones: `[tokens]`. `None` if
/// one of the token's features is NaN or its largest is infinite. All are 0 on the meta device.
pub fn argmax(x: &Activation) -> Vec<Option<u32>> {
    let places = match x.device() {
        Device::Cpu => cpu::argmax(x),
        Device::Cuda(_) => cuda::argmax(x),
        Device::Meta => vec![0; x.tokens()],
    };
    places.into_iter().map(|place| (place != NONE).then_some(place)).collect()
}

/// The number of each feature's largest token of `x [tokens, features]`, by the rules of [`argmax`]: `[features]`. On
/// the CPU only.
pub(crate) fn argmax_of_tokens(x: &Activation) -> Vec<Option<u32>> {
    cpu::argmax_of_tokens(x).into_iter().map(|place| (place != NONE).then_some(place)).collect()
}

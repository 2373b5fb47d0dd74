//! Activation functions of plain (not gated) MLPs, value by value: `y = f(x)` and `dx = f'(x) dy`. Hendrycks and
//! Gimpel, "Gaussian Error Linear Units", 2016, <https://arxiv.org/abs/1606.08415>, has GELU and both of its
//! approximations.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use tunesmith_device::Device;

/// The activation function of a plain MLP, value by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// GELU by erf, `x/2 (1 + erf(x / sqrt(2)))`: ViT, DINOv2, LLaVA's projector.
    Gelu,
    /// GELU by tanh, `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`: SigLIP.
    GeluTanh,
    /// Quick GELU, `x sigmoid(1.702 x)`: CLIP.
    QuickGelu,
    /// SiLU, `x sigmoid(x)`.
    Silu,
    /// `ReLU`, `max(x, 0)`; its slope at 0 is 0, as in `PyTorch`.
    Relu,
    /// Squared `ReLU`, `max(x, 0)^2`: Nemotron-H. So et al., "Primer", 2021.
    Relu2,
    /// `tanh(x)`: the routers of Gemma 3n's `AltUp` streams.
    Tanh,
}

/// `y = f(x)`, as a new activation `[tokens, features]`.
pub fn forward(function: Function, x: &Activation) -> Activation {
    let mut out = x.pool().blank(x.tokens(), x.features());
    match x.device() {
        Device::Cpu => cpu::forward(function, x, &mut out),
        Device::Cuda(_) => cuda::forward(function, x, &mut out),
        Device::Meta => {}
    }
    out
}

/// Turns `x` into its gradient, in place, given `d_out`, the gradient of [`forward`]'s result; both are
/// `[tokens, features]`.
///
/// # Panics
/// If the shapes differ.
pub fn backward(function: Function, x: &mut Activation, d_out: &Activation) {
    assert_eq!((x.tokens(), x.features()), (d_out.tokens(), d_out.features()), "both have one shape");
    match x.device() {
        Device::Cpu => cpu::backward(function, x, d_out),
        Device::Cuda(_) => cuda::backward(function, x, d_out),
        Device::Meta => {}
    }
}

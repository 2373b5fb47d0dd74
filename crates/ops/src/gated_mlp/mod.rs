//! The middle of a gated MLP, `out = act(gate) * up`: SiLU (`SwiGLU`), GELU by erf or tanh (`GeGLU`), a sigmoid
//! (`GLU`), or no function. Mixers use it too, to gate their output. Shazeer, "GLU Variants Improve Transformer", 2020;
//! Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
pub(crate) use cpu::both;
use tunesmith_device::Device;

/// The activation function of the gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// SiLU, `x sigmoid(x)`: Llama, Qwen.
    Silu,
    /// GELU by erf, `x/2 (1 + erf(x / sqrt(2)))`: Pixtral's encoder.
    Gelu,
    /// GELU by tanh, `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
    /// Sigmoid, `1 / (1 + exp(-x))`: the gate of an attention's output.
    Sigmoid,
    /// No function: the result is `gate * up`.
    Identity,
    /// gpt-oss: `out = (up + 1) g sigmoid(alpha g)`, with `g = min(gate, limit)` and `up` clamped to `±limit`. Clamped
    /// values have no gradient.
    Clamped {
        /// The factor within the sigmoid.
        alpha: f32,
        /// The upper bound of gate, and the bound of up in both directions.
        limit: f32,
    },
}

/// `act(gate) * up`, all `[tokens, features]`.
///
/// # Panics
/// If the shapes differ.
pub fn forward(act: Gate, gate: &Activation, up: &Activation) -> Activation {
    assert_eq!((gate.tokens(), gate.features()), (up.tokens(), up.features()), "gate and up have one shape");
    let mut out = gate.pool().blank(gate.tokens(), gate.features());
    match gate.device() {
        Device::Cpu => cpu::forward(act, gate, up, &mut out),
        Device::Cuda(_) => cuda::forward(act, gate, up, &mut out),
        Device::Meta => {}
    }
    out
}

/// Turns `gate` and `up` into their gradients, in place, given `d_out`, the gradient of [`forward`]'s result. All are
/// `[tokens, features]`.
///
/// # Panics
/// If the shapes differ.
pub fn backward(act: Gate, gate: &mut Activation, up: &mut Activation, d_out: &Activation) {
    for other in [&*up, d_out] {
        assert_eq!((gate.tokens(), gate.features()), (other.tokens(), other.features()), "all have one shape");
    }
    match gate.device() {
        Device::Cpu => cpu::backward(act, gate, up, d_out),
        Device::Cuda(_) => cuda::backward(act, gate, up, d_out),
        Device::Meta => {}
    }
}

//! The gated MLP's middle: `out = act(gate) * up`, with SiLU (`SwiGLU`), GELU by erf or tanh (`GeGLU`), a sigmoid (`GLU`),
//! or no function. Mixers gate their output with it too. Shazeer, "GLU
//! Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
pub(crate) use cpu::both;
use tunesmith_device::Device;

/// What the gate goes through.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// SiLU, `x sigmoid(x)`: Llama, Qwen.
    Silu,
    /// `x` times the normal distribution's cumulative probability of it, by erf: Pixtral's encoder.
    Gelu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
    /// `1 / (1 + exp(-x))`: the gate of an attention's output.
    Sigmoid,
    /// `x`: the result is `gate * up`.
    Identity,
    /// `out = (up + 1) g sigmoid(alpha g)` with `g = min(gate, limit)` and `up` within `±limit`: gpt-oss. What is cut has no
    /// gradient.
    Clamped {
        /// Factor within the sigmoid.
        alpha: f32,
        /// Where gate and up are cut.
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

/// Turns `gate` and `up` into their gradients, given that of [`forward`]'s result; all `[tokens, features]`.
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

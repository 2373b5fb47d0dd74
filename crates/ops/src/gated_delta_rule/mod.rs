//! The gated delta rule, the mixer of the linear-attention layers of Qwen3.5 and OLMo Hybrid: linear attention with a state
//! `S [key_dim, value_dim]` of each value head, which decays and is corrected token by token. Yang et al., "Gated Delta
//! Networks", 2024 (<https://arxiv.org/abs/2412.06464>); the formulas are those of `torch_recurrent_gated_delta_rule`
//! in Transformers' Qwen3.5.
//!
//! For a token with the inputs `q`, `k`, `v`, `b`, `a` of a value head, where `S` is the state before the token and `S'` that
//! after it:
//! - `q̂ = q / sqrt(sum q^2 + 1e-6) / sqrt(key_dim)`, `k̂ = k / sqrt(sum k^2 + 1e-6)`;
//! - `beta = beta_max sigmoid(b)`, `g = -exp(A_log) softplus(a + dt_bias)`;
//! - `T = exp(g) S`, `u = beta (v - T^T k̂)`, `S' = T + k̂ u^T`, `o = S'^T q̂`.
//!
//! Backward, from the last token to the first, with `c = beta du`: `dS' += q̂ do^T`, `dq̂ = S' do`, `du = dS'^T k̂`, `dv = c`,
//! `dbeta = du (v - T^T k̂)`, `dk̂ = dS' u - T c`, `dT = dS' - k̂ c^T`, `dg = sum dT T`, `dS = exp(g) dT`.
//!
//! States are float32, whatever the type of activations. Each sequence starts with a state of zeros, or with a given
//! one.
mod cpu;
mod cuda;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::activation::Activation;
use crate::floats::Floats;
use crate::recurrence::{Shape, State, check_sequences};
use std::ops::Range;
use tunesmith_device::Device;

/// The epsilon of the L2 norm of `q̂` and `k̂`: it is added to the sum of squares under the root.
const NORM_EPS: f32 = 1e-6;

/// The numbers of heads, and their widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// The number of query and key heads.
    pub key: usize,
    /// The number of value heads, which is also that of b, a and the output. A multiple of `key`: successive value
    /// heads share a key head.
    pub value: usize,
    /// Features of one head of q and k.
    pub key_dim: usize,
    /// Features of one head of v and of the output.
    pub value_dim: usize,
}

impl Heads {
    /// Features of q (and of k), all heads together.
    pub const fn keys(&self) -> usize {
        self.key * self.key_dim
    }

    /// Features of v (and of the output), all heads together.
    pub const fn values(&self) -> usize {
        self.value * self.value_dim
    }

    /// The sizes of the recurrent state.
    pub const fn state(&self) -> Shape {
        Shape { heads: self.value, rows: self.key_dim, columns: self.value_dim }
    }
}

/// The operands of the rule.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// q, k and v side by side, `[tokens, 2 key * key_dim + value * value_dim]`.
    pub qkv: &'a Activation,
    /// `b`, `[tokens, value]`: `beta = beta_max sigmoid(b)`.
    pub b: &'a Activation,
    /// `a`, `[tokens, value]`: `g = -exp(A_log) softplus(a + dt_bias)`.
    pub a: &'a Activation,
    /// `A_log`, `[value]`.
    pub a_log: Floats<'a>,
    /// `dt_bias`, `[value]`.
    pub dt_bias: Floats<'a>,
    /// The largest possible `beta`: 1, or 2 in OLMo Hybrid, where a state may change its sign.
    pub beta_max: f32,
}

impl Inputs<'_> {
    fn check(&self, heads: Heads) {
        let (tokens, value) = (self.qkv.tokens(), heads.value);
        assert!(heads.key > 0 && heads.value.is_multiple_of(heads.key), "value heads are a multiple of key heads");
        assert_eq!(self.qkv.features(), 2 * heads.keys() + heads.values(), "q, k and v of all heads");
        for gate in [self.a, self.b] {
            assert_eq!((gate.tokens(), gate.features()), (tokens, value), "a and b of each token and value head");
        }
        assert_eq!((self.a_log.len(), self.dt_bias.len()), (value, value), "constants of each value head");
    }
}

/// The outputs `[tokens, value * value_dim]`. `sequences` are the token ranges of the sequences. With `states`, one for
/// each sequence, a sequence continues from its state, which is then replaced by the state after its last token.
///
/// # Panics
/// If the shapes do not fit.
pub fn forward(
    inputs: Inputs<'_>,
    heads: Heads,
    sequences: &[Range<usize>],
    states: Option<&mut [&mut State]>,
) -> Activation {
    inputs.check(heads);
    check_sequences(inputs.qkv.tokens(), sequences, states.as_deref(), heads.state());
    let mut out = inputs.qkv.pool().act(inputs.qkv.tokens(), heads.values());
    match inputs.qkv.device() {
        Device::Cpu => cpu::forward(inputs, heads, sequences, states, &mut out),
        Device::Cuda(_) => cuda::forward(inputs, heads, sequences, states, &mut out),
        Device::Meta => {}
    }
    out
}

/// The gradients of [`forward`]'s inputs.
#[derive(Debug)]
pub struct Gradients {
    /// The gradient of q, k and v side by side, in the shape of [`Inputs::qkv`].
    pub qkv: Activation,
    /// The gradient of `b`, `[tokens, value]`.
    pub b: Activation,
    /// The gradient of `a`, `[tokens, value]`. The gradient of `dt_bias` is its sum over tokens.
    pub a: Activation,
    /// `[tokens, value]` in float32: its sum over tokens is the gradient of `A_log`.
    pub a_log: Activation,
}

/// The gradients of the inputs, from `dy [tokens, value * value_dim]`, the gradient of [`forward`]'s outputs. Every
/// sequence has to have started with a state of zeros.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(inputs: Inputs<'_>, heads: Heads, sequences: &[Range<usize>], dy: &Activation) -> Gradients {
    inputs.check(heads);
    check_sequences(inputs.qkv.tokens(), sequences, None, heads.state());
    assert_eq!((dy.tokens(), dy.features()), (inputs.qkv.tokens(), heads.values()), "a gradient for each output");
    let Inputs { qkv, b, a, .. } = inputs;
    let a_log = a.pool().act_f32(a.tokens(), heads.value);
    let mut d = Gradients { qkv: qkv.like(), b: b.like(), a: a.like(), a_log };
    match qkv.device() {
        Device::Cpu => cpu::backward(inputs, heads, sequences, dy, &mut d),
        Device::Cuda(_) => cuda::backward(inputs, heads, sequences, dy, &mut d),
        Device::Meta => drop(cpu::memory(inputs, heads)),
    }
    d
}

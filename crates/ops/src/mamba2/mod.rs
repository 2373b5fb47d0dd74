//! Mamba 2: a selective state space with a state `S [state, dim]` of each head, which decays and adds a token's input. Dao and
//! Gu, "Transformers are SSMs", 2024 (<https://arxiv.org/abs/2405.21060>); the formulas are those of `mamba2_chunk_scan` in
//! Transformers' `GraniteMoeHybrid`.
//!
//! For a token with the inputs `x [dim]` and `dt` of a head, and `B [state]` and `C [state]` of the head's group, where `S` is the
//! state before the token and `S'` that after it:
//! - `t = softplus(dt + dt_bias)`, clamped to both limits, and `g = -exp(A_log) t`;
//! - `S' = exp(g) S + B (t x)^T`, `y = S'^T C + D x`.
//!
//! Backward, from the last token to the first: `dS' += C dy^T`, `dC = S' dy`, `du = dS'^T B`, `dx = t du + D dy`, `dB = dS' (t x)`,
//! `dg = sum dS' exp(g) S`, `dt = (du x - exp(A_log) dg) sigmoid(dt + dt_bias)` where `t` is within its limits, else 0,
//! `dD = dy x`, `dS = exp(g) dS'`.
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

/// The numbers of heads, and their widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// The number of heads of x, dt and the output. A multiple of `groups`: successive heads share B and C.
    pub count: usize,
    /// The number of groups, each with one B and one C.
    pub groups: usize,
    /// Features of one head of x and of the output.
    pub dim: usize,
    /// Features of B (and of C) in one group: the size of the state.
    pub state: usize,
}

impl Heads {
    /// Features of x (and of the output), all heads together.
    pub const fn values(&self) -> usize {
        self.count * self.dim
    }

    /// Features of x, B and C side by side.
    pub const fn features(&self) -> usize {
        self.values() + 2 * self.groups * self.state
    }

    /// The sizes of the recurrent state.
    pub const fn state(&self) -> Shape {
        Shape { heads: self.count, rows: self.state, columns: self.dim }
    }
}

/// The operands of the state space.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// x of all heads, B of all groups and C of all groups, side by side: `[tokens, features]`.
    pub xbc: &'a Activation,
    /// `dt` before its bias, `[tokens, heads]`.
    pub dt: &'a Activation,
    /// `A_log`, `[heads]`: the logarithm of the decay rate.
    pub a_log: Floats<'a>,
    /// `D`, `[heads]`: the weight of x itself in the output.
    pub d: Floats<'a>,
    /// `dt_bias`, `[heads]`.
    pub dt_bias: Floats<'a>,
    /// The smallest and the largest time step `t`, which clamp it.
    pub limits: [f32; 2],
}

impl Inputs<'_> {
    fn check(&self, heads: Heads) {
        assert!(heads.groups > 0 && heads.count.is_multiple_of(heads.groups), "heads are a multiple of groups");
        assert_eq!(self.xbc.features(), heads.features(), "x, B and C of all heads and groups");
        assert_eq!(
            (self.dt.tokens(), self.dt.features()),
            (self.xbc.tokens(), heads.count),
            "dt of each token and head"
        );
        let constants = [self.a_log, self.d, self.dt_bias].map(Floats::len);
        assert_eq!(constants, [heads.count; 3], "constants of each head");
    }
}

/// The outputs `[tokens, heads * dim]`. `sequences` are the token ranges of the sequences. With `states`, one for each
/// sequence, a sequence continues from its state, which is then replaced by the state after its last token.
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
    check_sequences(inputs.xbc.tokens(), sequences, states.as_deref(), heads.state());
    let mut out = inputs.xbc.pool().act(inputs.xbc.tokens(), heads.values());
    match inputs.xbc.device() {
        Device::Cpu => cpu::forward(inputs, heads, sequences, states, &mut out),
        Device::Cuda(_) => cuda::forward(inputs, heads, sequences, states, &mut out),
        Device::Meta => {}
    }
    out
}

/// The gradients of [`forward`]'s inputs.
#[derive(Debug)]
pub struct Gradients {
    /// The gradient of x, B and C side by side, in the shape of [`Inputs::xbc`].
    pub xbc: Activation,
    /// The gradient of `dt`, `[tokens, heads]`. The gradient of `dt_bias` is its sum over tokens.
    pub dt: Activation,
    /// `[tokens, heads]` in float32: its sum over tokens is the gradient of `A_log`.
    pub a_log: Activation,
    /// `[tokens, heads]` in float32: its sum over tokens is the gradient of `D`.
    pub d: Activation,
}

/// The gradients of the inputs, from `dy [tokens, heads * dim]`, the gradient of [`forward`]'s outputs. Every sequence
/// has to have started with a state of zeros.
///
/// # Panics
/// If the shapes do not fit.
pub fn backward(inputs: Inputs<'_>, heads: Heads, sequences: &[Range<usize>], dy: &Activation) -> Gradients {
    inputs.check(heads);
    check_sequences(inputs.xbc.tokens(), sequences, None, heads.state());
    assert_eq!((dy.tokens(), dy.features()), (inputs.xbc.tokens(), heads.values()), "a gradient for each output");
    let Inputs { xbc, dt, .. } = inputs;
    let by_token = || dt.pool().act_f32(dt.tokens(), heads.count);
    let mut d = Gradients { xbc: xbc.like(), dt: dt.like(), a_log: by_token(), d: by_token() };
    match xbc.device() {
        Device::Cpu => cpu::backward(inputs, heads, sequences, dy, &mut d),
        Device::Cuda(_) => cuda::backward(inputs, heads, sequences, dy, &mut d),
        Device::Meta => drop(cpu::memory(inputs, heads)),
    }
    d
}

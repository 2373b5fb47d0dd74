//! The parts of a block, beside attention, in which a token takes from those before it.

/// A convolution over a few tokens between two gates, `out(C * conv(B * x))` with `[B, C, x] = in_proj(h)` (LFM2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShortConvSpec {
    /// Tokens that it looks at, the token itself included.
    pub kernel: usize,
    /// Whether its modules have biases.
    pub bias: bool,
}

/// What the modules of linear attention are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaNetNames {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, `conv1d`, `norm`, `out_proj`.
    Qwen,
    /// As [`DeltaNetNames::Qwen`], with `in_proj_qkvz` and `in_proj_ba`, whose rows are in groups: of each head of keys q and k, then
    /// v and z of its heads of values; and b and a of these (Qwen3-Next).
    QwenNext,
}

/// Linear attention by the gated delta rule, behind a convolution (Qwen3.5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaNetSpec {
    /// What its modules are called.
    pub names: DeltaNetNames,
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a head of q and k.
    pub key_dim: usize,
    /// Width of a head of v.
    pub value_dim: usize,
    /// Tokens that the convolution on q, k and v looks at, the token itself included.
    pub kernel: usize,
}

impl DeltaNetSpec {
    /// Width of q, k and v side by side.
    pub const fn qkv_size(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_size()
    }

    /// Width of v, and of the output.
    pub const fn value_size(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

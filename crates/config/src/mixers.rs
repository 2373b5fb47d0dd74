//! The parts of a block, beside plain attention, in which a token takes from those before it.

/// A convolution over a few tokens between two gates, `out(C * conv(B * x))` with `[B, C, x] = in_proj(h)` (LFM2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShortConvSpec {
    /// Tokens that it looks at, the token itself included.
    pub kernel: usize,
    /// Whether its modules have biases.
    pub bias: bool,
}

/// Linear attention by the gated delta rule, behind a convolution (Qwen3.5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaNetSpec {
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

/// How multi-head latent attention makes queries, keys and values (`DeepSeek`): from vectors of a few features, the latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentSpec {
    /// Features of the latent that queries are made of (`q_lora_rank`); `None`: they are made of the block's input.
    pub query_rank: Option<usize>,
    /// Features of the latent that keys and values are made of (`kv_lora_rank`).
    pub kv_rank: usize,
    /// Features of a query and a key that do not turn, the first ones (`qk_nope_head_dim`).
    pub nope_dim: usize,
    /// Features of a query and a key that turn (`qk_rope_head_dim`). Those of keys are the same for all heads.
    pub rope_dim: usize,
    /// Features of a value (`v_head_dim`).
    pub value_dim: usize,
}

impl LatentSpec {
    /// Added to the mean square in the norms on latents, whatever `rms_norm_eps` is: the class in Transformers names none.
    pub const EPS: f32 = 1e-6;
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

//! The parts of a block, other than plain attention, in which a token reads from those before it.

/// A convolution over a few tokens between two gates, `out(C * conv(B * x))` with `[B, C, x] = in_proj(h)` (LFM2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShortConvSpec {
    /// Tokens that it looks at, the token itself included.
    pub kernel: usize,
    /// Whether its modules have biases.
    pub bias: bool,
}

/// Mamba 2: a selective state space behind a convolution, with a gate and a norm on its output (Granite 4, Nemotron-H).
#[derive(Debug, Clone, PartialEq)]
pub struct MambaSpec {
    /// Heads of the state space.
    pub heads: usize,
    /// Groups of B and C, and of the norm; divides `heads`.
    pub groups: usize,
    /// Features of a head of the state space.
    pub dim: usize,
    /// Width of B, and of C.
    pub state: usize,
    /// Tokens that the convolution on x, B and C looks at, the token itself included.
    pub kernel: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the projections have biases.
    pub bias: bool,
    /// The smallest and the largest time step.
    pub limits: [f64; 2],
}

impl MambaSpec {
    /// Width of x, of the gate and of what `out_proj` reads: `heads * dim`.
    pub const fn inner_size(&self) -> usize {
        self.heads * self.dim
    }

    /// Width of x, B and C side by side.
    pub const fn conv_size(&self) -> usize {
        self.inner_size() + 2 * self.groups * self.state
    }
}

/// What the modules of linear attention are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaNetNames {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, `conv1d`, `norm`, `out_proj`.
    Qwen,
    /// As [`DeltaNetNames::Qwen`], with `in_proj_qkvz` and `in_proj_ba`, whose rows are in groups: of each head of keys q and k, then
    /// v and z of its heads of values; and b and a of these (Qwen3-Next).
    QwenNext,
    /// `q_proj`, `k_proj`, `v_proj`, `g_proj`, `b_proj`, `a_proj`, `q_conv1d`, `k_conv1d`, `v_conv1d`, `o_norm`, `o_proj`.
    Olmo,
}

impl DeltaNetNames {
    /// The norm on each head of the output.
    pub const fn norm(self) -> &'static str {
        match self {
            Self::Qwen | Self::QwenNext => "norm",
            Self::Olmo => "o_norm",
        }
    }
}

/// Linear attention by the gated delta rule, behind a convolution (Qwen3.5, Qwen3-Next, OLMo Hybrid).
#[derive(Debug, Clone, PartialEq)]
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
    /// What the rule's `beta` is at most: 1 or 2.
    pub beta_max: f64,
    /// Added to the mean square in the norm on each head of the output.
    pub norm_eps: f64,
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

    /// Width of q, and of k.
    pub const fn key_size(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// The convolution's tensors, with the channels of each.
    pub fn convolutions(&self) -> Vec<(&'static str, usize)> {
        match self.names {
            DeltaNetNames::Qwen | DeltaNetNames::QwenNext => vec![("conv1d", self.qkv_size())],
            DeltaNetNames::Olmo => {
                let (key, value) = (self.key_size(), self.value_size());
                vec![("q_conv1d", key), ("k_conv1d", key), ("v_conv1d", value)]
            }
        }
    }

    /// Width of v, and of the output.
    pub const fn value_size(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

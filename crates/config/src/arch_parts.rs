//! The parts of a decoder that differ between families: norms, activations, and kinds of blocks.
use super::mixers::{DeltaNetSpec, LatentSpec, MambaSpec, ShortConvSpec};
use super::vision::Pointwise;

/// Embeddings that each block has for itself, beside those of the stream (Gemma 3n and 4): a block gates its own, projects them and adds
/// them to the stream. They are the sum of a table's row and of a projection of the stream's embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerSpec {
    /// Rows of the table. In Gemma 3n tokens beyond them have the first row.
    pub vocab_size: usize,
    /// Width of a block's own.
    pub width: usize,
    /// Tokens of the vocabulary that the table was made for.
    pub tokens: usize,
}

/// Several residual streams, of which a block computes one: the others are predicted before it and corrected after it (`AltUp`, Gemma
/// 3n). Beside attention each block has a low-rank branch (Laurel).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AltUpSpec {
    /// How many there are, at least 2.
    pub streams: usize,
    /// The one that blocks compute.
    pub active: usize,
    /// Rank of the branch beside attention.
    pub laurel_rank: usize,
    /// The largest size of a weight of predictions and corrections in training.
    pub coef_clip: f64,
}

/// Which places of a decoder block have an RMS norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and before the MLP (Llama).
    Pre,
    /// Before and after both (Gemma 2 and 3).
    Sandwich,
    /// After both, before they join the residual stream (OLMo 2).
    Post,
}

impl NormPlacement {
    /// Module names within a block, in the order: before attention, after attention, before the MLP, after the MLP.
    pub const fn names(self) -> [Option<&'static str>; 4] {
        match self {
            Self::Pre => [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
            Self::Sandwich => [
                Some("input_layernorm"),
                Some("post_attention_layernorm"),
                Some("pre_feedforward_layernorm"),
                Some("post_feedforward_layernorm"),
            ],
            Self::Post => [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")],
        }
    }
}

/// RMS norms on queries and keys, before the rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// No norm on queries and keys.
    None,
    /// A weight of `[head_dim]`, which all heads share.
    Head,
    /// No weights: each head has a mean square of 1 (Muse Glimmer).
    Weightless,
    /// A weight of `[heads * head_dim]` over all heads together.
    Whole,
}

/// The activation on the gate of the MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HiddenAct {
    /// SiLU, also called swish: `x sigmoid(x)`.
    Silu,
    /// GELU in the tanh approximation, `gelu_pytorch_tanh`.
    GeluTanh,
}

/// A block of the model: branches beside the residual stream, one after the other. Each adds its output to the stream.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockSpec {
    /// In Llama attention, then the MLP.
    pub branches: Vec<BranchSpec>,
}

/// A branch: `x + post_norm(part(norm(x)))`, where both norms may be absent.
#[derive(Debug, Clone, PartialEq)]
pub struct BranchSpec {
    /// Name of the norm before the part, within the block.
    pub norm: Option<&'static str>,
    /// The module between the two norms, such as attention or the MLP.
    pub part: PartSpec,
    /// Name of the norm on the part's output, within the block.
    pub post_norm: Option<&'static str>,
}

/// The module of a branch, with its sizes: attention or another mixer, an MLP, experts, or per-layer embeddings.
#[derive(Debug, Clone, PartialEq)]
pub enum PartSpec {
    /// Causal self-attention.
    Attention(AttentionSpec),
    /// Attention whose keys and values come from the rows of an image ([`CrossAttentionSpec::MODULE`]).
    CrossAttention(CrossAttentionSpec),
    /// Linear attention by the gated delta rule.
    DeltaNet(DeltaNetSpec),
    /// A convolution between two gates.
    ShortConv(ShortConvSpec),
    /// Mamba 2's selective state space.
    Mamba(MambaSpec),
    /// A gated MLP: `down(act(gate(h)) * up(h))`, with the activation of [`HiddenAct`].
    Mlp {
        /// Width of its hidden layer.
        intermediate_size: usize,
        /// The gate keeps what is above its mean by so many deviations, over the features of a token (Gemma 3n).
        cut: Option<f32>,
    },
    /// An MLP without a gate: `down(f(up(h)))`.
    PlainMlp {
        /// Width of its hidden layer.
        intermediate_size: usize,
        /// The activation between its two modules.
        function: Pointwise,
    },
    /// The mixture of experts [`super::arch::Arch::experts`], with an MLP beside it where that has a shared one.
    Experts,
    /// An MLP and, beside it, the mixture of experts, with a norm on the output of each. Experts and router have norms of their own
    /// on the stream, where the MLP has the branch's (Gemma 4).
    MlpAndExperts {
        /// Width of the MLP's hidden layer.
        intermediate_size: usize,
    },
    /// The block's own embeddings [`super::arch::Arch::per_layer`], gated by the stream (Gemma 4). With several streams they are added to
    /// all but the first, and the scaled active one gates them (Gemma 3n).
    PerLayer,
}

/// The attention of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Number of query heads of the block.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head of queries and keys; even without latents.
    pub head_dim: usize,
    /// Sliding window: a query sees this many keys, its own included. `None`: it sees all earlier keys.
    pub window: Option<usize>,
    /// Index into [`super::arch::Arch::ropes`]; `None` for a block without a rotary embedding (`NoPE`).
    pub rope: Option<usize>,
    /// An earlier block whose keys and values it takes (Gemma 4); `None`: it computes its own.
    pub kv_from: Option<usize>,
    /// Where the gate comes from whose sigmoid multiplies the mixed values.
    pub gate: GateSpec,
    /// Whether values have a norm without weights (Gemma 4).
    pub v_norm: bool,
    /// Whether values are the keys before their norm, so that there is no `v_proj` (Gemma 4).
    pub k_eq_v: bool,
    /// How it makes queries, keys and values of latents; `None`: by a projection each.
    pub latent: Option<LatentSpec>,
}

/// Attention of a text's tokens over the rows of its image, which all of them see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossAttentionSpec {
    /// Number of heads, of queries as of keys and values.
    pub num_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl CrossAttentionSpec {
    /// Its module within a block of GPT-2.
    pub const MODULE: &str = "crossattention";
    /// The norm before it, within the block.
    pub const NORM: &str = "ln_cross_attn";
    /// Its linear modules: to queries, to keys and values side by side, and of the output.
    pub const LINEARS: [&str; 3] = ["q_attn", "c_attn", "c_proj"];

    /// Width of all heads.
    pub const fn size(self) -> usize {
        self.num_heads * self.head_dim
    }
}

/// Where the gate on an attention's mixed values comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateSpec {
    /// There is no gate: the output projection reads the mixed values as they are.
    None,
    /// `q_proj` has it beside each head's query (Qwen3.5).
    Beside,
    /// From `gate_proj`, which is as wide as the queries (`AFMoE`).
    Own,
    /// From `g_proj`, which gives a number for each head (LFM3).
    Heads,
}

impl AttentionSpec {
    /// Width of a head of values.
    pub const fn value_dim(&self) -> usize {
        match &self.latent {
            Some(latent) => latent.value_dim,
            None => self.head_dim,
        }
    }

    /// Width of the mixed values of all heads.
    pub const fn mixed_size(&self) -> usize {
        self.num_heads * self.value_dim()
    }

    /// Width of the queries of all heads.
    pub const fn query_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of the keys of all heads, and without latents of the values.
    pub const fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

impl BlockSpec {
    /// Attention and an MLP, with norms where Llama has them.
    pub fn new(attention: AttentionSpec, intermediate_size: usize) -> Self {
        let branch = |part| BranchSpec { norm: None, part, post_norm: None };
        let parts = [PartSpec::Attention(attention), PartSpec::Mlp { intermediate_size, cut: None }];
        let mut block = Self { branches: parts.map(branch).into() };
        block.set_norms(NormPlacement::Pre);
        block
    }

    /// Names the norms of attention and of the MLP or the experts.
    pub fn set_norms(&mut self, norms: NormPlacement) {
        let [before_attention, after_attention, before_mlp, after_mlp] = norms.names();
        for branch in &mut self.branches {
            (branch.norm, branch.post_norm) = match branch.part {
                PartSpec::Mlp { .. }
                | PartSpec::PlainMlp { .. }
                | PartSpec::Experts
                | PartSpec::MlpAndExperts { .. } => (before_mlp, after_mlp),
                PartSpec::PerLayer | PartSpec::CrossAttention(_) => (branch.norm, branch.post_norm),
                PartSpec::Attention(_) | PartSpec::DeltaNet(_) | PartSpec::ShortConv(_) | PartSpec::Mamba(_) => {
                    (before_attention, after_attention)
                }
            };
        }
    }

    /// Puts another mixer in the place of attention.
    pub fn set_mixer(&mut self, mixer: &PartSpec) {
        for branch in &mut self.branches {
            if let PartSpec::Attention(_) = branch.part {
                branch.part = mixer.clone();
            }
        }
    }

    /// Puts experts in the place of the MLP.
    pub fn set_experts(&mut self) {
        for branch in &mut self.branches {
            if let PartSpec::Mlp { .. } = branch.part {
                branch.part = PartSpec::Experts;
            }
        }
    }

    /// Whether it has a mixture of experts.
    pub fn has_experts(&self) -> bool {
        let are = |part: &PartSpec| matches!(part, PartSpec::Experts | PartSpec::MlpAndExperts { .. });
        self.branches.iter().any(|branch| are(&branch.part))
    }

    /// Its attention, if it has one.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        self.branches.iter().find_map(|branch| match &branch.part {
            PartSpec::Attention(attention) => Some(attention),
            _ => None,
        })
    }

    /// Its attention over the rows of an image, if it has one.
    pub fn cross_attention(&self) -> Option<&CrossAttentionSpec> {
        self.branches.iter().find_map(|branch| match &branch.part {
            PartSpec::CrossAttention(cross) => Some(cross),
            _ => None,
        })
    }

    /// As [`BlockSpec::attention`], to change it.
    pub fn attention_mut(&mut self) -> Option<&mut AttentionSpec> {
        self.branches.iter_mut().find_map(|branch| match &mut branch.part {
            PartSpec::Attention(attention) => Some(attention),
            _ => None,
        })
    }
}

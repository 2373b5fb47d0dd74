//! The parts of a decoder that differ between families: norms, activations, experts, and kinds of blocks.
use super::mixers::{DeltaNetSpec, MambaSpec, ShortConvSpec};

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

/// The mixture of experts of the blocks that have one ([`PartSpec::Experts`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Number of routed experts in a block.
    pub count: usize,
    /// Number of experts that the router chooses for a token.
    pub per_token: usize,
    /// Intermediate size of an expert.
    pub width: usize,
    /// Whether the routing weights of a token's experts are scaled to sum to 1 (`norm_topk_prob`).
    pub normalised: bool,
    /// The MLP beside the experts, which every token goes through; `None` without one.
    pub shared: Option<SharedExpert>,
    /// Coefficient of the load-balancing loss (`router_aux_loss_coef`); `None` where `output_router_logits` is off.
    pub balance: Option<f64>,
    /// What their tensors are called.
    pub names: ExpertNames,
    /// The constants of gpt-oss's activation; `None`: that of the other MLPs.
    pub clamp: Option<Clamp>,
    /// Whether router, gate, up and down have biases.
    pub biased: bool,
    /// Whether `config.json` says that the files hold their matrices in MXFP4.
    pub mxfp4: bool,
}

/// What tensors of experts are called within a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertNames {
    /// `mlp.gate`, `mlp.experts.0.gate_proj`.
    Qwen,
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.0.w1`.
    Mixtral,
    /// `mlp.router`, and experts as Qwen's, which its files hold stacked, transposed, and with gate and up in turn.
    GptOss,
}

/// gpt-oss's activation: `(up + 1) g sigmoid(alpha g)`, where `g` is the gate cut at `limit`, and `up` is cut at both sides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clamp {
    /// Factor within the sigmoid (`swiglu_alpha`).
    pub alpha: f64,
    /// Where gate and up are cut (`swiglu_limit`).
    pub limit: f64,
}

/// An MLP beside the experts of a block: every token goes through it, and its output is added to theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// Width of its hidden layer.
    pub width: usize,
    /// Whether its output is multiplied by the sigmoid of a linear module of one output (`shared_expert_gate`).
    pub gated: bool,
}

impl Experts {
    /// Tensor names of an expert's gate, up and down projections, within the block.
    pub fn names(&self, expert: usize) -> [String; 3] {
        self.modules(expert).map(|module| format!("{module}.weight"))
    }

    /// Tensor names of their biases, where they have some.
    pub fn bias_names(&self, expert: usize) -> Option<[String; 3]> {
        self.biased.then(|| self.modules(expert).map(|module| format!("{module}.bias")))
    }

    fn modules(&self, expert: usize) -> [String; 3] {
        match self.names {
            ExpertNames::Mixtral => ["w1", "w3", "w2"].map(|name| format!("block_sparse_moe.experts.{expert}.{name}")),
            ExpertNames::Qwen | ExpertNames::GptOss => {
                ["gate", "up", "down"].map(|name| format!("mlp.experts.{expert}.{name}_proj"))
            }
        }
    }

    /// Tensor name of the router, within the block.
    pub const fn router(&self) -> &'static str {
        match self.names {
            ExpertNames::Qwen => "mlp.gate.weight",
            ExpertNames::Mixtral => "block_sparse_moe.gate.weight",
            ExpertNames::GptOss => "mlp.router.weight",
        }
    }

    /// Module name of the router in Transformers 5, within the block.
    pub const fn router_module(&self) -> &'static str {
        match self.names {
            ExpertNames::Qwen | ExpertNames::Mixtral => "mlp.gate",
            ExpertNames::GptOss => "mlp.router",
        }
    }
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
    /// What the branch computes.
    pub part: PartSpec,
    /// Name of the norm on the part's output, within the block.
    pub post_norm: Option<&'static str>,
}

/// What a branch computes.
#[derive(Debug, Clone, PartialEq)]
pub enum PartSpec {
    /// Causal self-attention.
    Attention(AttentionSpec),
    /// Linear attention by the gated delta rule.
    DeltaNet(DeltaNetSpec),
    /// A convolution between two gates.
    ShortConv(ShortConvSpec),
    /// Mamba 2's selective state space.
    Mamba(MambaSpec),
    /// A gated MLP.
    Mlp {
        /// Width of its hidden layer.
        intermediate_size: usize,
    },
    /// An MLP without a gate: `down(relu(up(h))^2)`.
    PlainMlp {
        /// Width of its hidden layer.
        intermediate_size: usize,
    },
    /// The mixture of experts [`super::arch::Arch::experts`], with an MLP beside it where that has a shared one.
    Experts,
}

/// The attention of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Sliding window: a query sees this many keys, its own included. `None`: it sees all earlier keys.
    pub window: Option<usize>,
    /// Index into [`super::arch::Arch::ropes`]; `None` for a block without a rotary embedding (`NoPE`).
    pub rope: Option<usize>,
    /// An earlier block whose keys and values it takes (Gemma 4); `None`: it computes its own.
    pub kv_from: Option<usize>,
    /// Whether `q_proj` has a gate beside each head's query, whose sigmoid multiplies the mixed values (Qwen3.5).
    pub gated: bool,
}

impl AttentionSpec {
    /// Width of the queries of all heads, and of the mixed values.
    pub const fn query_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of the keys of all heads, and of the values.
    pub const fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

impl BlockSpec {
    /// Attention and an MLP, with norms where Llama has them.
    pub fn new(attention: AttentionSpec, intermediate_size: usize) -> Self {
        let branch = |part| BranchSpec { norm: None, part, post_norm: None };
        let parts = [PartSpec::Attention(attention), PartSpec::Mlp { intermediate_size }];
        let mut block = Self { branches: parts.map(branch).into() };
        block.set_norms(NormPlacement::Pre);
        block
    }

    /// Names the norms of attention and of the MLP or the experts.
    pub fn set_norms(&mut self, norms: NormPlacement) {
        let [before_attention, after_attention, before_mlp, after_mlp] = norms.names();
        for branch in &mut self.branches {
            (branch.norm, branch.post_norm) = match branch.part {
                PartSpec::Mlp { .. } | PartSpec::PlainMlp { .. } | PartSpec::Experts => (before_mlp, after_mlp),
                _ => (before_attention, after_attention),
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
        self.branches.iter().any(|branch| branch.part == PartSpec::Experts)
    }

    /// Its attention, if it has one.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        self.branches.iter().find_map(|branch| match &branch.part {
            PartSpec::Attention(attention) => Some(attention),
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

//! The parts of a decoder that differ between families: norms, activations, experts, and kinds of blocks.

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

/// The mixture of experts that takes the place of the MLP in sparse blocks ([`BlockKind::sparse`]).
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
    /// Intermediate size of the shared expert, which every token goes through; `None` without one.
    pub shared: Option<usize>,
    /// Coefficient of the load-balancing loss (`router_aux_loss_coef`); `None` where `output_router_logits` is off.
    pub balance: Option<f64>,
    /// Whether tensors are named as in Mixtral (`block_sparse_moe`).
    pub mixtral: bool,
}

impl Experts {
    /// Tensor names of an expert's gate, up and down projections, within the block.
    pub fn names(&self, expert: usize) -> [String; 3] {
        if self.mixtral {
            ["w1", "w3", "w2"].map(|name| format!("block_sparse_moe.experts.{expert}.{name}.weight"))
        } else {
            ["gate", "up", "down"].map(|name| format!("mlp.experts.{expert}.{name}_proj.weight"))
        }
    }

    /// Tensor name of the router, within the block.
    pub const fn router(&self) -> &'static str {
        if self.mixtral { "block_sparse_moe.gate.weight" } else { "mlp.gate.weight" }
    }
}

/// What may differ from one decoder block to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockKind {
    /// Whether the MLP is a mixture of [`super::arch::Arch::experts`].
    pub sparse: bool,
    /// Sliding window: a query sees this many keys, its own included. `None`: it sees all earlier keys.
    pub window: Option<usize>,
    /// Index into [`super::arch::Arch::ropes`]; `None` for a block without a rotary embedding (`NoPE`).
    pub rope: Option<usize>,
}

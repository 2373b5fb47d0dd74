//! What families call the modules of a block.

/// Names of modules within a block, and of the norm behind the last one.
#[derive(Debug, PartialEq, Eq)]
pub struct ModuleNames {
    /// Below `model`.
    pub final_norm: &'static str,
    /// Output projection of attention, below `self_attn`.
    pub o_proj: &'static str,
    /// Norm on queries, below `self_attn`.
    pub q_norm: &'static str,
    /// Norm on keys, below `self_attn`.
    pub k_norm: &'static str,
    /// The MLP.
    pub mlp: &'static str,
    /// The one module that gives gate and up, where they have one.
    pub gate_up: Option<&'static str>,
    /// Its gate, up and down projections.
    pub projections: [&'static str; 3],
}

impl ModuleNames {
    /// Llama's.
    pub const LLAMA: Self = Self {
        final_norm: "norm",
        o_proj: "o_proj",
        q_norm: "q_norm",
        k_norm: "k_norm",
        mlp: "mlp",
        gate_up: None,
        projections: ["gate_proj", "up_proj", "down_proj"],
    };
    /// Phi-3's.
    pub const PHI3: Self = Self { gate_up: Some("gate_up_proj"), ..Self::LLAMA };
    /// LFM2's.
    pub const LFM2: Self = Self {
        final_norm: "embedding_norm",
        o_proj: "out_proj",
        q_norm: "q_layernorm",
        k_norm: "k_layernorm",
        mlp: "feed_forward",
        projections: ["w1", "w3", "w2"],
        ..Self::LLAMA
    };
    /// `HunYuan`'s.
    pub const HUNYUAN: Self = Self { q_norm: "query_layernorm", k_norm: "key_layernorm", ..Self::LLAMA };
}

//! What families call the modules of a block.
use super::wrapped::Naming;

/// Names of modules within a block, and of the norm behind the last one.
#[derive(Debug, PartialEq, Eq)]
pub struct ModuleNames {
    /// The embedding in Transformers, below `model`. The engine calls it `embed_tokens` in every family.
    pub embedding: &'static str,
    /// The norm behind the last block, below `model`.
    pub final_norm: &'static str,
    /// Attention's module within a block, such as `self_attn`.
    pub attention: &'static str,
    /// The one module that gives queries, keys and values, below attention, where they have one.
    pub qkv_proj: &'static str,
    /// The output projection, below attention.
    pub o_proj: &'static str,
    /// Norm on queries, below attention.
    pub q_norm: &'static str,
    /// Norm on keys, below attention.
    pub k_norm: &'static str,
    /// The module of a Mamba 2 mixer within a block.
    pub mamba: &'static str,
    /// The MLP's module within a block.
    pub mlp: &'static str,
    /// The one module that gives gate and up, where they have one.
    pub gate_up: Option<&'static str>,
    /// Its gate, up and down projections.
    pub projections: [&'static str; 3],
    /// What files, Transformers and PEFT call all of it, where that differs from the engine in more than the embedding.
    pub naming: Option<Naming>,
    /// Whether files hold the matrices of blocks as `[in_features, out_features]` (Transformers' `Conv1D`).
    pub transposed: bool,
}

impl ModuleNames {
    /// Llama's names; those of other families differ from them in a few.
    pub const LLAMA: Self = Self {
        embedding: "embed_tokens",
        final_norm: "norm",
        attention: "self_attn",
        qkv_proj: "qkv_proj",
        o_proj: "o_proj",
        q_norm: "q_norm",
        k_norm: "k_norm",
        mamba: "mamba",
        mlp: "mlp",
        gate_up: None,
        projections: ["gate_proj", "up_proj", "down_proj"],
        naming: None,
        transposed: false,
    };
    /// Phi-3's names: one `gate_up_proj` gives gate and up.
    pub const PHI3: Self = Self { gate_up: Some("gate_up_proj"), ..Self::LLAMA };
    /// Granite 4's names: the MLP is `shared_mlp`, with `input_linear` and `output_linear`.
    pub const GRANITE4: Self = Self {
        mlp: "shared_mlp",
        gate_up: Some("input_linear"),
        projections: ["", "", "output_linear"],
        ..Self::LLAMA
    };
    /// GPT-2's names, which has `c_proj` in attention and in the MLP.
    pub const GPT2: Self = Self {
        embedding: "wte",
        final_norm: "ln_f",
        attention: "attn",
        qkv_proj: "c_attn",
        o_proj: "c_proj",
        projections: ["", "c_fc", "c_proj"],
        naming: Some(Naming::GPT2),
        transposed: true,
        ..Self::LLAMA
    };
    /// Nemotron-H's: a block has one mixer of that name.
    pub const NEMOTRON_H: Self = Self {
        embedding: "embeddings",
        final_norm: "norm_f",
        attention: "mixer",
        mamba: "mixer",
        mlp: "mixer",
        ..Self::LLAMA
    };
    /// LFM2's names: the MLP is `feed_forward`, with `w1`, `w3` and `w2`.
    pub const LFM2: Self = Self {
        final_norm: "embedding_norm",
        o_proj: "out_proj",
        q_norm: "q_layernorm",
        k_norm: "k_layernorm",
        mlp: "feed_forward",
        projections: ["w1", "w3", "w2"],
        ..Self::LLAMA
    };
    /// LFM3's names: as LFM2's, but attention's modules have Llama's names.
    pub const LFM3: Self = Self { o_proj: "o_proj", q_norm: "q_norm", k_norm: "k_norm", ..Self::LFM2 };
    /// `HunYuan`'s names: Llama's, but for the norms on queries and keys.
    pub const HUNYUAN: Self = Self { q_norm: "query_layernorm", k_norm: "key_layernorm", ..Self::LLAMA };
}

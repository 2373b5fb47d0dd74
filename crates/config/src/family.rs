//! Facts about a model family that its `config.json` does not contain: names in Transformers, and assumptions of llama.cpp.
use std::fmt;

/// Decoders that share one `model_type`.
pub struct Family {
    /// The `model_type` in `config.json`, by which a file is recognised.
    pub model_type: &'static str,
    /// Class of the causal language model, an entry of `architectures`.
    pub class_name: &'static str,
    /// Known models of the family, for `tunesmith models`.
    pub models: &'static str,
    /// How its architecture differs from Llama's.
    pub features: &'static str,
    /// Whether blocks have a mixture of experts.
    pub sparse: bool,
    /// Class for sequence classification, an entry of `architectures`; `None` where Transformers has none.
    pub classifier: Option<&'static str>,
    /// How llama.cpp runs it; `None` where llama.cpp does not.
    pub gguf: Option<Gguf>,
}

/// The name of a family in llama.cpp, and what llama.cpp assumes about it. A model that breaks an assumption cannot be exported to GGUF.
#[allow(clippy::struct_excessive_bools)] // independent assumptions of llama.cpp
#[derive(Debug, Clone, Copy)]
pub struct Gguf {
    /// GGUF's `general.architecture`, such as `llama`.
    pub name: &'static str,
    /// Another name, for models with or without blocks that have a mixer other than attention (first flag), and with or without
    /// experts (second flag).
    pub variant: fn(bool, bool) -> Option<&'static str>,
    /// Whether rotary pairs are neighbouring rows of q and k, and not rows of the two halves of a head.
    pub pairs: bool,
    /// Whether the file stores the factors on scores, embedding, residual branches and logits.
    pub scales: bool,
    /// Factor on scores that no file stores and no head size decides; `None`: `head_dim^-0.5`.
    pub score_scale: Option<f64>,
    /// Whether the embedding is multiplied by the root of its width.
    pub rooted_embedding: bool,
    /// Whether the file stores a number that logits are multiplied by, where Granite divides by it.
    pub multiplied_logits: bool,
    /// Number of blocks of the one model whose attention scale is `(hidden_size / heads)^-0.5` instead of `head_dim^-0.5`.
    pub wide: Option<usize>,
    /// The patterns of sliding-window blocks that llama.cpp knows; each says of a block index whether it has a window.
    pub windows: &'static [fn(usize) -> bool],
    /// Whether the file lists the blocks that have a window, so that every pattern is possible.
    pub listed_windows: bool,
    /// Whether the block of this index, with or without a window, has a rotary embedding.
    pub turns: fn(usize, bool) -> bool,
    /// Whether the file says if blocks have rotary embeddings: all or none.
    pub stated_turns: bool,
    /// Rotary features besides `linear` and `yarn` on whole heads: `llama3`, `longrope`, `partial`, `proportional`.
    pub ropes: &'static [&'static str],
    /// Whether the file stores how many frequencies turn by each axis of an image: in text, all axes are the position.
    pub sections: bool,
    /// What yarn's `mscale_all_dim` is multiplied by in the file; `None`: the file does not store it.
    pub yarn_log: Option<f64>,
    /// Whether the routing weights of a token's experts are scaled to sum to 1, where the file does not store that.
    pub normalised: bool,
    /// Whether the file stores everything about the router: normalisation, factor and groups.
    pub router_keys: bool,
    /// Whether dense blocks may come before those with experts.
    pub dense_first: bool,
    /// Whether the head always shares the embedding's matrix.
    pub tied: bool,
    /// Whether the head never shares the embedding's matrix.
    pub untied: bool,
    /// Whether the activation is GELU.
    pub gelu: bool,
    /// Whether no linear module but q, k and v may have a bias.
    pub bare: bool,
    /// Whether heads and widths may differ from block to block.
    pub uneven: bool,
    /// The norm before the MLP or the experts: `ffn_norm`, or `post_attention_norm`.
    pub ffn_norm: &'static str,
    /// The norm behind the last block.
    pub final_norm: &'static str,
}

impl Gguf {
    /// The assumptions that hold for most families: rotary pairs across halves, no windows, a rotary embedding in every block.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            variant: |_, _| None,
            pairs: false,
            scales: false,
            score_scale: None,
            rooted_embedding: false,
            multiplied_logits: false,
            wide: None,
            windows: &[],
            listed_windows: false,
            turns: |_, _| true,
            stated_turns: false,
            ropes: &[],
            sections: false,
            yarn_log: None,
            normalised: true,
            router_keys: false,
            dense_first: false,
            tied: false,
            untied: false,
            gelu: false,
            bare: false,
            uneven: false,
            ffn_norm: "ffn_norm",
            final_norm: "output_norm",
        }
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.model_type)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}

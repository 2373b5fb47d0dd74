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
    /// Whether rotary pairs are neighbouring rows of q and k, and not rows of the two halves of a head.
    pub pairs: bool,
    /// Whether the file stores the factors on scores, embedding, residual branches and logits.
    pub scales: bool,
    /// Number of blocks of the one model whose attention scale is `(hidden_size / heads)^-0.5` instead of `head_dim^-0.5`.
    pub wide: Option<usize>,
    /// The patterns of sliding-window blocks that llama.cpp knows; each says of a block index whether it has a window.
    pub windows: &'static [fn(usize) -> bool],
    /// Whether the block of this index has a rotary embedding.
    pub turns: fn(usize) -> bool,
    /// Rotary features besides `linear` and `yarn` on whole heads: `llama3`, `longrope`, `partial`.
    pub ropes: &'static [&'static str],
    /// Whether the routing weights of a token's experts are scaled to sum to 1.
    pub normalised: bool,
    /// Whether the head always shares the embedding's matrix.
    pub tied: bool,
}

impl Gguf {
    /// The assumptions that hold for most families: rotary pairs across halves, no windows, a rotary embedding in every block.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            pairs: false,
            scales: false,
            wide: None,
            windows: &[],
            turns: |_| true,
            ropes: &[],
            normalised: true,
            tied: false,
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

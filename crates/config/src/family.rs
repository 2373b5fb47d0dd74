//! What is known of a model family beside its `config.json`: its names in Transformers, and how llama.cpp has it.
use std::fmt;

/// A family of decoders that share one form of `config.json`.
pub struct Family {
    /// The `model_type` of `config.json`.
    pub model_type: &'static str,
    /// The entry of `architectures` that this family has as a causal language model.
    pub class_name: &'static str,
    /// Models that come in this form, as people call them.
    pub models: &'static str,
    /// What tells it from Llama.
    pub features: &'static str,
    /// Whether blocks have experts.
    pub sparse: bool,
    /// The entry of `architectures` that Transformers has for it with a head of scores, if it has one.
    pub classifier: Option<&'static str>,
    /// How llama.cpp has it, if it does.
    pub gguf: Option<Gguf>,
}

/// What llama.cpp calls a family and takes for granted of it. A model that has it otherwise cannot be exported.
#[allow(clippy::struct_excessive_bools)] // each is a habit of llama.cpp of its own
#[derive(Debug, Clone, Copy)]
pub struct Gguf {
    /// `general.architecture`.
    pub name: &'static str,
    /// Rows of q and k lie in pairs that turn together, and not in halves of a head.
    pub pairs: bool,
    /// The file says what scores, embedding, branches and logits are multiplied by.
    pub scales: bool,
    /// So many blocks has the model whose scores are scaled as if all heads filled it.
    pub wide: Option<usize>,
    /// Which blocks may have a window that is shorter than the context: one of these rules by the block's number.
    pub windows: &'static [fn(usize) -> bool],
    /// Whether a block turns q and k.
    pub turns: fn(usize) -> bool,
    /// What of rotary positions it computes besides `linear` and `yarn` on whole heads: `llama3`, `longrope`, `partial`.
    pub ropes: &'static [&'static str],
    /// The weights of a token's experts are made to sum to 1.
    pub normalised: bool,
    /// The head is always the embedding.
    pub tied: bool,
}

impl Gguf {
    /// Halves of heads that all turn, no windows.
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

//! The tables with a row for each token, the embedding and the head, and which of their rows are trained.
use std::path::PathBuf;

/// Tensor name of the embedding, `[vocab_size, hidden_size]`.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Tensor name of a head that is not tied to the embedding, `[vocab_size, hidden_size]`.
pub const LM_HEAD: &str = "lm_head.weight";

/// Token ids whose rows are trained while the rest of the table is frozen (PEFT's `trainable_token_indices`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenRows {
    /// Rows of the embedding; a tied head shares them.
    pub embedding: Vec<u32>,
    /// Rows of a head with a matrix of its own.
    pub head: Vec<u32>,
}

impl TokenRows {
    /// The same rows in embedding and head.
    pub fn both(ids: &[u32]) -> Self {
        Self { embedding: ids.to_vec(), head: ids.to_vec() }
    }

    /// The trained rows of the tensor of that name; empty for any tensor but [`EMBEDDING`] and [`LM_HEAD`].
    pub fn of(&self, tensor: &str) -> &[u32] {
        match tensor {
            EMBEDDING => &self.embedding,
            LM_HEAD => &self.head,
            _ => &[],
        }
    }

    /// Whether no row is trained on its own.
    pub const fn is_empty(&self) -> bool {
        self.embedding.is_empty() && self.head.is_empty()
    }

    /// The ids of both tables without repetition, those of the embedding first.
    pub fn ids(&self) -> Vec<u32> {
        let more = self.head.iter().filter(|id| !self.embedding.contains(id));
        self.embedding.iter().chain(more).copied().collect()
    }
}

/// What an adapter file says about the embedding and the head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vocabulary {
    /// Single rows that it trained.
    pub rows: TokenRows,
    /// Number of rows of an embedding or head that it holds in full (`modules_to_save`); 0 without one.
    pub whole: usize,
    /// Numbers of rows of the embedding and of the head, if it holds both in full.
    pub tables: Option<[usize; 2]>,
    /// Its `modules_to_save`, which untie the head; empty with `ensure_weight_tying`.
    pub apart: Vec<String>,
    /// The adapter's folder, which errors name.
    pub origin: PathBuf,
}

//! The tables with a row for each token, the embedding and the head, and which of their rows are trained.
use std::path::PathBuf;

/// The embedding's tensor.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The tensor of a head of its own.
pub const LM_HEAD: &str = "lm_head.weight";

/// Rows of the vocabulary's tables that are trained by themselves, each under the token's id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenRows {
    /// Of the embedding, and of a head that shares its matrix.
    pub embedding: Vec<u32>,
    /// Of a head with a matrix of its own.
    pub head: Vec<u32>,
}

impl TokenRows {
    /// The same rows of both tables.
    pub fn both(ids: &[u32]) -> Self {
        Self { embedding: ids.to_vec(), head: ids.to_vec() }
    }

    /// The rows of the tensor of that name; none where it is no table of the vocabulary.
    pub fn of(&self, tensor: &str) -> &[u32] {
        match tensor {
            EMBEDDING => &self.embedding,
            LM_HEAD => &self.head,
            _ => &[],
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.embedding.is_empty() && self.head.is_empty()
    }

    /// The ids of either table, those of the embedding first, each once.
    pub fn ids(&self) -> Vec<u32> {
        let more = self.head.iter().filter(|id| !self.embedding.contains(id));
        self.embedding.iter().chain(more).copied().collect()
    }
}

/// What an adapter makes of the vocabulary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vocabulary {
    /// The rows that it trains by themselves.
    pub rows: TokenRows,
    /// The rows of the tables that it holds whole (`modules_to_save`); 0 where it holds none.
    pub whole: usize,
    /// Its `modules_to_save`, of which each is trained by itself; none with `ensure_weight_tying`.
    pub apart: Vec<String>,
    /// The adapter's folder, for messages.
    pub origin: PathBuf,
}

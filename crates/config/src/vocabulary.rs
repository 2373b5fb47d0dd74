//! What is trained of the tables with a row for each token, the embedding and the head, and what that makes of the model's shape:
//! rows of new tokens, and a head with a matrix of its own where it shared the embedding's.
use std::path::PathBuf;

use super::arch::{Arch, EMBEDDING, LM_HEAD};
use tunesmith_base::error::{Error, Result};

/// A vocabulary grows by as many tokens as it has, or by so many.
const MOST_NEW_TOKENS: usize = 1 << 16;

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
    /// The rows of the embedding and of the head, where it holds both whole.
    pub tables: Option<[usize; 2]>,
    /// Its `modules_to_save`, of which each is trained by itself; none with `ensure_weight_tying`.
    pub apart: Vec<String>,
    /// The adapter's folder, for messages.
    pub origin: PathBuf,
}

impl Arch {
    /// Makes room for tokens: the embedding and the head end behind the highest of them, if they ended before.
    pub fn grow(&mut self, tokens: Vec<u32>) {
        let needed = tokens.iter().max().map_or(0, |&last| last as usize + 1);
        self.vocab_size = self.vocab_size.max(needed);
        self.token_rows = TokenRows::both(&tokens);
        self.new_tokens = tokens;
    }

    /// Makes room for an adapter's vocabulary, and trains the rows that it trains. The head gets a matrix of its own where the
    /// adapter needs one.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: an id that lies far beyond the model's vocabulary, or two tables of different sizes.
    pub fn fit(&mut self, vocabulary: &Vocabulary) -> Result<()> {
        let (rows, origin) = (&vocabulary.rows, vocabulary.origin.display());
        if let Some([embedding, head]) = vocabulary.tables.filter(|[embedding, head]| embedding != head) {
            let head_fits = head == self.vocab_size;
            let (table, found, other, expected) =
                if head_fits { (EMBEDDING, embedding, LM_HEAD, head) } else { (LM_HEAD, head, EMBEDDING, embedding) };
            return Err(Error::checkpoint(format!(
                "{origin}: tensor {table:?} has {found} rows, expected {expected} as {other:?}"
            ))
            .hint("the adapter's file is damaged or belongs to another model: copy the adapter again"));
        }
        // An id is a claim that would be allocated for; a table is as long as its file.
        let limit = self.vocab_size.max(vocabulary.whole).saturating_add(self.vocab_size.max(MOST_NEW_TOKENS));
        let needed = rows.ids().into_iter().max().map_or(0, |last| last as usize + 1);
        if needed > limit {
            let (last, size) = (needed - 1, self.vocab_size);
            return Err(Error::checkpoint(format!(
                "{origin}: trainable_token_indices has token {last}, expected less than {limit}: the base model has {size} tokens"
            ))
            .hint("the adapter belongs to another model"));
        }
        self.separate_for(vocabulary);
        self.vocab_size = self.vocab_size.max(needed).max(vocabulary.whole);
        self.token_rows = rows.clone();
        Ok(())
    }

    /// The rows of that tensor that are trained by themselves.
    pub fn rows_of(&self, tensor: &str) -> &[u32] {
        self.token_rows.of(tensor)
    }

    /// Gives the head a matrix of its own, where it shares the embedding's and these modules are trained each by itself: one of
    /// them is, or holds, the embedding or the head.
    pub fn separate(&mut self, modules: &[String]) {
        let tables = ["model", "model.embed_tokens", "lm_head"];
        let is_named = |name: &String| modules.iter().any(|entry| name.ends_with(entry.as_str()));
        if tables.into_iter().flat_map(|module| self.names(module)).any(|name| is_named(&name)) {
            self.untie();
        }
    }

    /// As [`Arch::separate`], where an adapter's vocabulary needs it.
    pub fn separate_for(&mut self, vocabulary: &Vocabulary) {
        let rows = &vocabulary.rows;
        // PEFT trains the same rows of both as one.
        if !rows.head.is_empty() && rows.head != rows.embedding {
            self.untie();
        }
        self.separate(&vocabulary.apart);
    }

    const fn untie(&mut self) {
        if self.ties_head() {
            (self.tie_word_embeddings, self.separated) = (false, true);
        }
    }

    /// The tensor of the checkpoint that the tensor `name` starts as.
    pub fn starts_as<'n>(&self, name: &'n str) -> &'n str {
        if self.separated && name == LM_HEAD { EMBEDDING } else { name }
    }
}

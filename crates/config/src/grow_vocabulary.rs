//! How new tokens, or an adapter's vocabulary, change a model's shape: rows for new tokens, and a head with a matrix of its own where it
//! shared the embedding's.
use super::arch::Arch;
use super::vocabulary::{EMBEDDING, LM_HEAD, TokenRows, Vocabulary};
use tunesmith_base::error::{Error, Result};

/// A vocabulary grows by as many tokens as it has, or by so many.
const MOST_NEW_TOKENS: usize = 1 << 16;

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
    /// [`tunesmith_base::Kind::Checkpoint`]: an id that lies far beyond the model's vocabulary.
    pub fn fit(&mut self, vocabulary: &Vocabulary) -> Result<()> {
        let (rows, origin) = (&vocabulary.rows, vocabulary.origin.display());
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

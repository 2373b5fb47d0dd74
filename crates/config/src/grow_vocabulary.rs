//! How new tokens, or an adapter's vocabulary, change a model's shape: rows for new tokens, and a separate
//! matrix for a head that was tied to the embedding.
use super::arch::Arch;
use super::vocabulary::{EMBEDDING, LM_HEAD, TokenRows, Vocabulary};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;

/// A vocabulary may always grow by this many tokens; beyond that, by at most its own size.
const MOST_NEW_TOKENS: usize = 1 << 16;

impl Arch {
    /// Grows the embedding and the head until they have a row for each of `tokens`, and trains those rows.
    pub fn grow(&mut self, tokens: Vec<u32>) {
        let needed = tokens.iter().max().map_or(0, |&last| last as usize + 1);
        self.vocab_size = self.vocab_size.max(needed);
        self.token_rows = TokenRows::both(&tokens);
        self.new_tokens = tokens;
    }

    /// Grows the embedding and the head to what an adapter needs, and trains the rows that it trained. Unties the head where the
    /// adapter holds it apart from the embedding.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: an id far beyond the model's vocabulary, or two tables of different sizes.
    pub fn fit(&mut self, vocabulary: &Vocabulary) -> Result<()> {
        let (rows, origin) = (&vocabulary.rows, vocabulary.origin.display());
        if let Some([embedding, head]) = vocabulary.tables.filter(|[embedding, head]| embedding != head) {
            let head_fits = head == self.vocab_size;
            let (table, found, other, expected) =
                if head_fits { (EMBEDDING, embedding, LM_HEAD, head) } else { (LM_HEAD, head, EMBEDDING, embedding) };
            return Err(Error::checkpoint(format!(
                "{origin}: tensor {table:?} has {}, expected {expected} as {other:?}",
                count(found, "row")
            ))
            .hint("the adapter's file is damaged or belongs to another model: copy the adapter again"));
        }
        // Memory is allocated up to the highest id, which a damaged file may set to anything. A table is as long as its file.
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
        self.check_growth()
    }

    /// Refuses a vocabulary that has grown beyond the table of embeddings for each block.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`].
    pub fn check_growth(&self) -> Result<()> {
        match &self.per_layer {
            Some(table) if table.vocab_size.max(table.tokens) < self.vocab_size => Err(Error::config(format!(
                "not yet: new tokens in {}, whose blocks have embeddings of their own: {} for {}",
                self.family.model_type,
                count(table.vocab_size, "row"),
                count(self.vocab_size, "token")
            ))
            .hint("use tokens that the vocabulary has, such as <unused0>")),
            _ => Ok(()),
        }
    }

    /// The rows of a tensor that are trained while the rest of it is frozen.
    pub fn rows_of(&self, tensor: &str) -> &[u32] {
        self.token_rows.of(tensor)
    }

    /// Unties the head where `modules` (`modules_to_save`) name the embedding, the head, or the model that holds them. As in PEFT, each
    /// then becomes a matrix of its own.
    pub fn separate(&mut self, modules: &[String]) {
        let tables = ["model", "model.embed_tokens", "lm_head"];
        let is_named = |name: &String| modules.iter().any(|entry| name.ends_with(entry.as_str()));
        if tables.into_iter().flat_map(|module| self.names(module)).any(|name| is_named(&name)) {
            self.untie();
        }
    }

    /// Unties the head where an adapter needs it: as [`Arch::separate`], or for rows that differ between embedding and head.
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

    /// The tensor of the base checkpoint from which `name` is initialised: a head that was untied starts as the embedding.
    pub fn starts_as<'n>(&self, name: &'n str) -> &'n str {
        if self.separated && name == LM_HEAD { EMBEDDING } else { name }
    }
}

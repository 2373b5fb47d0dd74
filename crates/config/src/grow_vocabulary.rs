//! Adapts a model's shape to new tokens or to an adapter's vocabulary: adds rows to embedding and head, and gives a
//! tied head a matrix of its own if necessary.
use super::arch::Arch;
use super::vocabulary::{EMBEDDING, LM_HEAD, TokenRows, Vocabulary};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;

/// A vocabulary may always grow by this many tokens; beyond that, by at most its own size.
const MOST_NEW_TOKENS: usize = 1 << 16;

impl Arch {
    /// Adds rows to embedding and head until there is one for each of `tokens`, and marks these rows as trained.
    pub fn grow(&mut self, tokens: Vec<u32>) {
        let needed = tokens.iter().max().map_or(0, |&last| last as usize + 1);
        self.vocab_size = self.vocab_size.max(needed);
        self.token_rows = TokenRows::both(&tokens);
        self.new_tokens = tokens;
    }

    /// Adds rows to embedding and head as the adapter needs them, and marks the rows that it trained. Unties the head
    /// if the adapter has a separate one.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: the adapter has an id far beyond the model's vocabulary, or matrices of
    /// different sizes for embedding and head.
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
        // Memory is allocated up to the highest id, which a damaged file may set to anything. A whole matrix cannot be
        // larger than its file.
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

    /// Refuses a vocabulary that has more tokens than the table of per-layer embeddings.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the model has per-layer embeddings, and their table has too few rows.
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

    /// Unties the head if `modules` (`modules_to_save`) names the embedding, the head, or the model that contains them.
    /// As in PEFT, each of the two then has a matrix of its own.
    pub fn separate(&mut self, modules: &[String]) {
        let tables = ["model", "model.embed_tokens", "lm_head"];
        let is_named = |name: &String| modules.iter().any(|entry| name.ends_with(entry.as_str()));
        if tables.into_iter().flat_map(|module| self.names(module)).any(|name| is_named(&name)) {
            self.untie();
        }
    }

    /// Unties the head if an adapter needs that: for the reasons of [`Arch::separate`], or because it trains other rows
    /// of the head than of the embedding.
    pub fn separate_for(&mut self, vocabulary: &Vocabulary) {
        let rows = &vocabulary.rows;
        // PEFT trains equal rows of both as one.
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

    /// The tensor of the base checkpoint from which `name` is initialized. A head that was untied starts as a copy of
    /// the embedding.
    pub fn starts_as<'n>(&self, name: &'n str) -> &'n str {
        if self.separated && name == LM_HEAD { EMBEDDING } else { name }
    }
}

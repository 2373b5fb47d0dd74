//! The tokenizer of a model folder: `tokenizer.json`, with special tokens from the files beside it.
use std::path::Path;

use serde_json::{Map, Value};

use super::bounded_tokenizer::BoundedTokenizer;
use super::catch_panic::isolated;
use super::encoded::Encoded;
use super::model_files::{read_file, read_json};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::arch::Arch;

/// A tokenizer with its special tokens and the ids that end an answer.
pub struct Tokenizer {
    bounded: BoundedTokenizer,
    config: Map<String, Value>,
    special_tokens: Map<String, Value>,
    special_texts: Vec<String>,
    /// The ids of special tokens, sorted.
    special_ids: Vec<u32>,
    stop_ids: Vec<u32>,
    eos_id: Option<u32>,
    hash: blake3::Hash,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("hash", &self.hash).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model folder, and `tokenizer_config.json`, `special_tokens_map.json`, `config.json`
    /// and `generation_config.json` if they exist.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: there is no `tokenizer.json`, a file is malformed, or the tokenizer could make
    /// texts too large (`growth`).
    pub fn load(model_dir: &Path) -> Result<Self> {
        Self::load_with(model_dir, &[])
    }

    /// As [`Tokenizer::load`], and adds tokens.
    ///
    /// # Errors
    /// Those of [`Tokenizer::load`] and [`with_tokens`].
    pub fn load_with(model_dir: &Path, new_tokens: &[String]) -> Result<Self> {
        let path = model_dir.join("tokenizer.json");
        let mut bytes = read_tokenizer(model_dir)?;
        if !new_tokens.is_empty() {
            bytes = with_tokens(model_dir, new_tokens)?.0.into_bytes();
        }
        let BoundedTokenizer { mut inner, growth, .. } = BoundedTokenizer::parse(&path, &bytes)?;
        // The file's padding and truncation do not apply: batches have no padding, and the encoder truncates rows.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| Error::model(error.to_string()).caused_by(error))?;

        let config = read_json(&model_dir.join("tokenizer_config.json"))?;
        let mut special_tokens = special_tokens(&config);
        for (name, token) in self::special_tokens(&read_json(&model_dir.join("special_tokens_map.json"))?) {
            special_tokens.entry(name).or_insert(token);
        }
        let mut stop_ids = Vec::new();
        let eos = special_tokens.get("eos_token").and_then(Value::as_str);
        stop_ids.extend(eos.and_then(|eos| inner.token_to_id(eos)));
        for file in ["config.json", "generation_config.json"] {
            let mut about = read_json(&model_dir.join(file))?;
            // A multimodal model may have it in the configuration of its language model.
            let inner = about.get("text_config").and_then(|text| text.get("eos_token_id")).cloned();
            let ids = about.remove("eos_token_id").or(inner).unwrap_or_default();
            let ids = ids.as_array().cloned().unwrap_or_else(|| vec![ids]);
            stop_ids.extend(ids.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        }
        let eos_id = stop_ids.first().copied();
        stop_ids.sort_unstable();
        stop_ids.dedup();
        let added = inner.get_added_tokens_decoder();
        let special_texts = added
            .values()
            .filter(|token| token.special && !token.content.is_empty())
            .map(|t| t.content.clone())
            .collect();
        let mut special_ids: Vec<u32> = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        special_ids.sort_unstable();
        let hash = blake3::hash(&bytes);
        let bounded = BoundedTokenizer::new(inner, growth);
        Ok(Self { bounded, config, special_tokens, special_texts, special_ids, stop_ids, eos_id, hash })
    }

    /// Tokenizes a text. With `add_special`, the post-processor adds its tokens (BOS).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the tokenizer fails, or would need too much memory.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Encoded> {
        self.encode_first(text, add_special, None)
    }

    /// As [`Tokenizer::encode`], for callers that need only the first `most` tokens. Of a much longer text, only the
    /// beginning is tokenized, and more than `most` tokens are returned.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_first(&self, text: &str, add_special: bool, most: Option<usize>) -> Result<Encoded> {
        self.bounded.encode_first(text, add_special, most).map(|(encoded, _)| encoded)
    }

    /// The ids of a text with the tokens that the post-processor adds, and for each id whether it was added.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn ids(&self, text: &str) -> Result<(Vec<u32>, Vec<bool>)> {
        self.ids_first(text, None)
    }

    /// As [`Tokenizer::ids`], with `most` as in [`Tokenizer::encode_first`].
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn ids_first(&self, text: &str, most: Option<usize>) -> Result<(Vec<u32>, Vec<bool>)> {
        self.bounded.ids_first(text, most)
    }

    /// Whether all `texts` have the same tokens with another `pre_tokenizer`, a value of this field of
    /// `tokenizer.json`, and this value of `ignore_merges`, which says whether a word that is a token is taken before merges.
    ///
    /// # Errors
    /// The value is not a pre-tokenizer, or the tokenizer fails with a text.
    pub fn same_tokens_by(&self, pre_tokenizer: &Value, ignore_merges: bool, texts: &[String]) -> Result<bool> {
        let other = serde_json::from_value::<tokenizers::pre_tokenizers::PreTokenizerWrapper>(pre_tokenizer.clone());
        let other = other.map_err(|error| Error::data("not a pre-tokenizer").caused_by(error))?;
        let mut tokenizer = self.bounded.inner.clone();
        tokenizer.with_pre_tokenizer(Some(other));
        if let tokenizers::ModelWrapper::BPE(mut model) = tokenizer.get_model().clone() {
            model.ignore_merges = ignore_merges;
            tokenizer.with_model(model);
        }
        let ids = |tokenizer: &tokenizers::Tokenizer, text: &str| {
            isolated("tokenizing", || tokenizer.encode_fast(text, false))?
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(super::bounded_tokenizer::untokenized)
        };
        for text in texts {
            if ids(&self.bounded.inner, text)? != ids(&tokenizer, text)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Decodes ids to text. With `skip_special`, special tokens are omitted.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        isolated("decoding", || self.bounded.inner.decode(ids, skip_special))?
            .map_err(|error| Error::data("cannot decode token ids").caused_by(error))
    }

    /// The vocabulary entry of an id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.bounded.inner.id_to_token(id)
    }

    /// The id of a vocabulary entry.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.bounded.inner.token_to_id(token)
    }

    /// The tokenizer of the `tokenizers` crate, with bounds on its work.
    pub(super) const fn bounded(&self) -> &BoundedTokenizer {
        &self.bounded
    }

    /// The added tokens and their ids.
    pub(super) fn added_tokens(&self) -> Vec<(u32, tokenizers::AddedToken)> {
        self.bounded
            .inner
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .iter()
            .map(|(id, token)| (*id, token.clone()))
            .collect()
    }

    /// The id for unknown characters, if the model has one.
    pub(super) fn unknown_id(&self) -> Option<u32> {
        use tokenizers::ModelWrapper::{BPE, Unigram, WordLevel, WordPiece};
        match self.bounded.inner.get_model() {
            BPE(model) => model.get_unk_token().as_deref().and_then(|token| self.id(token)),
            WordPiece(model) => self.id(&model.unk_token),
            WordLevel(model) => self.id(&model.unk_token),
            Unigram(_) => self.special_tokens.get("unk_token").and_then(Value::as_str).and_then(|token| self.id(token)),
        }
    }

    /// The id of `eos_token`, or else the model's first `eos_token_id`.
    pub const fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// All ids that end an answer: `eos_token`, and `eos_token_id` of the model's files. Sorted.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// `bos_token`, `eos_token` and so on, as variables for templates.
    pub const fn special_tokens(&self) -> &Map<String, Value> {
        &self.special_tokens
    }

    /// The texts of all special tokens.
    pub fn special_texts(&self) -> &[String] {
        &self.special_texts
    }

    /// Whether an id belongs to a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.binary_search(&id).is_ok()
    }

    /// Whether an id belongs to a special token other than the one for unknown characters.
    pub(super) fn is_control(&self, id: u32) -> bool {
        self.is_special(id) && self.unknown_id() != Some(id)
    }

    /// The content of `tokenizer_config.json`; empty if there is none.
    pub const fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// BLAKE3 of `tokenizer.json`, including new tokens.
    pub const fn hash(&self) -> &blake3::Hash {
        &self.hash
    }
}

fn read_tokenizer(model_dir: &Path) -> Result<Vec<u8>> {
    read_file(&model_dir.join("tokenizer.json"), files::open_member)?.ok_or_else(|| {
        Error::model(format!("{} has no tokenizer.json", model_dir.display()))
            .hint("copy tokenizer.json and tokenizer_config.json of the model into the folder")
    })
}

/// The ids that `tokens` get when they are added to the model's tokenizer.
///
/// # Errors
/// Those of [`with_tokens`].
pub fn new_token_ids(model_dir: &Path, tokens: &[String]) -> Result<Vec<u32>> {
    with_tokens(model_dir, tokens).map(|(_, ids)| ids)
}

/// Adds `tokens` (`tuning.new_tokens`) to the vocabulary of `arch`, with the ids that they get in the model's tokenizer.
///
/// # Errors
/// Those of [`with_tokens`].
pub fn add_new_tokens(arch: &mut Arch, model_dir: &Path, tokens: &[String]) -> Result<()> {
    if !tokens.is_empty() {
        arch.grow(new_token_ids(model_dir, tokens)?);
    }
    Ok(())
}

/// Adds `tokens` to the model's `tokenizer.json`, as Transformers' `add_tokens` does. Returns the JSON text and the new
/// ids.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: a token is empty, listed twice or already in the vocabulary;
/// [`tunesmith_base::Kind::Model`] as in [`Tokenizer::load`].
pub fn with_tokens(model_dir: &Path, tokens: &[String]) -> Result<(String, Vec<u32>)> {
    let path = model_dir.join("tokenizer.json");
    let mut inner = BoundedTokenizer::parse(&path, &read_tokenizer(model_dir)?)?.inner;
    let mut ids = Vec::new();
    for token in tokens {
        if let Some(id) = inner.token_to_id(token) {
            return Err(Error::config(format!(
                "tuning.new_tokens: {token:?} is already in the vocabulary, with the id {id}"
            ))
            .hint("remove it, or the second of two"));
        }
        inner
            .add_tokens([tokenizers::AddedToken::from(token.clone(), false)])
            .map_err(|error| Error::config(format!("tuning.new_tokens: {token:?} cannot be added")).caused_by(error))?;
        ids.extend(inner.token_to_id(token));
    }
    if ids.len() != tokens.len() {
        return Err(Error::config("tuning.new_tokens: a token cannot be added").hint("no token may be empty"));
    }
    let text = inner.to_string(true).map_err(|error| Error::model(path.display().to_string()).caused_by(error))?;
    Ok((text, ids))
}

/// The fields `…_token` with a string or an added token, and lists of further special tokens.
fn special_tokens(config: &Map<String, Value>) -> Map<String, Value> {
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(token) => token.get("content").and_then(Value::as_str).map(str::to_owned),
        _ => None,
    };
    let single = config.iter().filter(|(name, _)| name.ends_with("_token"));
    let single = single.filter_map(|(name, value)| Some((name.clone(), Value::String(text(value)?))));
    let lists = config.iter().filter(|(name, _)| name.ends_with("_special_tokens"));
    let lists = lists.filter_map(|(name, value)| {
        let items = value.as_array()?.iter().filter_map(text).map(Value::String).collect();
        Some((name.clone(), Value::Array(items)))
    });
    single.chain(lists).collect()
}

#[cfg(test)]
impl Tokenizer {
    /// The tokenizer of a model folder that has only this `tokenizer.json`.
    pub(super) fn of_json(json: &Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Self::load(folder.path()).unwrap()
    }
}

//! The tokenizer of a model folder: `tokenizer.json`, and from the files beside it the special tokens.
use std::path::Path;

use serde_json::{Map, Value};

use super::isolate::isolated;
use crate::error::{Error, Result};

/// Files larger than this are refused (the largest known `tokenizer.json` has 40 MB).
const MAX_FILE_BYTES: u64 = 512 << 20;

/// Text encoded: ids, and for each the bytes of the text that it stands for.
#[derive(Debug, Clone, Default)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// `[start, end)` byte offsets into the text.
    pub offsets: Vec<(usize, usize)>,
}

/// A loaded tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    config: Map<String, Value>,
    special_tokens: Map<String, Value>,
    special_texts: Vec<String>,
    /// In order.
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
    /// Reads `tokenizer.json` and, where they exist, `tokenizer_config.json`, `special_tokens_map.json`,
    /// `config.json` and `generation_config.json` of a model folder.
    ///
    /// # Errors
    /// [`crate::Kind::Data`]: there is no `tokenizer.json`, or a file is not what its name says.
    pub fn load(model_dir: &Path) -> Result<Self> {
        Self::load_with(model_dir, &[])
    }

    /// As [`Tokenizer::load`], with tokens added.
    ///
    /// # Errors
    /// As [`Tokenizer::load`] and [`with_tokens`].
    pub fn load_with(model_dir: &Path, new_tokens: &[String]) -> Result<Self> {
        let path = model_dir.join("tokenizer.json");
        let mut bytes = read_tokenizer(model_dir)?;
        if !new_tokens.is_empty() {
            bytes = with_tokens(model_dir, new_tokens)?.0.into_bytes();
        }
        let mut inner = parse(&path, &bytes)?;
        // Rows are cut and never padded by us, whatever the file says.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| Error::data(error.to_string()))?;

        let config = read_json(&model_dir.join("tokenizer_config.json"))?;
        let mut special_tokens = special_tokens(&config);
        for (name, token) in self::special_tokens(&read_json(&model_dir.join("special_tokens_map.json"))?) {
            special_tokens.entry(name).or_insert(token);
        }
        let mut stop_ids = Vec::new();
        let eos = special_tokens.get("eos_token").and_then(Value::as_str);
        stop_ids.extend(eos.and_then(|eos| inner.token_to_id(eos)));
        for file in ["config.json", "generation_config.json"] {
            let ids = read_json(&model_dir.join(file))?.remove("eos_token_id").unwrap_or_default();
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
        Ok(Self { inner, config, special_tokens, special_texts, special_ids, stop_ids, eos_id, hash })
    }

    /// Ids and byte offsets; `add_special` lets the tokenizer's post-processor add its tokens (BOS).
    ///
    /// # Errors
    /// The tokenizer cannot handle the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Encoded> {
        let encoding = isolated("tokenizing", || self.inner.encode(text, add_special))?
            .map_err(|error| Error::data(format!("cannot tokenize: {error}")))?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    /// Ids without offsets, which is faster: with the tokens that the post-processor adds, and which ids those are.
    ///
    /// # Errors
    /// The tokenizer cannot handle the text.
    pub fn ids(&self, text: &str) -> Result<(Vec<u32>, Vec<bool>)> {
        let encoding = isolated("tokenizing", || self.inner.encode_fast(text, true))?
            .map_err(|error| Error::data(format!("cannot tokenize: {error}")))?;
        let added = encoding.get_special_tokens_mask().iter().map(|&added| added != 0).collect();
        Ok((encoding.get_ids().to_vec(), added))
    }

    /// The text of ids.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        isolated("decoding", || self.inner.decode(ids, skip_special))?
            .map_err(|error| Error::data(format!("cannot decode token ids: {error}")))
    }

    /// The vocabulary's entry of an id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a vocabulary entry.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// `eos_token`, or else the model's `eos_token_id`.
    pub const fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// Every id that ends an answer according to the tokenizer's and the model's files.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// `bos_token`, `eos_token` and their like, as templates read them.
    pub const fn special_tokens(&self) -> &Map<String, Value> {
        &self.special_tokens
    }

    /// The texts of all special tokens.
    pub fn special_texts(&self) -> &[String] {
        &self.special_texts
    }

    /// Whether an id is that of a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.binary_search(&id).is_ok()
    }

    /// `tokenizer_config.json`.
    pub const fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// BLAKE3 of `tokenizer.json`.
    pub const fn hash(&self) -> &blake3::Hash {
        &self.hash
    }
}

fn read_tokenizer(model_dir: &Path) -> Result<Vec<u8>> {
    read_file(&model_dir.join("tokenizer.json"))?.ok_or_else(|| {
        Error::data(format!("{} has no tokenizer.json", model_dir.display()))
            .hint("copy tokenizer.json and tokenizer_config.json of the model into the folder")
    })
}

fn parse(path: &Path, bytes: &[u8]) -> Result<tokenizers::Tokenizer> {
    isolated("reading the tokenizer", || tokenizers::Tokenizer::from_bytes(bytes))
        .and_then(|loaded| loaded.map_err(|error| Error::data(error.to_string())))
        .map_err(|error| error.context(path.display()).hint("expected the tokenizer.json of a Hugging Face model"))
}

/// The ids that `tokens` get, as [`with_tokens`].
///
/// # Errors
/// As [`with_tokens`].
pub fn new_token_ids(model_dir: &Path, tokens: &[String]) -> Result<Vec<u32>> {
    with_tokens(model_dir, tokens).map(|(_, ids)| ids)
}

/// The text of the model's `tokenizer.json` with `tokens` added as Transformers' `add_tokens` does, and their ids.
///
/// # Errors
/// [`crate::Kind::Config`]: a token is empty, listed twice or known already; [`crate::Kind::Data`] as
/// [`Tokenizer::load`].
pub fn with_tokens(model_dir: &Path, tokens: &[String]) -> Result<(String, Vec<u32>)> {
    let path = model_dir.join("tokenizer.json");
    let mut inner = parse(&path, &read_tokenizer(model_dir)?)?;
    let mut ids = Vec::new();
    for token in tokens {
        if let Some(id) = inner.token_to_id(token) {
            return Err(Error::config(format!("tuning.new_tokens: {token:?} is no new token, it has the id {id}"))
                .hint("remove it, or the second of two"));
        }
        inner
            .add_tokens([tokenizers::AddedToken::from(token.clone(), false)])
            .map_err(|error| Error::config(format!("tuning.new_tokens: {token:?} cannot be added: {error}")))?;
        ids.extend(inner.token_to_id(token));
    }
    if ids.len() != tokens.len() {
        return Err(Error::config("tuning.new_tokens: a token cannot be added").hint("no token may be empty"));
    }
    let text = inner.to_string(true).map_err(|error| Error::data(format!("{}: {error}", path.display())))?;
    Ok((text, ids))
}

/// The fields `…_token` that hold a string or an added token, and lists of further ones.
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

/// The bytes of a file of the model folder, or none if it is not there.
pub(super) fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
    let too_large =
        |bytes| Error::data(format!("{} has {bytes} bytes, expected at most {MAX_FILE_BYTES}", path.display()));
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() > MAX_FILE_BYTES => Err(too_large(metadata.len())),
        Ok(_) => {
            std::fs::read(path).map(Some).map_err(|error| Error::io("read", path, &error).with_kind(crate::Kind::Data))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", path, &error).with_kind(crate::Kind::Data)),
    }
}

fn read_json(path: &Path) -> Result<Map<String, Value>> {
    let Some(bytes) = read_file(path)? else { return Ok(Map::new()) };
    serde_json::from_slice(&bytes)
        .map_err(|error| Error::data(format!("{}:{}: expected a JSON object: {error}", path.display(), error.line())))
}

//! The tokenizer of a model folder: `tokenizer.json`, with special tokens from the files beside it.
use std::io::Read as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::catch_panic::isolated;
use super::growth::{self, Growth, Words};
use super::thread_time::thread_time;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// The largest tokenizer file, in bytes. The largest known `tokenizer.json` has 40 MB.
pub const MAX_FILE_BYTES: u64 = 512 << 20;

/// The token ids of a text, with the byte range of each.
#[derive(Debug, Clone, Default)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// One byte range `start..end` of the text per id; empty for a token that the post-processor adds.
    pub offsets: Vec<(usize, usize)>,
}

/// A tokenizer with its special tokens and the ids that end an answer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    config: Map<String, Value>,
    special_tokens: Map<String, Value>,
    special_texts: Vec<String>,
    /// The ids of special tokens, sorted.
    special_ids: Vec<u32>,
    stop_ids: Vec<u32>,
    eos_id: Option<u32>,
    hash: blake3::Hash,
    growth: Growth,
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
        let (mut inner, growth) = parse(&path, &bytes)?;
        // Whatever the file says: batches have no padding, and the encoder truncates rows itself.
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
        Ok(Self { inner, config, special_tokens, special_texts, special_ids, stop_ids, eos_id, hash, growth })
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
        encode_first((&self.inner, self.growth), text, add_special, most).map(|(encoded, _)| encoded)
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
        if self.growth.slow || most.is_some() && text.len() > MAX_RUN {
            return encode_first((&self.inner, self.growth), text, true, most)
                .map(|(encoded, added)| (encoded.ids, added));
        }
        check_length(text, self.growth)?;
        // `encode_fast` omits offsets.
        let encoding = isolated("tokenizing", || self.inner.encode_fast(text, true))?.map_err(untokenized)?;
        Ok((encoding.get_ids().to_vec(), added(&encoding)))
    }

    /// Whether all `texts` have the same tokens with another `pre_tokenizer`, a value of this field of
    /// `tokenizer.json`.
    ///
    /// # Errors
    /// The value is not a pre-tokenizer, or the tokenizer fails with a text.
    pub fn same_tokens_by(&self, pre_tokenizer: &Value, texts: &[String]) -> Result<bool> {
        let other = serde_json::from_value::<tokenizers::pre_tokenizers::PreTokenizerWrapper>(pre_tokenizer.clone());
        let other = other.map_err(|error| Error::data("not a pre-tokenizer").caused_by(error))?;
        let mut tokenizer = self.inner.clone();
        tokenizer.with_pre_tokenizer(Some(other));
        let ids = |tokenizer: &tokenizers::Tokenizer, text: &str| {
            isolated("tokenizing", || tokenizer.encode_fast(text, false))?
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(untokenized)
        };
        for text in texts {
            if ids(&self.inner, text)? != ids(&tokenizer, text)? {
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
        isolated("decoding", || self.inner.decode(ids, skip_special))?
            .map_err(|error| Error::data("cannot decode token ids").caused_by(error))
    }

    /// The vocabulary entry of an id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a vocabulary entry.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The tokenizer of the `tokenizers` crate.
    pub(super) const fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    /// Bounds on the work that the tokenizer may do for a text.
    pub(super) const fn growth(&self) -> Growth {
        self.growth
    }

    /// The added tokens and their ids.
    pub(super) fn added_tokens(&self) -> Vec<(u32, tokenizers::AddedToken)> {
        self.inner
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .iter()
            .map(|(id, token)| (*id, token.clone()))
            .collect()
    }

    /// The id for unknown characters, if the model has one.
    pub(super) fn unknown_id(&self) -> Option<u32> {
        use tokenizers::ModelWrapper::{BPE, Unigram, WordLevel, WordPiece};
        match self.inner.get_model() {
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

/// Texts up to this size, in bytes, are always tokenized as a whole.
const SMALL: usize = 1 << 20;
/// The longest text that is tokenized as a whole, in bytes. Each byte takes about 30 bytes of memory.
const MAX_WHOLE: usize = 128 << 20;
/// How long a tokenizer with suspicious regular expressions may take for a short text, and for each 64 KiB of a longer
/// one.
const PATIENCE: Duration = Duration::from_millis(250);
/// When only the beginning of a text is tokenized, tokens within this many bytes of its end may be wrong.
const MARGIN: usize = 64 << 10;

/// The longest run of letters and digits, of white space or of other characters, in bytes. Tokenizers treat it as one
/// word, which takes about 160 bytes of memory per byte.
const MAX_RUN: usize = 256 << 10;
/// The longest word, in bytes, of a tokenizer whose words can be longer than such runs. Legitimate text without spaces
/// may be long; 8 MiB take about a gigabyte of memory and 15 seconds.
const MAX_WORD: usize = 8 << 20;

/// The first word of `text` that is too long, and how many bytes it may have.
fn long_word(text: &str, words: Words) -> Option<(std::ops::Range<usize>, usize)> {
    if let Some(run) = Some(text).filter(|text| text.len() > MAX_RUN).and_then(long_run) {
        return Some((run, MAX_RUN));
    }
    let text = Some(text).filter(|text| text.len() > MAX_WORD)?;
    let word = match words {
        Words::Runs => None,
        Words::Text => Some(0..text.len()),
        Words::Spaced => {
            let start = |word: &str| word.as_ptr() as usize - text.as_ptr() as usize;
            let long = text.split_whitespace().find(|word| word.len() > MAX_WORD);
            long.map(|word| start(word)..start(word) + word.len())
        }
    };
    word.map(|word| (word, MAX_WORD))
}

/// The first run of `text` of more than [`MAX_RUN`] bytes.
fn long_run(text: &str) -> Option<std::ops::Range<usize>> {
    let class = |letter: char| match letter {
        _ if letter.is_alphanumeric() => 0,
        _ if letter.is_whitespace() => 1,
        _ => 2,
    };
    let (mut start, mut current) = (0, None);
    let mut letters = text.char_indices().map(|(at, letter)| (at, Some(class(letter)))).chain([(text.len(), None)]);
    letters.find_map(|(at, class)| {
        if class == current {
            return None;
        }
        let run = std::mem::replace(&mut start, at)..at;
        current = class;
        (run.len() > MAX_RUN).then_some(run)
    })
}

/// Refuses a text with a word that is too long.
fn check_words(text: &str, words: Words) -> Result<()> {
    let Some((word, most)) = long_word(text, words) else { return Ok(()) };
    let (length, most) = (word.len() >> 10, most >> 10);
    let place = word.start + 1;
    if words == Words::Text && word == (0..text.len()) && most == MAX_WORD >> 10 {
        return Err(Error::data(format!(
            "the text has {length} KiB, and this tokenizer takes it for one word, which is too long (at most {most} KiB)"
        ))
        .hint("split the row; with data.truncation: right only the beginning of a text is looked at"));
    }
    Err(Error::data(format!(
        "the text has a word of {length} KiB from its byte {place} on, which is too long to be tokenized (at most {most} KiB)"
    ))
    .hint("divide the word by spaces or take it out; with data.truncation: right only the beginning of a text is looked at"))
}

/// Refuses a text that is too long.
fn check_length(text: &str, growth: Growth) -> Result<()> {
    let longest = text.len().saturating_mul(growth.factor);
    if longest > MAX_WHOLE.saturating_add(text.len().saturating_mul(8)) {
        return Err(Error::model(format!(
            "the tokenizer can make a text {} times longer, which is too much for one of {} bytes",
            growth.factor,
            text.len()
        ))
        .hint("look at the normalizer in tokenizer.json"));
    }
    if text.len() <= MAX_WHOLE {
        return check_words(text, growth.words);
    }
    let (length, most) = (text.len() >> 20, MAX_WHOLE >> 20);
    Err(Error::data(format!("the text has {length} MiB, which is too long to be tokenized whole (at most {most} MiB)"))
        .hint("split the row, or set data.truncation: right, which looks only at the beginning"))
}

/// The last character boundary of `text` up to `at`.
fn char_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// Refuses a tokenizer that takes too long for the beginning of a text.
fn check_time(inner: &tokenizers::Tokenizer, text: &str) -> Result<()> {
    let mut length = 256;
    while length < text.len() {
        let end = char_boundary(text, length);
        let (began, before) = (Instant::now(), thread_time());
        isolated("tokenizing", || inner.encode_fast(&text[..end], false))?.map_err(untokenized)?;
        let spent = before.and_then(|before| thread_time()?.checked_sub(before)).unwrap_or_else(|| began.elapsed());
        let allowed = PATIENCE + PATIENCE * u32::try_from(length / (64 << 10)).unwrap_or(u32::MAX);
        if spent > allowed {
            return Err(Error::model(format!(
                "the tokenizer takes {:.1} s for the first {end} bytes of a text",
                spent.as_secs_f64()
            ))
            .hint("a regular expression in tokenizer.json repeats what is repeated already"));
        }
        length *= 2;
    }
    Ok(())
}

fn untokenized(error: tokenizers::Error) -> Error {
    Error::data("cannot tokenize").caused_by(error)
}

/// For each id, whether the post-processor has added it.
fn added(encoding: &tokenizers::Encoding) -> Vec<bool> {
    encoding.get_special_tokens_mask().iter().map(|&added| added != 0).collect()
}

/// Tokenizes a text, and says for each id whether the post-processor has added it. `most` is as in
/// [`Tokenizer::encode_first`].
pub(super) fn encode_first(
    (inner, growth): (&tokenizers::Tokenizer, Growth),
    text: &str,
    add_special: bool,
    most: Option<usize>,
) -> Result<(Encoded, Vec<bool>)> {
    let encode = |text: &str| {
        check_length(text, growth)?;
        if growth.slow {
            check_time(inner, text)?;
        }
        isolated("tokenizing", || inner.encode(text, add_special)).and_then(|done| done.map_err(untokenized))
    };
    // Tokens of ordinary text have fewer than 16 bytes on average.
    let mut length = most.map_or(usize::MAX, |most| most.saturating_mul(16).saturating_add(2 * MARGIN));
    // A text with a word that is too long must be cut before the word. For any other, a longer beginning costs little.
    let long = most.is_some() && long_word(text, growth.words).is_some();
    let cut_from = if long { text.len() } else { text.len() / 2 };
    length = if long { length } else { length.max(SMALL) };
    while let Some(most) = most.filter(|_| length < cut_from) {
        let end = char_boundary(text, length);
        let last = char_boundary(text, end - MARGIN);
        // In most tokenizers no token crosses a space. The margin is for the others, and for very long words.
        let cut = text[last..end].rfind(char::is_whitespace).map_or(end, |space| last + space);
        let encoding = encode(&text[..cut])?;
        let sure = cut - MARGIN;
        let offsets = encoding.get_offsets();
        let first = offsets.iter().position(|(start, end)| start < end && *end > sure).unwrap_or(0);
        if first > most {
            let encoded = Encoded { ids: encoding.get_ids()[..first].to_vec(), offsets: offsets[..first].to_vec() };
            return Ok((encoded, added(&encoding)[..first].to_vec()));
        }
        length = length.saturating_mul(4);
    }
    let encoding = encode(text)?;
    let encoded = Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() };
    Ok((encoded, added(&encoding)))
}

fn read_tokenizer(model_dir: &Path) -> Result<Vec<u8>> {
    read_file(&model_dir.join("tokenizer.json"), files::open_member)?.ok_or_else(|| {
        Error::model(format!("{} has no tokenizer.json", model_dir.display()))
            .hint("copy tokenizer.json and tokenizer_config.json of the model into the folder")
    })
}

fn parse(path: &Path, bytes: &[u8]) -> Result<(tokenizers::Tokenizer, Growth)> {
    let read = || {
        let growth = growth::check(bytes).map_err(Error::model)?;
        let loaded = isolated("reading the tokenizer", || tokenizers::Tokenizer::from_bytes(bytes))?;
        Ok((loaded.map_err(|error| Error::model(error.to_string()).caused_by(error))?, growth))
    };
    read().map_err(|error: Error| {
        let error = error.context(path.display()).with_kind(tunesmith_base::Kind::Model);
        error.hint("expected the tokenizer.json of a Hugging Face model")
    })
}

/// The ids that `tokens` get when they are added to the model's tokenizer.
///
/// # Errors
/// Those of [`with_tokens`].
pub fn new_token_ids(model_dir: &Path, tokens: &[String]) -> Result<Vec<u32>> {
    with_tokens(model_dir, tokens).map(|(_, ids)| ids)
}

/// Adds `tokens` to the model's `tokenizer.json`, as Transformers' `add_tokens` does. Returns the JSON text and the new
/// ids.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: a token is empty, listed twice or already in the vocabulary;
/// [`tunesmith_base::Kind::Model`] as in [`Tokenizer::load`].
pub fn with_tokens(model_dir: &Path, tokens: &[String]) -> Result<(String, Vec<u32>)> {
    let path = model_dir.join("tokenizer.json");
    let (mut inner, _) = parse(&path, &read_tokenizer(model_dir)?)?;
    let mut ids = Vec::new();
    for token in tokens {
        if let Some(id) = inner.token_to_id(token) {
            return Err(Error::config(format!("tuning.new_tokens: {token:?} is no new token, it has the id {id}"))
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

/// How to open a file: [`files::open`], or [`files::open_member`] for files of a model folder.
pub(super) type Opener = fn(&Path) -> std::io::Result<std::fs::File>;

/// The bytes of a file; `None` if it does not exist.
pub(super) fn read_file(path: &Path, open: Opener) -> Result<Option<Vec<u8>>> {
    let failed = |error: std::io::Error| Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Model);
    let file = match open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let size = file.metadata().map_err(failed)?.len();
    if size > MAX_FILE_BYTES {
        return Err(Error::model(format!("{} has {size} bytes, expected at most {MAX_FILE_BYTES}", path.display()))
            .hint("copy the file of the model again"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}

/// The JSON object in a file of the model folder; empty if the file does not exist.
pub(super) fn read_json(path: &Path) -> Result<Map<String, Value>> {
    let Some(bytes) = read_file(path, files::open_member)? else { return Ok(Map::new()) };
    serde_json::from_slice(&bytes).map_err(|error| {
        Error::model(format!("{}:{}: expected a JSON object", path.display(), error.line()))
            .caused_by(error)
            .hint("copy the file of the model again")
    })
}

//! The tokenizer in GGUF's form: the tokens with their kinds, merges or scores, the kind of pre-tokenizer, special tokens, and
//! the chat template.
use std::collections::HashMap;
use std::path::Path;

use serde_json::Value as Json;

use super::container::{Header, Value};
use super::split::{self, DEEPSEEK3, GPT4O, LLAMA3, QWEN2, QWEN35, TEKKEN};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_config::arch::Arch;
use tunesmith_data::{ChatTemplate, Tokenizer};

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// A tokenizer, read from a model folder.
#[derive(Debug)]
pub struct GgufVocabulary {
    tokens: HashMap<usize, (String, i32)>,
    merges: Vec<String>,
    /// `tokenizer.ggml.pre`; none if the tokens are `SentencePiece`'s.
    pre: Option<String>,
    /// Whether a space is put before the text (`SentencePiece`).
    prefix: bool,
    /// Whether a text begins with the token for its beginning.
    add_bos: bool,
    template: Option<String>,
    origin: String,
    /// The number of texts that agreed, if `pre` was found by trying.
    tried: Option<usize>,
}

impl GgufVocabulary {
    /// Reads `dir/tokenizer.json` and the chat template, which `template` may replace. `pre` names the pre-tokenizer if
    /// it is not recognized.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: a tokenizer that GGUF has no form for.
    pub fn load(dir: &Path, arch: &Arch, template: Option<&str>, pre: Option<&str>) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let tokenizer = Tokenizer::load_with(dir, &[])?;
        let text = tunesmith_base::files::read_text(&path, tunesmith_data::MAX_TOKENIZER)
            .map_err(|source| Error::io("read", &path, &source).with_kind(tunesmith_base::Kind::Model))?;
        let fail = |message: String| Error::model(format!("{}: {message}", path.display()));
        let json: Json =
            serde_json::from_str(&text).map_err(|error| fail("not valid JSON".to_owned()).caused_by(error))?;
        let model = &json["model"];
        if model["type"].as_str().is_some_and(|kind| kind != "BPE") || !model["vocab"].is_object() {
            return Err(fail(format!("a tokenizer of type {}, expected BPE", model["type"]))
                .hint("not yet: Unigram and WordPiece tokenizers in GGUF"));
        }
        let pieces = model["byte_fallback"].as_bool().unwrap_or(false);
        let mut tried = None;
        let pre = match pre.map(str::to_owned).or_else(|| pre_tokenizer(&json)) {
            None if pieces => None,
            None => {
                let (name, texts) = split::equivalent(&json, &tokenizer)?.ok_or_else(|| {
                    fail("llama.cpp has no name for this tokenizer's way of splitting text".into()).hint(
                        "name the nearest with --pre-tokenizer, such as gpt-2 or qwen2: some texts may then become other tokens",
                    )
                })?;
                tried = Some(texts);
                Some(name.to_owned())
            }
            // With `SentencePiece` tokens, only a given name counts.
            Some(_) if pieces && pre.is_none() => None,
            named => named,
        };
        let template = match template {
            Some(text) => Some(text.to_owned()),
            None => ChatTemplate::find(dir, &tokenizer, None, None)?.map(|template| template.source().to_owned()),
        };
        let first = tokenizer.encode("a", true)?.ids.first().copied();
        Ok(Self {
            tokens: tokens(&json, pieces),
            merges: merges(&model["merges"]),
            pre,
            prefix: json["normalizer"].to_string().contains("\"Prepend\"")
                || ["first", "always"].iter().any(|scheme| json["pre_tokenizer"]["prepend_scheme"] == *scheme),
            add_bos: arch.bos_token_id.is_some() && first == arch.bos_token_id,
            template,
            origin: path.display().to_string(),
            tried,
        })
    }

    /// A remark about the pre-tokenizer for the user, if any.
    pub fn remark(&self) -> Option<String> {
        let (pre, tried) = (self.pre.as_ref()?, self.tried?);
        let tried = count(tunesmith_plan::grouped(tried as u64), "text");
        Some(format!("splits text in its own way; llama.cpp's {pre} made the same tokens of {tried}"))
    }

    /// The keys of the header.
    pub(super) fn describe(&self, arch: &Arch, header: &mut Header) -> Result<()> {
        let rows = arch.vocab_size;
        let beyond = self.tokens.iter().filter(|(id, _)| **id >= rows);
        if let Some((id, (token, _))) = beyond.min_by_key(|(id, _)| **id) {
            return Err(Error::model(format!(
                "{}: token {token:?} is {id}, the model has {}",
                self.origin,
                count(rows, "row")
            ))
            .hint("the tokenizer belongs to another model"));
        }
        let (mut texts, mut kinds) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        for id in 0..rows {
            let (token, kind) = self.tokens.get(&id).cloned().unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
            texts.push(token);
            kinds.push(kind);
        }
        if let Some(pre) = &self.pre {
            header.put("tokenizer.ggml.model", Value::text("gpt2"));
            header.put("tokenizer.ggml.pre", Value::text(pre));
            header.put("tokenizer.ggml.merges", Value::Texts(self.merges.clone()));
        } else {
            // The earlier a piece is merged, the higher its score.
            let ranks: HashMap<String, usize> =
                self.merges.iter().enumerate().rev().map(|(rank, merge)| (merge.replacen(' ', "", 1), rank)).collect();
            let score = |(token, kind): (&String, &i32)| match ranks.get(token) {
                Some(&rank) if *kind == NORMAL => -(rank as f32),
                _ if *kind == NORMAL => -1e9,
                _ => 0.0,
            };
            header.put("tokenizer.ggml.model", Value::text("llama"));
            header.put("tokenizer.ggml.pre", Value::text("default"));
            header.put("tokenizer.ggml.scores", Value::F32s(texts.iter().zip(&kinds).map(score).collect()));
            header.put("tokenizer.ggml.add_space_prefix", Value::Bool(self.prefix));
        }
        header.put("tokenizer.ggml.tokens", Value::Texts(texts));
        header.put("tokenizer.ggml.token_type", Value::I32s(kinds));
        let mut special = |key: &str, id: Option<u32>| {
            if let Some(id) = id {
                header.put(&format!("tokenizer.ggml.{key}_token_id"), Value::U32(id));
            }
        };
        special("bos", arch.bos_token_id);
        special("eos", arch.eos_token_ids.first().copied());
        special("eot", arch.eos_token_ids.get(1).copied());
        special("padding", arch.pad_token_id);
        header.put("tokenizer.ggml.add_bos_token", Value::Bool(self.add_bos));
        header.put("tokenizer.ggml.add_eos_token", Value::Bool(false));
        if let Some(template) = &self.template {
            header.put("tokenizer.chat_template", Value::text(template));
        }
        Ok(())
    }
}

/// Every token by its number, with its kind.
fn tokens(json: &Json, pieces: bool) -> HashMap<usize, (String, i32)> {
    let mut tokens = HashMap::new();
    let unknown = json["model"]["unk_token"].as_str();
    for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
        let byte = pieces && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
        let kind = if byte {
            BYTE
        } else if pieces && unknown == Some(token) {
            UNKNOWN
        } else {
            NORMAL
        };
        tokens.extend(id.as_u64().map(|id| (id as usize, (token.clone(), kind))));
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let (Some(id), Some(token)) = (added["id"].as_u64(), added["content"].as_str()) else { continue };
        let marked = |open: &str, close: &str| token.starts_with(open) && token.ends_with(close);
        let special = added["special"].as_bool().unwrap_or(false) || marked("<|", "|>") || marked("<｜", "｜>");
        let known = tokens.get(&(id as usize)).map(|(_, kind)| *kind);
        let kind = match known {
            Some(UNKNOWN) => UNKNOWN,
            _ if special => CONTROL,
            _ => USER_DEFINED,
        };
        tokens.insert(id as usize, (token.to_owned(), kind));
    }
    tokens
}

/// Merges as `left right`; newer files have them as pairs.
fn merges(json: &Json) -> Vec<String> {
    let one = |merge: &Json| match merge {
        Json::String(text) => Some(text.clone()),
        Json::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    };
    json.as_array().into_iter().flatten().filter_map(one).collect()
}

/// llama.cpp's name for the way in which the tokenizer splits text.
fn pre_tokenizer(json: &Json) -> Option<String> {
    let pre = &json["pre_tokenizer"];
    let parts: Vec<&Json> = pre["pretokenizers"].as_array().map_or_else(|| vec![pre], |parts| parts.iter().collect());
    let kinds: Vec<&str> = parts.iter().filter_map(|part| part["type"].as_str()).collect();
    let splits_itself = parts.last()?["use_regex"].as_bool().unwrap_or(true);
    let pattern = |part: &Json| part["pattern"]["Regex"].as_str().map(str::to_owned);
    let name = match kinds.as_slice() {
        ["ByteLevel"] if splits_itself => "gpt-2",
        ["Digits", "ByteLevel"] if splits_itself && parts[0]["individual_digits"] == true => "smollm",
        ["Split", "Split", "Split", "ByteLevel"]
            if !splits_itself && parts.iter().copied().filter_map(pattern).eq(DEEPSEEK3) =>
        {
            "deepseek-v3"
        }
        ["Split", "ByteLevel"] if !splits_itself => match pattern(parts[0])?.as_str() {
            LLAMA3 if json["model"]["ignore_merges"] == true => "llama-bpe",
            LLAMA3 => "dbrx",
            QWEN2 => "qwen2",
            QWEN35 => "qwen35",
            GPT4O => "gpt-4o",
            TEKKEN if json["model"]["ignore_merges"] == true => "tekken",
            _ => return None,
        },
        _ => return None,
    };
    Some(name.to_owned())
}

//! The tokenizer in GGUF's form: the tokens with their kinds, merges or scores, the kind of pre-tokenizer, special tokens, and
//! the chat template.
use std::collections::HashMap;
use std::path::Path;

use serde_json::Value as Json;

use super::container::{Header, Value};
use super::split::{self, Found};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_config::arch::Arch;
use tunesmith_data::{ChatTemplate, Tokenizer};

// Types of tokens in `tokenizer.ggml.token_type` (`llama_token_type`).
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Special tokens of Gemma 4 that llama.cpp's chat parser reads in an answer, and so must not hide (`conversion/gemma.py`).
const SHOWN: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

/// How llama.cpp makes tokens: the value of `tokenizer.ggml.model`.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    /// `gpt2`: merges of bytes in words, which a rule of this name splits (`tokenizer.ggml.pre`).
    Bytes(String),
    /// `llama`: pieces by their scores (`SentencePiece`).
    Scores,
    /// `gemma4`: merges of pieces in whole lines.
    Lines,
}

/// A tokenizer, read from a model folder.
#[derive(Debug)]
pub struct GgufVocabulary {
    tokens: HashMap<usize, (String, i32)>,
    merges: Vec<String>,
    kind: Kind,
    /// Whether a space is put before the text (`SentencePiece`).
    prefix: bool,
    /// Whether a text begins with the token for its beginning.
    add_bos: bool,
    template: Option<String>,
    origin: String,
    /// The rule that splits text, if it was found rather than named by the user.
    found: Option<Found>,
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
        let architecture = arch.family.gguf.map_or("", |gguf| gguf.name);
        let mut found = None;
        let kind = match pre {
            Some("gemma4") if pieces => Kind::Lines,
            Some(name) => Kind::Bytes(name.to_owned()),
            None if pieces && architecture == "gemma4" && merges_lines(&json, &tokenizer)? => Kind::Lines,
            None if pieces => Kind::Scores,
            None => {
                let rule = split::find(&json, &tokenizer, architecture)?.ok_or_else(|| {
                    fail("llama.cpp has no name for this tokenizer's way of splitting text".into()).hint(
                        "name the nearest with --pre-tokenizer, such as gpt-2 or qwen2: some texts may then become other tokens",
                    )
                })?;
                found = Some(rule);
                Kind::Bytes(rule.name.to_owned())
            }
        };
        let template = match template {
            Some(text) => Some(text.to_owned()),
            None => ChatTemplate::find(dir, &tokenizer, None, None)?.map(|template| template.source().to_owned()),
        };
        let first = tokenizer.encode("a", true)?.ids.first().copied();
        Ok(Self {
            tokens: tokens(&json, pieces, if kind == Kind::Lines { &SHOWN } else { &[] }),
            merges: merges(&model["merges"]),
            kind,
            prefix: json["normalizer"].to_string().contains("\"Prepend\"")
                || ["first", "always"].iter().any(|scheme| json["pre_tokenizer"]["prepend_scheme"] == *scheme),
            add_bos: arch.bos_token_id.is_some() && first == arch.bos_token_id,
            template,
            origin: path.display().to_string(),
            found,
        })
    }

    /// A remark about the pre-tokenizer for the user, if any.
    pub fn remark(&self) -> Option<String> {
        let Found { name, tried, approximate } = self.found?;
        let mut said = Vec::new();
        if let Some(tried) = tried {
            let tried = count(tunesmith_plan::grouped(tried as u64), "text");
            said.push(format!("splits text in its own way; llama.cpp's {name} made the same tokens of {tried}"));
        }
        if approximate {
            said.push(format!(
                "llama.cpp's {name} splits words with combining marks, and capitals of other alphabets than the Latin one, otherwise"
            ));
        }
        (!said.is_empty()).then(|| said.join("; "))
    }

    /// Writes the keys of the tokenizer to the header.
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
        match &self.kind {
            Kind::Bytes(pre) => {
                header.put("tokenizer.ggml.model", Value::text("gpt2"));
                header.put("tokenizer.ggml.pre", Value::text(pre));
            }
            Kind::Scores => {
                header.put("tokenizer.ggml.model", Value::text("llama"));
                header.put("tokenizer.ggml.pre", Value::text("default"));
            }
            Kind::Lines => header.put("tokenizer.ggml.model", Value::text("gemma4")),
        }
        if self.kind == Kind::Scores {
            // The earlier a piece is merged, the higher its score must be.
            let ranks: HashMap<String, usize> =
                self.merges.iter().enumerate().rev().map(|(rank, merge)| (merge.replacen(' ', "", 1), rank)).collect();
            let score = |(token, kind): (&String, &i32)| match ranks.get(token) {
                Some(&rank) if *kind == NORMAL => -(rank as f32),
                _ if *kind == NORMAL => -1e9,
                _ => 0.0,
            };
            header.put("tokenizer.ggml.scores", Value::F32s(texts.iter().zip(&kinds).map(score).collect()));
        } else {
            header.put("tokenizer.ggml.merges", Value::Texts(self.merges.clone()));
        }
        if !matches!(self.kind, Kind::Bytes(_)) {
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

/// Whether the tokenizer merges pieces within each run of line breaks and within each text between them, writes spaces as
/// `▁`, and puts nothing before the text. llama.cpp's `gemma4` does so, and takes a run that is itself a token whole.
///
/// # Errors
/// The tokenizer cannot handle a run.
fn merges_lines(json: &Json, tokenizer: &Tokenizer) -> Result<bool> {
    let (normalizer, pre) = (&json["normalizer"], &json["pre_tokenizer"]);
    let marks =
        normalizer["type"] == "Replace" && normalizer["pattern"]["String"] == " " && normalizer["content"] == "▁";
    // A split at spaces does nothing here, because they were replaced before.
    let whole = pre.is_null() || (pre["type"] == "Split" && pre["pattern"]["String"] == " ");
    let crosses = |merge: &String| merge.contains('\n') && merge.contains(|letter| letter != '\n' && letter != ' ');
    if !marks || !whole || merges(&json["model"]["merges"]).iter().any(crosses) {
        return Ok(false);
    }
    for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
        if !token.is_empty() && token.chars().all(|letter| letter == '\n') {
            let ids = tokenizer.encode(token, false)?.ids;
            if ids.iter().map(|id| u64::from(*id)).ne(id.as_u64()) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Every token by its number, with its kind. Those in `shown` are not hidden, though they may be special.
fn tokens(json: &Json, pieces: bool, shown: &[&str]) -> HashMap<usize, (String, i32)> {
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
            _ if special && !shown.contains(&token) => CONTROL,
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

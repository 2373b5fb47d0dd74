//! Finds the llama.cpp pre-tokenizer that makes the same tokens as an unknown tokenizer, by trying each on texts made of the
//! tokenizer's own tokens.
use serde_json::{Value as Json, json};

use tunesmith_base::error::Result;
use tunesmith_data::Tokenizer;

/// The regular expression by which llama.cpp's pre-tokenizer `llama-bpe` splits text, as `tokenizer.json` has it.
pub(super) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of `qwen2`, which takes digits one by one.
pub(super) const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of `qwen35`, which keeps marks with letters.
pub(super) const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of `gpt-4o`, which splits before a capital letter (gpt-oss).
pub(super) const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of `tekken`, which also takes digits one by one (Mistral).
pub(super) const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Those of `deepseek-v3`, one after the other.
pub(super) const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// The most single tokens, and the most texts of several, to try.
const SINGLE: usize = 20_000;
const JOINED: usize = 30_000;

/// Separators between tokens of a text, besides none.
const BETWEEN: [&str; 24] = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n",
    "\n ",
    "\t",
    "\r\n",
    "'",
    "'s ",
    "'LL",
    ".",
    "...",
    " (",
    "-",
    "_",
    "12",
    " 3456",
    "É",
    " Über",
    "日本",
    " слово",
    "😀",
];

/// llama.cpp's names and their regular expressions, as in `tokenizer.json`.
fn candidates(ignores_merges: bool) -> Vec<(&'static str, Json)> {
    let bytes = |splits: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let sequence = |parts: &[Json]| json!({"type": "Sequence", "pretokenizers": parts});
    let one = |pattern: &str| sequence(&[split(pattern), bytes(false)]);
    // Only by these names does llama.cpp take whole words before merges.
    if ignores_merges {
        return vec![("llama-bpe", one(LLAMA3)), ("tekken", one(TEKKEN))];
    }
    let [numbers, ideographs, words] = DEEPSEEK3.map(split);
    vec![
        ("gpt-2", bytes(true)),
        ("qwen2", one(QWEN2)),
        ("dbrx", one(LLAMA3)),
        ("smollm", sequence(&[json!({"type": "Digits", "individual_digits": true}), bytes(true)])),
        ("qwen35", one(QWEN35)),
        ("gpt-4o", one(GPT4O)),
        ("deepseek-v3", sequence(&[numbers, ideographs, words, bytes(false)])),
    ]
}

/// The name with which every text became the same tokens, and the number of texts.
///
/// # Errors
/// The tokenizer cannot handle a text.
pub(super) fn equivalent(json: &Json, tokenizer: &Tokenizer) -> Result<Option<(&'static str, usize)>> {
    let texts = texts(json, tokenizer)?;
    for (name, pre_tokenizer) in candidates(json["model"]["ignore_merges"] == true) {
        if tokenizer.same_tokens_by(&pre_tokenizer, &texts)? {
            return Ok(Some((name, texts.len())));
        }
    }
    Ok(None)
}

/// Texts of random tokens, the same ones for the same tokenizer.
fn texts(json: &Json, tokenizer: &Tokenizer) -> Result<Vec<String>> {
    let ids: Vec<u32> = json["model"]["vocab"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(_, id)| id.as_u64())
        .filter_map(|id| u32::try_from(id).ok())
        .collect();
    let mut words = Vec::new();
    for id in ids.iter().step_by(ids.len().div_ceil(SINGLE).max(1)) {
        let text = tokenizer.decode(&[*id], true)?;
        // Bytes that are no text by themselves.
        if !text.is_empty() && !text.contains('\u{fffd}') {
            words.push(text);
        }
    }
    let mut texts = words.clone();
    if words.is_empty() {
        return Ok(texts);
    }
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |below: usize| {
        // xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for _ in 0..JOINED {
        let mut text = String::new();
        for _ in 0..2 + draw(6) {
            text += &words[draw(words.len())];
            // Half of the time tokens touch.
            text += BETWEEN.get(draw(2 * BETWEEN.len())).copied().unwrap_or_default();
        }
        texts.push(text);
    }
    Ok(texts)
}

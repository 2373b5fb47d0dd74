//! Finds llama.cpp's pre-tokenizer for a tokenizer: its name for the way in which text is split before merges. If the
//! tokenizer's definition equals a rule of llama.cpp, that rule is taken. Otherwise each rule is tried on texts made of the
//! tokenizer's own tokens.
use serde_json::{Value as Json, json};

use tunesmith_base::error::Result;
use tunesmith_data::Tokenizer;

/// The regular expression by which llama.cpp's pre-tokenizer `llama-bpe` splits text, as in `tokenizer.json`, except that line
/// breaks are written as `\r` and `\n`, as [`steps`] does.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of `qwen2`, which takes digits one by one.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of `qwen35`, which keeps combining marks with letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of `gpt-4o`, which splits before a capital letter (gpt-oss).
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of `tekken`, which also takes digits one by one (Mistral).
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expressions of `deepseek-v3`, applied one after the other.
const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// What `ByteLevel` splits at by itself (GPT-2).
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Each number character by itself, as the step `Digits` with `individual_digits` has it.
const DIGIT: &str = r"\p{N}";
/// The expression of `seed-coder`, which leaves line breaks behind punctuation to the next match.
const SEED: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A rule of llama.cpp (`llama-vocab.cpp`).
#[derive(Debug, Clone, Copy)]
struct Rule {
    name: &'static str,
    /// Regular expressions that split one after the other.
    steps: &'static [&'static str],
    /// Whether a word that is itself a token is taken whole, without merges: `ignore_merges` in `tokenizer.json`.
    whole_words: bool,
    /// Whether llama.cpp's own expression differs from this one: it does not count combining marks as letters, and counts
    /// capitals of alphabets other than the Latin one as small letters.
    approximate: bool,
    /// Other names that llama.cpp's converter gives the rule: pairs of the beginning of `general.architecture` and the name.
    names: &'static [(&'static str, &'static str)],
}

const fn rule(name: &'static str, steps: &'static [&'static str]) -> Rule {
    Rule { name, steps, whole_words: false, approximate: false, names: &[] }
}

/// The rules, in the order in which they are tried.
const RULES: [Rule; 10] = [
    rule("gpt-2", &[GPT2]),
    Rule { names: &[("hunyuan", "hunyuan")], ..rule("qwen2", &[QWEN2]) },
    rule("dbrx", &[LLAMA3]),
    Rule { names: &[("glm4", "glm4"), ("lfm2", "lfm2")], whole_words: true, ..rule("llama-bpe", &[LLAMA3]) },
    Rule { names: &[("granite", "refact")], ..rule("smollm", &[DIGIT, GPT2]) },
    rule("qwen35", &[QWEN35]),
    rule("seed-coder", &[SEED]),
    Rule { names: &[("minimax", "minimax-m2")], approximate: true, ..rule("gpt-4o", &[GPT4O]) },
    Rule { whole_words: true, approximate: true, ..rule("tekken", &[TEKKEN]) },
    Rule { names: &[("hunyuan", "hunyuan-dense")], ..rule("deepseek-v3", &DEEPSEEK3) },
];

impl Rule {
    /// The name for a model of this `general.architecture`.
    fn name(&self, architecture: &str) -> &'static str {
        let own = self.names.iter().find(|(beginning, _)| architecture.starts_with(beginning));
        own.map_or(self.name, |(_, name)| name)
    }

    /// The rule in the form of `pre_tokenizer` in `tokenizer.json`.
    fn pre_tokenizer(&self) -> Json {
        let split =
            |step: &&str| json!({"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": false});
        let mut parts: Vec<Json> = self.steps.iter().map(split).collect();
        parts.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}));
        json!({"type": "Sequence", "pretokenizers": parts})
    }
}

/// The rule that was found for a tokenizer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    /// The value of `tokenizer.ggml.pre`.
    pub(super) name: &'static str,
    /// If the rule was found by trying, the number of texts that became the same tokens; `None` if it was recognized.
    pub(super) tried: Option<usize>,
    /// Whether llama.cpp splits words with combining marks, and capitals of other alphabets than the Latin one, in its own way.
    pub(super) approximate: bool,
}

/// The rule by which llama.cpp makes the same tokens as the tokenizer, for a model of this `general.architecture`; `None` if
/// there is no such rule.
///
/// # Errors
/// The tokenizer cannot handle a text.
pub(super) fn find(json: &Json, tokenizer: &Tokenizer, architecture: &str) -> Result<Option<Found>> {
    let whole_words = json["model"]["ignore_merges"] == true;
    let found = |rule: &Rule, tried| Found { name: rule.name(architecture), tried, approximate: rule.approximate };
    let same = |rule: &Rule, texts: &[String]| tokenizer.same_tokens_by(&rule.pre_tokenizer(), rule.whole_words, texts);
    let defined: Vec<&Rule> = match steps(&json["pre_tokenizer"]) {
        Some(steps) => RULES.iter().filter(|rule| rule.steps == steps.as_slice()).collect(),
        None => Vec::new(),
    };
    if let Some(rule) = defined.iter().find(|rule| rule.whole_words == whole_words) {
        return Ok(Some(found(rule, None)));
    }
    // The definitions differ only in `ignore_merges`, which matters only for words that are tokens. So all tokens are tried.
    let every = words(json, tokenizer, usize::MAX)?;
    for rule in defined {
        if same(rule, &every)? {
            return Ok(Some(found(rule, None)));
        }
    }
    let texts = texts(&words(json, tokenizer, SINGLE)?);
    for rule in &RULES {
        if same(rule, &texts)? {
            return Ok(Some(found(rule, Some(texts.len()))));
        }
    }
    Ok(None)
}

/// The regular expressions of a pre-tokenizer that only splits text and then maps it to bytes (`ByteLevel`), with line breaks
/// written as `\r` and `\n`. `None` if it does anything else.
fn steps(pre_tokenizer: &Json) -> Option<Vec<String>> {
    let parts: Vec<&Json> =
        pre_tokenizer["pretokenizers"].as_array().map_or_else(|| vec![pre_tokenizer], |parts| parts.iter().collect());
    let (last, splits) = parts.split_last()?;
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return None;
    }
    let mut steps = Vec::new();
    for part in splits {
        steps.push(match part["type"].as_str()? {
            "Digits" if part["individual_digits"] == true => DIGIT.to_owned(),
            "Split" => {
                // Keeping only matches is the same as isolating them: a single expression of `RULES` matches everything.
                let keeps_matches = part["behavior"] == "Removed" && part["invert"] == true && splits.len() == 1;
                if !keeps_matches && (part["behavior"] != "Isolated" || part["invert"] != false) {
                    return None;
                }
                part["pattern"]["Regex"].as_str()?.replace('\r', r"\r").replace('\n', r"\n")
            }
            _ => return None,
        });
    }
    if last["use_regex"].as_bool().unwrap_or(true) {
        steps.push(GPT2.to_owned());
    }
    Some(steps)
}

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

/// The texts of at most `most` tokens, evenly chosen from the vocabulary, leaving out tokens that are not whole characters.
fn words(json: &Json, tokenizer: &Tokenizer, most: usize) -> Result<Vec<String>> {
    let ids: Vec<u32> = json["model"]["vocab"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(_, id)| id.as_u64())
        .filter_map(|id| u32::try_from(id).ok())
        .collect();
    let mut words = Vec::new();
    for id in ids.iter().step_by(ids.len().div_ceil(most).max(1)) {
        let text = tokenizer.decode(&[*id], true)?;
        // A token of incomplete characters decodes to the replacement character.
        if !text.is_empty() && !text.contains('\u{fffd}') {
            words.push(text);
        }
    }
    Ok(words)
}

/// The words, and pseudo-random sequences of them. Equal words give equal sequences.
fn texts(words: &[String]) -> Vec<String> {
    let mut texts = words.to_vec();
    if words.is_empty() {
        return texts;
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
    texts
}

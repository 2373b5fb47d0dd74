//! Bounds by how much a tokenizer can make a text longer. Tokenizer files are untrusted, and a few replacements in a
//! row can turn a line into gigabytes. A tokenizer beyond the bounds is refused before it processes any text.
use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use regex::Regex;
use serde::Deserialize;
use serde_json::Value;

use tunesmith_base::error::{Error, Result};

/// The largest factor by which normalizer and pre-tokenizer may lengthen a text, in the worst case.
const MAX_GROWTH: usize = 4096;
/// The largest factor by which the decoder may lengthen an answer.
const MAX_DECODER_GROWTH: usize = 64;
/// The most steps of normalizer, pre-tokenizer, post-processor and decoder together.
const MAX_STEPS: usize = 256;
/// The most ids that the post-processor may add to a text.
const MAX_ADDED: usize = 1024;
/// The longest prefix or suffix that a model may add to each piece of a word, in bytes.
const MAX_AFFIX: usize = 64;
/// The longest word for `WordPiece`, in characters. The time grows with its square.
const MAX_WORD: u64 = 10_000;

/// The parts of `tokenizer.json` that can make a text longer.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    model: Option<Model>,
}

#[derive(Deserialize)]
struct Model {
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    max_input_chars_per_word: Option<u64>,
}

/// The merges of a `tokenizer.json`.
#[derive(Deserialize)]
struct Merging {
    model: Merges,
}

#[derive(Deserialize)]
struct Merges {
    #[serde(default)]
    merges: Option<Vec<Merge>>,
}

/// A merge of two parts: a list, or a string with a space between them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Line(String),
    Pair(String, String),
}

fn malformed(error: serde_json::Error) -> Error {
    Error::model(error.to_string()).caused_by(error)
}

/// Checks that the second part of each merge begins with the prefix. The library removes that many bytes without a
/// check, even within a character.
fn check_merges(json: &[u8], prefix: &str) -> Result<()> {
    let merges: Merging = serde_json::from_slice(json).map_err(malformed)?;
    for (index, merge) in merges.model.merges.into_iter().flatten().enumerate() {
        let (first, second) = match &merge {
            Merge::Line(line) => line.split_once(' ').unwrap_or((line, "")),
            Merge::Pair(first, second) => (first.as_str(), second.as_str()),
        };
        if !second.starts_with(prefix) {
            return Err(Error::model(format!(
                "model.merges[{index}] is {first:?} and {second:?}, expected the second to begin with model.continuing_subword_prefix, {prefix:?}"
            )));
        }
    }
    Ok(())
}

/// What a tokenizer treats as one word. Its model needs memory and time for each word as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Words {
    /// The whole text: the pre-tokenizer is missing, or does not split at words.
    Text,
    /// The text between white space.
    Spaced,
    /// At most a run of letters and digits, of white space, or of other characters.
    Runs,
}

impl Words {
    /// The words of a pre-tokenizer. In a sequence, the step with the shortest words decides.
    fn of(step: &Value) -> Self {
        if let Some(steps) = step["pretokenizers"].as_array() {
            return steps.iter().map(Self::of).max().unwrap_or(Self::Text);
        }
        let is_on = |key: &str| step[key].as_bool() != Some(false);
        match step["type"].as_str().unwrap_or_default() {
            "ByteLevel" if is_on("use_regex") => Self::Runs,
            "BertPreTokenizer" | "Whitespace" | "FixedLength" => Self::Runs,
            "Split" => match (step["pattern"]["String"].as_str(), step["pattern"]["Regex"].as_str()) {
                (Some(" " | "\u{2581}"), _) => Self::Spaced,
                (None, Some(_)) => Self::Runs,
                _ => Self::Text,
            },
            "Metaspace" if is_on("split") => Self::Spaced,
            "WhitespaceSplit" => Self::Spaced,
            _ => Self::Text,
        }
    }
}

/// What a tokenizer may do with a text, in the worst case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Growth {
    /// The largest factor by which a text can become longer.
    pub(super) factor: usize,
    /// Whether a regular expression may take much longer for some texts than for others.
    pub(super) slow: bool,
    /// What the tokenizer treats as one word.
    pub(super) words: Words,
}

/// Checks the content of a `tokenizer.json`.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: the tokenizer exceeds a bound, or the JSON has another form.
pub(super) fn check(json: &[u8]) -> Result<Growth> {
    let parts: Parts = serde_json::from_slice(json).map_err(malformed)?;
    let mut check = GrowthCheck::default();
    let normalizer = check.factor(&parts.normalizer);
    let factor = normalizer.saturating_mul(check.factor(&parts.pre_tokenizer));
    let slow = check.slow;
    if factor > MAX_GROWTH {
        return Err(Error::model(format!(
            "its normalizer and pre_tokenizer can make a text {} longer, at most {MAX_GROWTH} times are allowed",
            times(factor)
        )));
    }
    let decoder = check.factor(&parts.decoder);
    if let Some(overlong) = check.overlong.take() {
        return Err(Error::model(overlong));
    }
    if decoder > MAX_DECODER_GROWTH {
        return Err(Error::model(format!(
            "its decoder can make a text {} longer, at most {MAX_DECODER_GROWTH} times are allowed",
            times(decoder)
        )));
    }
    let added = check.added(&parts.post_processor);
    if added > MAX_ADDED {
        return Err(Error::model(format!(
            "its post_processor adds {added} ids to a text, at most {MAX_ADDED} are allowed"
        )));
    }
    if check.steps > MAX_STEPS {
        return Err(Error::model(format!("it has {} steps, at most {MAX_STEPS} are allowed", check.steps)));
    }
    if let Some(model) = parts.model {
        let affixes = [
            ("continuing_subword_prefix", &model.continuing_subword_prefix),
            ("end_of_word_suffix", &model.end_of_word_suffix),
        ];
        for (name, affix) in affixes {
            let length = affix.as_ref().map_or(0, String::len);
            if length > MAX_AFFIX {
                return Err(Error::model(format!("model.{name} has {length} bytes, at most {MAX_AFFIX} are allowed")));
            }
        }
        if let Some(prefix) = model.continuing_subword_prefix.filter(|prefix| !prefix.is_empty()) {
            check_merges(json, &prefix)?;
        }
        if let Some(word) = model.max_input_chars_per_word.filter(|word| *word > MAX_WORD) {
            return Err(Error::model(format!(
                "model.max_input_chars_per_word is {word}, at most {MAX_WORD} are allowed"
            )));
        }
    }
    Ok(Growth { factor, slow, words: Words::of(&parts.pre_tokenizer) })
}

fn times(factor: usize) -> String {
    if factor == usize::MAX { "arbitrarily".to_owned() } else { format!("{factor} times") }
}

/// What the check has found so far.
#[derive(Default)]
struct GrowthCheck {
    steps: usize,
    slow: bool,
    /// What is wrong with the `precompiled_charsmap` of a step.
    overlong: Option<String>,
}

impl GrowthCheck {
    /// The factor by which the steps of a part can lengthen a text.
    fn factor(&mut self, step: &Value) -> usize {
        self.steps += 1;
        if let Some(charsmap) = step["precompiled_charsmap"].as_str() {
            self.overlong = self.overlong.take().or_else(|| overlong_trie(charsmap));
        }
        for list in ["normalizers", "pretokenizers", "decoders"] {
            if let Some(steps) = step[list].as_array() {
                return steps.iter().fold(1, |factor, step| self.factor(step).saturating_mul(factor));
            }
        }
        let content = step["content"].as_str().unwrap_or_default().len();
        let regex = step["pattern"]["Regex"].as_str();
        self.slow |= regex.is_some_and(is_slow);
        match step["type"].as_str().unwrap_or_default() {
            "Replace" => match (regex, step["pattern"]["String"].as_str()) {
                // The expression may match between any two characters.
                (Some(regex), _) if may_be_empty(regex) => content.saturating_add(1),
                (None, Some("")) => content.saturating_add(1),
                (None, Some(text)) => content.div_ceil(text.len()).max(1),
                _ => content.max(1),
            },
            // `prepend` is added before each piece, and there is at most one piece per byte.
            "Prepend" => step["prepend"].as_str().map_or(1, |text| text.len().saturating_add(1)),
            "Metaspace" => 3 + step["replacement"].as_str().map_or(0, str::len),
            "ByteLevel" | "NFD" | "NFC" | "NFKD" | "NFKC" | "Nmt" | "Precompiled" | "BertNormalizer" => 3,
            _ => 1,
        }
    }

    /// How many ids a post-processor can add to a text.
    fn added(&mut self, step: &Value) -> usize {
        self.steps += 1;
        if let Some(steps) = step["processors"].as_array() {
            return steps.iter().map(|step| self.added(step)).fold(0, usize::saturating_add);
        }
        let of_piece = |piece: &Value| {
            let name = piece["SpecialToken"]["id"].as_str();
            let ids = name.and_then(|name| step["special_tokens"][name]["ids"].as_array());
            // The text itself may occur once.
            ids.map_or(if piece["Sequence"].is_object() { MAX_ADDED / 2 } else { 0 }, Vec::len)
        };
        step["single"].as_array().into_iter().flatten().map(of_piece).fold(0, usize::saturating_add)
    }
}

/// What is wrong with a `precompiled_charsmap`, if its first four bytes claim a longer trie than there is: the tokenizers
/// library asks for twice as much memory as they claim.
fn overlong_trie(charsmap: &str) -> Option<String> {
    let head: [u8; 3] = STANDARD.decode(charsmap.get(..4)?).ok()?.try_into().ok()?;
    let next = STANDARD.decode(charsmap.get(4..8)?).ok()?;
    let claimed = u64::from(u32::from_le_bytes([head[0], head[1], head[2], *next.first()?]));
    let most = (charsmap.len() as u64 / 4 * 3).saturating_sub(4);
    (claimed > most).then(|| {
        format!(
            "the precompiled_charsmap of its normalizer claims a trie of {claimed} bytes, and there are at most {most}"
        )
    })
}

/// Whether a regular expression may match the empty string, judged by its operators.
fn may_be_empty(regex: &str) -> bool {
    regex.is_empty() || regex.contains(['*', '?', '|', '^', '$']) || regex.contains("{0") || regex.contains("\\b")
}

/// Whether a regular expression repeats a group, or has many adjacent repetitions. Then its time may grow with a high
/// power of the text's length. Known tokenizers have no such expressions.
fn is_slow(regex: &str) -> bool {
    static OPTIONAL_GROUP: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\([^()]*\)\?").ok());
    let regex = outline(regex);
    let repeats_group = [")*", ")+", "){"].iter().any(|end| regex.contains(end));
    let regex = OPTIONAL_GROUP.as_ref().map_or(regex.as_str().into(), |group| group.replace_all(&regex, ""));
    let many = |part: &str| {
        let repeats = part.matches(['*', '+', '{']).count();
        // If no match follows two repetitions, the engine tries every way to divide the text between them.
        repeats > 3 || repeats > 1 && !part.ends_with(['*', '+', '?', '}'])
    };
    repeats_group || regex.split('|').any(many)
}

/// The regular expression with one letter in place of each character class and each escape.
fn outline(regex: &str) -> String {
    let mut out = String::new();
    let mut letters = regex.chars().peekable();
    let mut open = 0_usize;
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => {
                let class = letters.next().is_some_and(|kind| matches!(kind, 'p' | 'P'));
                if class && letters.peek() == Some(&'{') {
                    letters.by_ref().find(|letter| *letter == '}');
                }
                if open == 0 {
                    out.push('e');
                }
            }
            '[' => open += 1,
            ']' if open > 0 => {
                open -= 1;
                if open == 0 {
                    out.push('c');
                }
            }
            _ if open > 0 => {}
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn checked(json: &Value) -> Result<Growth, String> {
        check(json.to_string().as_bytes()).map_err(|error| error.message().to_owned())
    }

    fn replace(pattern: &str, content: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
    }

    #[test]
    fn a_charsmap_that_claims_more_than_it_has_is_refused() {
        let step = |claimed: u32, rest: &[u8]| {
            let bytes = [&claimed.to_le_bytes()[..], rest].concat();
            json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(bytes)})
        };
        for claimed in [u32::MAX, 0x7fff_ffff, 64] {
            for rest in [&[][..], &[0, 0], &[0; 8]] {
                let one = step(claimed, rest);
                let mut odd = one.clone();
                odd["normalizers"] = json!([]);
                for normalizer in [json!({"type": "Sequence", "normalizers": [one.clone()]}), one, odd] {
                    let error = checked(&json!({"normalizer": normalizer})).unwrap_err();
                    assert!(error.contains("precompiled_charsmap") && error.contains(&claimed.to_string()), "{error}");
                }
            }
        }
        for (claimed, rest) in [(8, &[0; 8][..]), (4, b"\0\0\0\0abc\0"), (0, &[])] {
            checked(&json!({"normalizer": step(claimed, rest)})).unwrap();
        }
    }

    #[test]
    fn known_tokenizers_are_within_bounds() {
        let gemma = json!({"normalizer": replace(" ", "\u{2581}"), "decoder": {"type": "Sequence", "decoders":
            [replace("\u{2581}", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}});
        assert_eq!(checked(&gemma), Ok(Growth { factor: 3, slow: false, words: Words::Text }));
        let llama2 = json!({"normalizer": {"type": "Sequence", "normalizers":
            [{"type": "Prepend", "prepend": "\u{2581}"}, replace(" ", "\u{2581}")]}});
        assert_eq!((checked(&llama2).unwrap().factor, checked(&llama2).unwrap().words), (12, Words::Text));
        for (pre_tokenizer, words) in [
            (
                json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": false}),
                Words::Text,
            ),
            (json!({"type": "Metaspace", "replacement": "\u{2581}", "add_prefix_space": true}), Words::Spaced),
            (json!({"type": "Digits", "individual_digits": true}), Words::Text),
            (json!({"type": "ByteLevel", "use_regex": false}), Words::Text),
            (json!({"type": "ByteLevel"}), Words::Runs),
            (json!({"type": "BertPreTokenizer"}), Words::Runs),
        ] {
            let several =
                json!({"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, pre_tokenizer.clone()]});
            for step in [pre_tokenizer, several] {
                assert_eq!(checked(&json!({"pre_tokenizer": step.clone()})).unwrap().words, words, "{step}");
            }
        }
        let llama3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
        let split = json!({"type": "Split", "pattern": {"Regex": llama3}, "behavior": "Isolated", "invert": false});
        let llama3 = json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]}});
        assert_eq!(checked(&llama3), Ok(Growth { factor: 3, slow: false, words: Words::Runs }));
    }

    #[test]
    fn repeated_groups_are_doubtful_and_classes_are_not() {
        for fine in
            ["[!()*+{]\\p{L}+", "\\s*[\\r\\n]+|\\s+(?!\\S)", "(?:a|b)?c{1,3}", "\\)*", "c?c*c+(?i:'s|'t)?| ?c+c*"]
        {
            assert!(!is_slow(fine), "{fine}");
        }
        for doubtful in ["(a+)+b", "(?:a|aa)*b", "(a){9}", "a*a*a*a*b", "a*?a*?b|a", "(?<=(a+)+)b"] {
            assert!(is_slow(doubtful), "{doubtful}");
        }
    }

    #[test]
    fn merges_without_their_prefix_are_refused() {
        let merged = |merges: Value| {
            checked(
                &json!({"model": {"type": "BPE", "continuing_subword_prefix": "##", "vocab": {}, "merges": merges}}),
            )
        };
        merged(json!(["a ##b", ["c", "##d"]])).unwrap();
        for (merges, found) in [
            (json!(["a ##b", "a \u{e9}"]), "model.merges[1] is \"a\" and \"\u{e9}\""),
            (json!([["a", "#"]]), "model.merges[0] is \"a\" and \"#\""),
            (json!(["a"]), "model.merges[0] is \"a\" and \"\""),
        ] {
            let error = merged(merges).unwrap_err();
            assert!(error.starts_with(found), "{error}");
        }
        // Other models have the prefix and no merges.
        checked(&json!({"model": {"type": "WordPiece", "continuing_subword_prefix": "##", "vocab": {}}})).unwrap();
    }

    #[test]
    fn what_multiplies_a_text_is_refused() {
        let many = |step: Value| json!({"type": "Sequence", "normalizers": vec![step; 30]});
        let long = "x".repeat(100_000);
        let (pieces, id) = (vec![json!({"SpecialToken": {"id": "a", "type_id": 0}}); 2000], json!({"a": {"ids": [1]}}));
        for (part, value) in [
            ("normalizer", many(replace("a", "aa"))),
            ("normalizer", many(json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "-"}))),
            ("normalizer", replace("a", &long)),
            ("normalizer", json!({"type": "Prepend", "prepend": long})),
            ("pre_tokenizer", json!({"type": "Sequence", "pretokenizers": vec![json!({"type": "ByteLevel"}); 30]})),
            ("decoder", replace("a", &long)),
            ("normalizer", json!({"type": "Sequence", "normalizers": vec![json!({"type": "Lowercase"}); 1000]})),
            ("post_processor", json!({"type": "TemplateProcessing", "single": pieces, "special_tokens": id})),
            (
                "post_processor",
                json!({"type": "TemplateProcessing", "single": vec![json!({"Sequence": {"id": "A"}}); 9]}),
            ),
            ("model", json!({"type": "BPE", "continuing_subword_prefix": long, "vocab": {}})),
            ("model", json!({"type": "WordPiece", "max_input_chars_per_word": 1_000_000_000u64})),
        ] {
            let text = value.to_string();
            assert!(checked(&json!({ part: value })).is_err(), "{part}: {}", &text[..text.len().min(200)]);
        }
    }
}

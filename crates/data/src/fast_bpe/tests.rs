//! Ids and places are those of the `tokenizers` crate, on random texts and with the forms of many tokenizers.
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::*;

/// The pattern of Qwen 2 to 3.
const QWEN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of GPT-4o and gpt-oss.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Those of `DeepSeek` V3, one after the other.
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// At which tokenizers cut, or nearly.
const PIECES: &[&str] = &[
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "\u{85}",
    "a",
    "Word",
    "WORD",
    "é",
    "e\u{301}",
    "ß",
    "ǅ",
    "ʰ",
    "漢字",
    "かな",
    "한글",
    "العربية",
    "\u{200d}",
    "🙂",
    "👩‍👩‍👧",
    "0",
    "12",
    "4096",
    "٣",
    "½",
    "²",
    "'s",
    "'LL",
    "'",
    "’s",
    "!",
    "...",
    "/",
    "\\",
    "<",
    ">",
    "<a>",
    "<b>",
    "<c>",
    "<a><",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "<s>",
    "</s>",
    "\0",
    "\u{fffd}",
    "Å",
    "\u{212b}",
    "ﬁ",
    "\u{1f468}",
];

fn stored(path: &str) -> Value {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
    serde_json::from_slice(&std::fs::read(format!("{folder}{path}/tokenizer.json")).unwrap()).unwrap()
}

fn byte_level(use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}

fn split(pattern: &str) -> Value {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
}

/// The tokenizers of this repository, and the quickstart's with the steps and added tokens of others.
fn tokenizers() -> Vec<(&'static str, Value)> {
    let quickstart = stored("examples/quickstart/model");
    let cut_by = |steps: Vec<Value>| {
        let mut changed = quickstart.clone();
        changed["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": steps });
        changed
    };
    let mut nfc = cut_by(vec![split(QWEN), byte_level(false)]);
    nfc["normalizer"] = json!({ "type": "NFC" });
    let digits = |each: bool| json!({ "type": "Digits", "individual_digits": each });
    let mut stripping = quickstart.clone();
    let token = |id: usize, content: &str, lstrip: bool, rstrip: bool, normalized: bool| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": rstrip,
                "normalized": normalized, "special": !normalized })
    };
    let first = stripping["model"]["vocab"].as_object().unwrap().len();
    let more = [
        token(first, "<a>", true, false, false),
        token(first + 1, "<b>", false, true, false),
        token(first + 2, "<c>", true, true, true),
        token(first + 3, "<a><", false, false, true),
        token(first + 4, "  ", false, false, true),
    ];
    stripping["added_tokens"].as_array_mut().unwrap().extend(more);
    vec![
        ("gpt2", stored("tests/golden/c/tokenizer_bpe_gpt2")),
        ("llama3", stored("tests/golden/c/tokenizer_bpe_llama3")),
        ("qwen", nfc),
        ("o200k", cut_by(vec![split(O200K), byte_level(false)])),
        ("deepseek", cut_by(DEEPSEEK.map(split).into_iter().chain([byte_level(false)]).collect())),
        ("smollm", cut_by(vec![digits(true), byte_level(true)])),
        ("numbers", cut_by(vec![digits(false), byte_level(true)])),
        ("stripping", stripping),
        ("quickstart", quickstart),
    ]
}

fn loaded(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

fn compare(name: &str, tokenizer: &Tokenizer, fast: &FastBpe, text: &str) {
    for special in [false, true] {
        let Some((encoded, added)) = fast.encode(tokenizer, text, special) else {
            assert!(fast.normalizes, "{name}: {text:?} is left to the crate");
            continue;
        };
        let expected = tokenizer.encode(text, special).unwrap();
        assert_eq!(encoded.ids, expected.get_ids(), "{name}: {text:?}");
        assert_eq!(encoded.offsets, expected.get_offsets(), "{name}: {text:?}");
        let mask: Vec<bool> = expected.get_special_tokens_mask().iter().map(|&added| added != 0).collect();
        assert_eq!(added, mask, "{name}: {text:?}");
    }
}

fn texts() -> impl Strategy<Value = String> {
    prop::collection::vec(prop_oneof![4 => prop::sample::select(PIECES).prop_map(str::to_owned), 1 => "\\PC{1,4}", 1 => any::<char>().prop_map(String::from)], 0..24)
        .prop_map(|parts| parts.concat())
}

#[test]
fn tokens_and_offsets_are_those_of_the_crate() {
    let all: Vec<_> = tokenizers().into_iter().map(|(name, json)| (name, loaded(&json))).collect();
    let all: Vec<_> = all.iter().map(|(name, it)| (name, it, FastBpe::of(it).expect(name))).collect();
    let config = ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(text in texts())| {
        for (name, tokenizer, fast) in &all {
            compare(name, tokenizer, fast, &text);
        }
    });
}

/// A long text fills what a thread remembers, and goes on beyond it.
#[test]
fn many_words_and_long_ones_are_tokenized_as_by_the_crate() {
    // Digits are words of their own.
    let letters = |number: usize| {
        let digits = number.to_string();
        digits.bytes().map(|digit| char::from(digit - b'0' + b'a')).collect::<String>()
    };
    let words: Vec<String> =
        (0..2 * MOST_WORDS).map(|number| format!("{} {} ", "x".repeat(number % 90), letters(number))).collect();
    let words = words.concat();
    let tokenizer = loaded(&stored("examples/quickstart/model"));
    let fast = FastBpe::of(&tokenizer).unwrap();
    for piece in words.as_bytes().chunks(100_000) {
        compare("quickstart", &tokenizer, &fast, std::str::from_utf8(piece).unwrap());
    }
    let idle = fast.idle.lock().unwrap();
    assert_eq!((idle.len(), idle[0].words.places.len()), (1, MOST_WORDS), "one thread, and a full memory");
}

#[test]
fn steps_that_are_not_known_are_left_to_the_crate() {
    let (_, quickstart) = tokenizers().pop().unwrap();
    let changed = |path: &[&str], value: Value| {
        let mut json = quickstart.clone();
        *path.iter().fold(&mut json, |place, key| &mut place[*key]) = value;
        FastBpe::of(&loaded(&json)).is_none()
    };
    assert!(!changed(&["normalizer"], Value::Null));
    assert!(changed(&["normalizer"], json!({ "type": "NFKC" })));
    assert!(changed(&["pre_tokenizer"], json!({ "type": "Whitespace" })));
    assert!(changed(&["pre_tokenizer"], Value::Null));
    let look_behind = json!([split(r"(?<=a)b|\s+(?!\S)|\s+"), byte_level(false)]);
    assert!(changed(&["pre_tokenizer", "pretokenizers"], look_behind));
    assert!(changed(&["pre_tokenizer", "pretokenizers"], json!([split(r"\p{L}++|\s+(?!\S)|\s+"), byte_level(false)])));
    assert!(changed(
        &["pre_tokenizer", "pretokenizers"],
        json!([split(r"\p{N}{1,3}+|\s+(?!\S)|\s+"), byte_level(false)])
    ));
    let spaced = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    assert!(changed(&["pre_tokenizer"], spaced.clone()));
    assert!(changed(&["post_processor"], spaced));
    assert!(changed(&["model", "dropout"], json!(0.1)));
    let word = json!([{ "id": 0, "content": "<|endoftext|>", "single_word": true, "lstrip": false, "rstrip": false,
                        "normalized": false, "special": true }]);
    assert!(changed(&["added_tokens"], word));
}

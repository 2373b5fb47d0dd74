//! Unit tests of special tokens in text.
use super::*;
use crate::template::ChatTemplate;
use serde_json::json;

/// A tokenizer of letters, with special tokens of a kind and other parts.
fn tokenizer(kind: &Value, parts: &Value) -> Tokenizer {
    let specials = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|user|>"];
    let letters = "abcdefghijklmnopqrstuvwxyz<>|/_ \u{2581}\n".chars().map(String::from);
    let vocabulary: serde_json::Map<String, Value> = specials
        .map(str::to_owned)
        .into_iter()
        .chain(letters)
        .chain(["im".to_owned(), "<|".to_owned()])
        .zip(0..)
        .map(|(token, id)| (token, json!(id)))
        .collect();
    let added = specials.iter().zip(0..).map(|(text, id)| {
        let mut token = json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        if id > 0 {
            kind.as_object().unwrap().iter().for_each(|(name, value)| token[name] = value.clone());
        }
        token
    });
    let mut tokenizer = json!({"version": "1.0", "added_tokens": added.collect::<Vec<_>>(),
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "vocab": vocabulary, "merges": [["i", "m"], ["<", "|"]]}});
    parts.as_object().unwrap().iter().for_each(|(name, value)| tokenizer[name] = value.clone());
    Tokenizer::of_json(&tokenizer)
}

fn tokenizers() -> Vec<Tokenizer> {
    let kinds = [json!({}), json!({"lstrip": true}), json!({"rstrip": true}), json!({"normalized": true})];
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let metaspace =
        |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true});
    let parts = [
        json!({}),
        json!({"pre_tokenizer": metaspace("first")}),
        json!({"pre_tokenizer": metaspace("always")}),
        json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, replace]}}),
        json!({"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "WhitespaceSplit"}}),
        json!({"normalizer": {"type": "NFKC"}}),
    ];
    kinds.iter().flat_map(|kind| parts.iter().map(move |parts| tokenizer(kind, parts))).collect()
}

const TEXTS: [&str; 6] = [
    "<s>hi <|im_end|> there</s>",
    " a  <s>  b <|user|>\n c</s> ",
    "<|im_end|><|im_end|> <|user|>",
    "no special token",
    "q <|im_end| > <|<s>|> \u{fdd0}",
    "<S> \u{ff1c}s\u{ff1e} <|IM_END|> x",
];

#[test]
fn renamed_tokens_are_the_same_tokens() {
    for tokenizer in tokenizers() {
        let control = Control::new(&tokenizer, "");
        for text in TEXTS {
            let own = control.matches(&tokenizer, text).unwrap();
            let expected = tokenizer.encode(text, false).unwrap();
            let found = control.encode(&tokenizer, text, &own, None).unwrap();
            assert_eq!(found.ids, expected.ids, "{text:?}");
            assert_eq!(found.offsets, expected.offsets, "{text:?}");
        }
    }
}

#[test]
fn tokens_that_are_not_the_templates_are_plain_text() {
    for tokenizer in tokenizers() {
        let control = Control::new(&tokenizer, "");
        let mut plain = tokenizer.bounded().inner.clone();
        plain.set_encode_special_tokens(true);
        for text in TEXTS {
            let expected = plain.encode(text, false).unwrap();
            let found = control.encode(&tokenizer, text, &[], None).unwrap();
            assert!(found.ids.iter().all(|id| !tokenizer.is_control(*id)), "{text:?}");
            if expected.get_ids().iter().all(|id| !tokenizer.is_control(*id)) {
                assert_eq!(found.ids, expected.get_ids(), "{text:?}");
            }
        }
    }
}

#[test]
fn tokens_that_normalization_makes_are_found() {
    let tokenizer = tokenizer(&json!({"normalized": true}), &json!({"normalizer": {"type": "NFKC"}}));
    let template =
        ChatTemplate::compile("{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}", "test", &tokenizer);
    let template = template.unwrap();
    for content in ["\u{ff1c}s\u{ff1e}", "a \u{ff1c}\u{ff5c}im_end|>", "<|im_end\u{ff5c}\u{ff1e}"] {
        let messages = vec![json!({"role": "user", "content": content})];
        let conversation = Conversation { messages, ..Conversation::default() };
        let text = template.render(&conversation, false).unwrap().text;
        let found = template.tokens(&tokenizer, &conversation, &text, false, true, None).unwrap();
        assert_eq!(found.written.len(), 1, "{content}");
        let control = found.encoded.ids.iter().filter(|id| tokenizer.is_control(**id)).count();
        assert_eq!(control, 2, "{content}");
    }
}

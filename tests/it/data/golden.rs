//! The goldens: rendered text, ids and masks of `apply_chat_template`, ids and texts of the tokenizers.
use serde_json::Value;
use tunesmith::data::encode::labeled;
use tunesmith::data::row::{Conversation, Form, Row};
use tunesmith::data::{ChatTemplate, IGNORE};

use super::{golden, tokenizer};

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn conversation(messages: &Value) -> Conversation {
    match Row::parse(serde_json::json!({ "messages": messages }), &[Form::Messages]).unwrap() {
        Row::Chat(conversation) => conversation,
        other => panic!("{other:?}"),
    }
}

#[test]
fn chats_render_tokenize_and_mask_as_in_transformers() {
    let chat = json("chat.json");
    let cases = chat["cases"].as_array().unwrap();
    let mut compared = 0;
    for name in ["bpe_gpt2", "bpe_llama3"] {
        let tokenizer = tokenizer(name);
        for case in cases {
            let label = format!("{name} {} {}", case["template"], case["conversation"]);
            let file = format!("template_{}.jinja", case["template"].as_str().unwrap());
            let source = std::fs::read_to_string(golden(&file)).unwrap();
            let template = ChatTemplate::compile(&source, file, &tokenizer).unwrap();
            let messages = &chat["conversations"][case["conversation"].as_str().unwrap()];
            let generate = case["add_generation_prompt"].as_bool().unwrap();
            let rendered = template.render(&conversation(messages), generate);
            if let Some(error) = case["error"].as_str() {
                assert!(rendered.unwrap_err().message().ends_with(error), "{label}");
                continue;
            }
            let rendered = rendered.unwrap_or_else(|error| panic!("{label}: {error}"));
            assert_eq!(rendered.text, case["rendered"].as_str().unwrap(), "{label}");
            let example = labeled(tokenizer.encode(&rendered.text, false).unwrap(), &rendered.spans);
            assert_eq!(example.input_ids, ids(&case[name]["ids"]), "{label}");
            let mask: Vec<u32> = example.labels.iter().map(|&label| u32::from(label != IGNORE)).collect();
            assert_eq!(mask, ids(&case[name]["assistant_mask"]), "{label}");
            compared += 1;
        }
    }
    assert_eq!(compared, 2 * (85 - 8));
}

#[test]
fn texts_tokenize_and_decode_as_in_transformers() {
    let cases = json("tokenize.json");
    for name in ["bpe_gpt2", "bpe_llama3"] {
        let tokenizer = tokenizer(name);
        for case in cases.as_array().unwrap() {
            let (text, expected) = (case["text"].as_str().unwrap(), &case[name]);
            let encoded = tokenizer.encode(text, true).unwrap();
            assert_eq!(encoded.ids, ids(&expected["ids"]), "{text:?}");
            assert_eq!(tokenizer.encode(text, false).unwrap().ids, ids(&expected["ids_nospecial"]), "{text:?}");
            assert_eq!(tokenizer.decode(&encoded.ids, false).unwrap(), expected["decode"].as_str().unwrap());
            assert_eq!(tokenizer.decode(&encoded.ids, true).unwrap(), expected["decode_skip"].as_str().unwrap());
        }
    }
}

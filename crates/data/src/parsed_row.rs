//! A parsed row with its loss weight, and with notes about fields that say something but that nothing reads.
use serde_json::{Map, Value};

use super::fields::loss_weight;
use super::json_type::is_other_bytes;
use super::row::{Form, Row};
use super::web_address::is_link;
use tunesmith_base::error::Result;

/// A row, and what it says beside its text.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    /// The text, conversation or tokens.
    pub row: Row,
    /// The factor of the row's loss, from its field `loss_weight`; 1 without it.
    pub weight: f32,
    /// Notes for the data report, such as `the field "context"`: fields that nothing reads and that hold a text of
    /// several words, a list or an object.
    pub unread: Vec<String>,
    /// Such a note about the field `url` beside a plain text. It may be the address of an image, which matters only to
    /// a model that reads images.
    pub link: Option<String>,
}

impl Parsed {
    /// Reads a row of one of the given forms. With `text_alone` (`data.format: text`), images, videos and audio beside
    /// the text are ignored; otherwise they are refused.
    ///
    /// # Errors
    /// The errors of [`Row::parse`]; an invalid `loss_weight`.
    pub fn of(value: Value, forms: &[Form], text_alone: bool) -> Result<Self> {
        let weight = loss_weight(&value)?;
        let mut left = Map::new();
        let row = Row::take(value, forms, &mut left)?;
        if !text_alone {
            row.refuse_unread(&left)?;
        }
        let says = |value: &Value| match value {
            Value::String(text) => text.trim().contains(char::is_whitespace),
            Value::Array(items) => !items.is_empty(),
            Value::Object(fields) => !fields.is_empty() && !is_other_bytes(value),
            _ => false,
        };
        let unread = left.iter().filter(|(_, value)| says(value)).map(|(name, _)| format!("the field {name:?}"));
        let link = left.get("url").and_then(Value::as_str).filter(|link| is_link(link));
        let link = link.filter(|_| matches!(row, Row::Text(_)) && !text_alone);
        Ok(Self { unread: unread.collect(), row, weight, link: link.map(|_| "the field \"url\"".to_owned()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::IGNORE;
    use serde_json::json;

    fn parse(row: Value) -> Result<Parsed> {
        Parsed::of(row, Form::ALL, false)
    }

    fn turns(row: Value) -> Vec<(String, String)> {
        let Row::Chat(chat) = parse(row).unwrap().row else { panic!("not a chat") };
        let part = |value: &Value| value.as_str().unwrap().to_owned();
        chat.messages.iter().map(|message| (part(&message["role"]), part(&message["content"]))).collect()
    }

    #[test]
    fn fields_of_other_toolkits_are_read() {
        let turn = |role: &str, content: &str| (role.to_owned(), content.to_owned());
        assert_eq!(
            turns(json!({"id": 1, "system_prompt": "S", "question": "q", "response": "a"})),
            [turn("system", "S"), turn("user", "q"), turn("assistant", "a")]
        );
        assert_eq!(
            turns(json!({"instruction": "i", "context": "c", "response": "r", "category": "qa"})),
            [turn("user", "i\n\nc"), turn("assistant", "r")]
        );
        let both =
            json!({"system": "S", "conversations": [{"from": "system", "value": "S"}, {"from": "gpt", "value": "a"}]});
        assert_eq!(turns(both), [turn("system", "S"), turn("assistant", "a")]);
    }

    #[test]
    fn what_contradicts_itself_or_is_no_text_is_refused() {
        let cases = [
            (json!({"system": "S", "system_prompt": "T", "question": "q", "answer": "a"}), "system_prompt"),
            (json!({"system": "S", "messages": [{"role": "system", "content": "T"}]}), "two system messages"),
            (json!({"instruction": "i", "input": "j", "context": "k", "output": "o"}), "\"context\""),
            (
                json!({"conversations": [{"from": "human", "value": "<image>"}], "images": ["a.png", "b.png"]}),
                "2 images",
            ),
            (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "no image"),
            (json!({"messages": [{"role": "user", "content": [{"type": "video"}]}]}), "video"),
            (json!({"messages": [{"role": "user", "content": "q"}], "videos": ["a.mp4"]}), "videos"),
            (json!({"messages": [{"role": "user", "content": [{"type": "text", "value": "q"}]}]}), "without \"text\""),
            (json!({"messages": [{"role": "assistant", "content": "a", "train_detail": [{}]}]}), "train_detail"),
            (json!({"images": ["a.png"], "input_ids": [1, 2]}), "\"images\", but rows {input_ids} are text only"),
            (json!({"image": {"path": "a.png"}, "input_ids": [1, 2], "labels": [1, 2]}), "\"image\""),
            (json!({"pixel_values": [[0.5]], "input_ids": [1, 2]}), "\"pixel_values\""),
            (
                json!({"input_ids": [1], "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
                "shows images in \"messages\"",
            ),
            (json!({"input_ids": [1, 2], "audio": "a.wav"}), "\"audio\""),
            (json!({"messages": [{"role": "user", "content": "q", "audio": "a.wav"}]}), "the message has \"audio\""),
            (json!({"messages": [{"role": "user", "content": "q", "images": ["a.png"]}]}), "images in \"images\""),
            (json!({"images": ["a.png"], "prompt": "p", "completion": "c"}), "rows {prompt, completion}"),
            (json!({"images": ["a.png"], "text": "t"}), "rows {text} are text only"),
            (json!({"text": {"other bytes": 3}}), "field \"text\" is bytes that are neither UTF-8 text nor an image"),
            (json!({"text": "t", "videos": ["a.mp4"]}), "\"videos\""),
            (json!({"image": "a.png", "images": ["b.png"], "caption": "c"}), "show one image"),
            (json!({"image": "a.png", "chosen": "a", "rejected": "b"}), "preference rows"),
            (json!({"input_ids": [1, 2], "attention_mask": [1]}), "2 input_ids but 1"),
            (json!({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}), "attention_mask"),
            (json!({"input_ids": [1, 2, 3], "attention_mask": [1, 2, 2]}), "attention_mask"),
        ];
        for (row, part) in cases {
            let error = parse(row).unwrap_err();
            assert!(error.message().contains(part), "{error} lacks {part}");
        }
    }

    #[test]
    fn what_names_no_image_stands_beside_any_text() {
        let empty = json!({"images": [], "image": null, "video": "", "input_ids": [1, 2]});
        assert!(matches!(parse(empty).unwrap().row, Row::Tokens { .. }));
        assert!(parse(json!({"images": [], "audio": null, "text": "t"})).is_ok());
        let beside = json!({"images": ["a.png"], "audio": "a.wav", "text": "t"});
        assert_eq!(
            Parsed::of(beside, &[Form::Text], true).unwrap().row,
            Row::Text("t".to_owned()),
            "asked for by name"
        );
        let labeled = json!({"image": "a.png", "text": "t", "label": 1});
        let error = Parsed::of(labeled, &[Form::Labeled], false).unwrap_err();
        assert!(error.message().contains("rows {text, label} are text only"), "{error}");
    }

    #[test]
    fn padding_goes_and_unread_fields_are_named() {
        let padded = json!({"input_ids": [0, 0, 5, 6, 0], "attention_mask": [0, 0, 1, 1, 0]});
        assert_eq!(parse(padded).unwrap().row, Row::Tokens { input_ids: vec![5, 6], labels: vec![5, 6] });
        let padded = json!({"input_ids": [5, 6, 0], "labels": [-100, 6, -100], "attention_mask": [true, true, false]});
        assert_eq!(parse(padded).unwrap().row, Row::Tokens { input_ids: vec![5, 6], labels: vec![IGNORE, 6] });
        let row = json!({"question": "q", "answer": "a", "context": "some words", "id": "x-1", "score": 3, "tags": ["t"],
            "loss_weight": 2, "none": null, "empty": []});
        assert_eq!(parse(row).unwrap().unread, ["the field \"context\"", "the field \"tags\""]);
        assert!(
            parse(json!({"messages": [{"role": "user", "content": "a b"}], "tools": [{}]})).unwrap().unread.is_empty()
        );
    }
}

//! Fields that stand beside a row's text: what its loss counts, a system message; and those that nothing reads, so that they can be
//! named.
use serde_json::{Map, Value};

use super::row::{Form, Row, kind};
use tunesmith_base::error::{Error, Result};

/// Fields of pictures and sound.
const MEDIA: [&str; 6] = ["images", "image", "videos", "video", "audios", "audio"];

/// A row, and what its other fields say.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    /// The row.
    pub row: Row,
    /// What its loss counts ([`loss_weight`]).
    pub weight: f32,
    /// Fields that hold text of several words, a list or an object, and that nothing reads.
    pub unread: Vec<String>,
}

impl Parsed {
    /// Reads a row of one of the given forms.
    ///
    /// # Errors
    /// As [`Row::parse`]; a `loss_weight` that is none.
    pub fn of(value: Value, forms: &[Form]) -> Result<Self> {
        let weight = loss_weight(&value)?;
        let mut left = Map::new();
        let row = Row::take(value, forms, &mut left)?;
        if let Row::Chat(conversation) = &row {
            for (index, message) in conversation.messages.iter().enumerate() {
                let mut parts = message["content"].as_array().into_iter().flatten();
                parts.try_for_each(part).map_err(|error| error.context(format!("message {}", index + 1)))?;
            }
        }
        let says = |value: &Value| match value {
            Value::String(text) => text.trim().contains(char::is_whitespace),
            Value::Array(items) => !items.is_empty(),
            Value::Object(fields) => !fields.is_empty(),
            _ => false,
        };
        let unread = left.iter().filter(|(_, value)| says(value)).map(|(name, _)| format!("the field {name:?}"));
        Ok(Self { unread: unread.collect(), row, weight })
    }
}

/// What a row's loss counts: its field `loss_weight`, 1 where there is none. In CSV files it is a string.
///
/// # Errors
/// It is no number of at least 0.
pub fn loss_weight(row: &Value) -> Result<f32> {
    let number = match &row["loss_weight"] {
        Value::Null => return Ok(1.0),
        Value::Number(number) => number.as_f64(),
        Value::String(text) if text.trim().is_empty() => return Ok(1.0),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.map(|number| number as f32).filter(|weight| weight.is_finite() && *weight >= 0.0).ok_or_else(|| {
        Error::data(format!("field \"loss_weight\" is {}, expected a number of at least 0", row["loss_weight"]))
    })
}

/// The text of `system`, or of `system_prompt` as `OpenOrca` has it; none where it is empty.
pub(super) fn system(row: &mut Map<String, Value>) -> Result<Option<String>> {
    let mut found = None;
    for field in ["system", "system_prompt"] {
        match row.get_mut(field).map(Value::take) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(Value::String(text)) if found.as_ref().is_none_or(|earlier| *earlier == text) => found = Some(text),
            Some(Value::String(_)) => {
                return Err(Error::data("\"system\" and \"system_prompt\" differ, expected one of them"));
            }
            Some(other) => {
                return Err(Error::data(format!("field {field:?} is {}, expected a string", kind(&other))));
            }
        }
    }
    Ok(found)
}

/// Refuses a conversation with pictures or sound: its text would speak of what the model does not get.
pub(super) fn refuse_media(row: &Map<String, Value>) -> Result<()> {
    let there = |value: &Value| match value {
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        value => !value.is_null(),
    };
    match MEDIA.iter().find(|field| row.get(**field).is_some_and(there)) {
        Some(field) => Err(Error::data(format!("the conversation has {field:?}, expected text only"))
            .hint("models of text are trained here: leave such rows out")),
        None => Ok(()),
    }
}

/// Checks a part of a message: text, or what a template may know beside it, but no picture and no sound.
fn part(part: &Value) -> Result<()> {
    let kind = part["type"].as_str().unwrap_or_default();
    if kind == "text" && !part["text"].is_string() {
        return Err(Error::data("\"content\" has a part of type \"text\" without \"text\""));
    }
    if ["image", "video", "audio"].iter().any(|media| kind.contains(media)) {
        return Err(Error::data(format!("\"content\" has a part of type {kind:?}, expected text only"))
            .hint("models of text are trained here: leave such rows out"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::IGNORE;
    use serde_json::json;

    fn parse(row: Value) -> Result<Parsed> {
        Parsed::of(row, Form::ALL)
    }

    fn turns(row: Value) -> Vec<(String, String)> {
        let Row::Chat(chat) = parse(row).unwrap().row else { panic!("not a chat") };
        let part = |value: &Value| value.as_str().unwrap().to_owned();
        chat.messages.iter().map(|message| (part(&message["role"]), part(&message["content"]))).collect()
    }

    #[test]
    fn a_loss_weight_is_a_number_of_at_least_0() {
        let weight = |value: Value| loss_weight(&json!({ "text": "x", "loss_weight": value }));
        assert_eq!(loss_weight(&json!({ "text": "x" })).unwrap(), 1.0);
        assert_eq!(
            [json!(0.25), json!("0.25"), json!(null), json!("")].map(|value| weight(value).unwrap()),
            [0.25, 0.25, 1.0, 1.0]
        );
        for bad in [json!(-1), json!("much"), json!(1e300), json!([1])] {
            assert!(weight(bad.clone()).unwrap_err().to_string().contains("loss_weight"), "{bad}");
        }
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
            (json!({"conversations": [{"from": "human", "value": "<image>"}], "images": ["a.png"]}), "images"),
            (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "image"),
            (json!({"messages": [{"role": "user", "content": [{"type": "text", "value": "q"}]}]}), "without \"text\""),
            (json!({"messages": [{"role": "assistant", "content": "a", "train_detail": [{}]}]}), "train_detail"),
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

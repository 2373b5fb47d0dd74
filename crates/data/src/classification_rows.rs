//! Rows `{text, label}` or `{messages, label}`, for classification and regression.
use serde_json::{Map, Value, json};

use super::json_type::json_type;
use super::messages::Conversation;
use super::row_images;
use tunesmith_base::error::{Error, Result};

/// Names of the field with the text or the messages.
const TEXT: [&str; 4] = ["text", "sentence", "content", "messages"];
/// Names of the field with the label.
const LABEL: [&str; 4] = ["label", "labels", "class", "target"];

/// The text or conversation that has the label.
#[derive(Debug, Clone, PartialEq)]
pub enum ClassifierInput {
    /// Plain text, tokenized without a template.
    Text(String),
    /// A conversation, which the chat template renders.
    Chat(Box<Conversation>),
}

impl ClassifierInput {
    /// Takes the text or the messages from a row.
    ///
    /// # Errors
    /// There is no such field, or more than one.
    pub fn parse(row: &mut Map<String, Value>) -> Result<Self> {
        let field = one_of(row, &TEXT, "text")?;
        match (field, row.get_mut(field).map(Value::take)) {
            ("messages", Some(Value::Array(messages))) => {
                Conversation::new(messages, row, 0).map(|conversation| Self::Chat(conversation.into()))
            }
            (field, Some(Value::String(text))) if field != "messages" => {
                row_images::refuse_beside_label(row)?;
                Ok(Self::Text(text))
            }
            (field, value) => {
                let expected = if field == "messages" { "a list" } else { "a string" };
                let found = json_type(&value.unwrap_or_default());
                Err(Error::data(format!("field {field:?} is {found}, expected {expected}")))
            }
        }
    }

    /// The row without its label: `{text}`, or the form `messages`.
    pub(super) fn into_json(self) -> Value {
        match self {
            Self::Text(text) => json!({ "text": text }),
            Self::Chat(conversation) => conversation.into_json(),
        }
    }
}

/// Reads a row and its label; a number or a boolean becomes text.
///
/// # Errors
/// A field is missing, occurs under two names, or has another type.
pub(super) fn parse(row: &mut Map<String, Value>) -> Result<(ClassifierInput, String)> {
    let field = one_of(row, &LABEL, "label")?;
    let found = row.get_mut(field).map(Value::take).unwrap_or_default();
    let label = match found {
        Value::String(text) if !text.trim().is_empty() => text,
        Value::Bool(value) => value.to_string(),
        // 1 and 1.0 are one label: which of them a column has depends on its other rows.
        Value::Number(number) => match number.as_f64() {
            Some(whole) if whole.fract() == 0.0 && whole.abs() < 1e15 => (whole as i64).to_string(),
            _ => number.to_string(),
        },
        Value::Array(_) => {
            return Err(Error::data(format!("field {field:?} is a list, expected one label"))
                .hint("several labels of one row are not supported"));
        }
        other => {
            let found = if other.is_string() { "an empty string" } else { json_type(&other) };
            return Err(Error::data(format!("field {field:?} is {found}, expected a label: a text or a number")));
        }
    };
    Ok((ClassifierInput::parse(row)?, label))
}

/// The one of `names` that the row has; `what` describes it in messages.
fn one_of<'n>(row: &Map<String, Value>, names: &[&'n str], what: &str) -> Result<&'n str> {
    let found: Vec<&str> =
        names.iter().copied().filter(|name| row.get(*name).is_some_and(|value| !value.is_null())).collect();
    match found.as_slice() {
        [one] => Ok(one),
        [] => {
            let fields: Vec<&str> =
                row.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str()).collect();
            Err(Error::data(format!(
                "the row has no {what}: found the fields [{}], expected one of {}",
                fields.join(", "),
                names.join(", ")
            )))
        }
        many => Err(Error::data(format!("the fields {} may all hold the row's {what}, expected one", many.join(", ")))
            .hint("rename or remove the others")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(mut row: Value) -> Result<String> {
        parse(row.as_object_mut().unwrap()).map(|(_, label)| label)
    }

    #[test]
    fn labels_are_texts_numbers_or_truths() {
        for (value, text) in
            [(json!("ham"), "ham"), (json!(3), "3"), (json!(3.0), "3"), (json!(-0.25), "-0.25"), (json!(true), "true")]
        {
            assert_eq!(label(json!({ "text": "x", "label": value, "id": 7 })).unwrap(), text);
        }
        assert_eq!(label(json!({ "messages": [{ "role": "user", "content": "x" }], "class": "a" })).unwrap(), "a");
    }

    #[test]
    fn what_is_missing_doubtful_or_several_is_refused() {
        for (row, part) in [
            (json!({ "text": "x" }), "no label: found the fields [text]"),
            (json!({ "label": "a", "question": "x" }), "no text"),
            (json!({ "text": "x", "label": null }), "no label"),
            (json!({ "text": "x", "label": " " }), "an empty string"),
            (json!({ "text": "x", "label": ["a", "b"] }), "a list, expected one label"),
            (json!({ "text": "x", "label": 1, "target": 2 }), "label, target may all hold"),
            (json!({ "text": 5, "label": 1 }), "a number, expected a string"),
        ] {
            let error = label(row).unwrap_err();
            assert!(error.message().contains(part), "{error} lacks {part}");
        }
    }
}

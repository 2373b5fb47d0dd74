//! Rows `{text, label}` or `{messages, label}`: what a classification or a regression learns from.
use serde_json::{Map, Value, json};

use super::encode::Notes;
use super::messages::Conversation;
use super::row::{Row, kind};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use tunesmith_base::error::{Error, Result};

/// Fields that a row's text may stand in, or its messages.
const TEXT: [&str; 4] = ["text", "sentence", "content", "messages"];
/// Fields that its label or number may stand in.
const LABEL: [&str; 4] = ["label", "labels", "class", "target"];

/// What a label is given to: the whole of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Whole {
    /// Plain text.
    Text(String),
    /// Turns, to be rendered by the chat template.
    Chat(Conversation),
}

impl Whole {
    /// Takes it out of a row.
    ///
    /// # Errors
    /// There is none, or more than one.
    pub fn parse(row: &mut Map<String, Value>) -> Result<Self> {
        let field = one_of(row, &TEXT, "text")?;
        match (field, row.get_mut(field).map(Value::take)) {
            ("messages", Some(Value::Array(messages))) => Conversation::new(messages, row, 0).map(Self::Chat),
            (field, Some(Value::String(text))) if field != "messages" => Ok(Self::Text(text)),
            (field, value) => {
                let expected = if field == "messages" { "a list" } else { "a string" };
                let found = kind(&value.unwrap_or_default());
                Err(Error::data(format!("field {field:?} is {found}, expected {expected}")))
            }
        }
    }

    /// Its tokens: text as the tokenizer has it, with what that adds; turns through the chat template, up to their end.
    /// Tokens of `padding` at the end go, since Transformers takes them for padding: the last other one is what counts.
    /// With `split`, special tokens that messages write out are plain text; tokens behind the first `most` do not count.
    ///
    /// # Errors
    /// The tokenizer, the template; there is no token.
    pub fn ids(
        &self,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        padding: Option<u32>,
        (split, most): (bool, Option<usize>),
    ) -> Result<(Vec<u32>, Notes)> {
        let (mut ids, notes) = match self {
            Self::Text(text) => {
                let (ids, added) = tokenizer.ids_first(text, most)?;
                let keeps_tokens = ids.iter().zip(added).any(|(id, added)| !added && tokenizer.is_control(*id));
                (ids, Notes { keeps_tokens, ..Notes::default() })
            }
            Self::Chat(conversation) => {
                let template = template.ok_or_else(|| {
                    Error::data("the row is a conversation, but the model folder has no chat template")
                        .hint("set data.chat_template: chatml, or data.template_path")
                })?;
                let text = template.render(conversation, false)?.text;
                let tokens = template.tokens(tokenizer, conversation, &text, false, (split, most))?;
                let notes = tokens.notes(split);
                (tokens.encoded.ids, notes)
            }
        };
        while ids.len() > 1 && ids.last().copied() == padding {
            ids.pop();
        }
        if ids.is_empty() {
            return Err(Error::data("the text is empty: it has no token to look at").hint("remove the row"));
        }
        Ok((ids, notes))
    }

    /// The part of a row that holds it.
    pub(super) fn into_json(self) -> Value {
        match self {
            Self::Text(text) => json!({ "text": text }),
            Self::Chat(conversation) => conversation.into_json(),
        }
    }
}

/// Reads a row with its label.
///
/// # Errors
/// What was found and what is expected.
pub(super) fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let field = one_of(row, &LABEL, "label")?;
    let found = row.get_mut(field).map(Value::take).unwrap_or_default();
    let label = match found {
        Value::String(text) if !text.trim().is_empty() => text,
        Value::Bool(value) => value.to_string(),
        // 1 and 1.0 are one label: which of them a table holds depends on its other rows.
        Value::Number(number) => match number.as_f64() {
            Some(whole) if whole.fract() == 0.0 && whole.abs() < 1e15 => (whole as i64).to_string(),
            _ => number.to_string(),
        },
        Value::Array(_) => {
            return Err(Error::data(format!("field {field:?} is a list, expected one label"))
                .hint("several labels of one row are not supported"));
        }
        other => {
            let found = if other.is_string() { "an empty string" } else { kind(&other) };
            return Err(Error::data(format!("field {field:?} is {found}, expected a label: a text or a number")));
        }
    };
    Ok(Row::Labeled { whole: Whole::parse(row)?, label })
}

/// Which of some fields there is.
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
    use crate::row::Form;

    fn label(row: Value) -> Result<String> {
        match Row::parse(row, &[Form::Labeled])? {
            Row::Labeled { label, .. } => Ok(label),
            other => panic!("{other:?}"),
        }
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

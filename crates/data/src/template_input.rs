//! A conversation as chat templates see it, in minijinja's values.
use minijinja::Value as JinjaValue;
use minijinja::value::{Kwargs, ValueKind};
use serde_json::Value;

use super::jinja_limits::GenerationMarks;
use super::messages::Conversation;
use super::tojson::to_json;
use tunesmith_base::error::{Error, Result};

/// Characters that Unicode reserves for internal use. Some of them mark places in rendered text.
pub(super) const NONCHARACTERS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// A conversation in minijinja's values. A template can render it from its start up to any message.
pub(super) struct TemplateInput {
    pub(super) messages: Vec<JinjaValue>,
    /// The messages with the arguments of tool calls as JSON text; `None` if no call has arguments.
    pub(super) with_text_arguments: Option<Vec<JinjaValue>>,
    pub(super) tools: JinjaValue,
    /// The row's own variables for the template.
    pub(super) kwargs: Vec<(String, JinjaValue)>,
    /// About the size of the conversation, by which a template's limits grow.
    pub(super) bytes: usize,
    /// Characters that do not occur in the conversation.
    pub(super) marks: GenerationMarks,
    /// Another such character, if one is left.
    pub(super) spare: Option<char>,
}

impl TemplateInput {
    /// Converts the messages.
    ///
    /// # Errors
    /// The conversation leaves no two noncharacters unused, or the arguments of a call are not JSON.
    pub(super) fn new(conversation: &Conversation) -> Result<Self> {
        let mut size = TextSize::default();
        let values =
            conversation.messages.iter().chain(&conversation.tools).chain(conversation.template_kwargs.values());
        values.for_each(|value| size.add(value));
        let mut free = NONCHARACTERS.filter(|mark| !size.marks.contains(mark));
        let (Some(open), Some(close)) = (free.next(), free.next()) else {
            return Err(Error::data("the conversation uses all noncharacters U+FDD0 to U+FDEF"));
        };
        let messages: Vec<JinjaValue> = conversation.messages.iter().map(message_value).collect();
        let texts: Vec<Option<JinjaValue>> = conversation.messages.iter().map(text_arguments).collect::<Result<_>>()?;
        let with_text_arguments = texts.iter().any(Option::is_some).then(|| {
            let pairs = texts.into_iter().zip(&messages);
            pairs.map(|(text, message)| text.unwrap_or_else(|| message.clone())).collect()
        });
        Ok(Self {
            messages,
            with_text_arguments,
            tools: conversation.tools.as_ref().map_or(JinjaValue::from(()), jinja_value),
            kwargs: conversation
                .template_kwargs
                .iter()
                .map(|(name, value)| (name.clone(), jinja_value(value)))
                .collect(),
            bytes: size.bytes,
            marks: GenerationMarks { open, close },
            spare: free.next(),
        })
    }

    /// The conversation with `message` in place of the one at `index`.
    pub(super) fn with_message(&self, index: usize, message: &Value) -> Self {
        let text = text_arguments(message).ok().flatten();
        let message = message_value(message);
        let replace = |messages: &[JinjaValue], message: &JinjaValue| {
            let mut messages = messages.to_vec();
            messages[index] = message.clone();
            messages
        };
        self.map(
            |messages| replace(messages, &message),
            |messages| replace(messages, text.as_ref().unwrap_or(&message)),
        )
    }

    /// The first `count` messages of the conversation, followed by `message`, which has no tool calls.
    pub(super) fn followed(&self, count: usize, message: &Value) -> Self {
        let message = message_value(message);
        let append = |messages: &[JinjaValue]| [&messages[..count], std::slice::from_ref(&message)].concat();
        self.map(append, append)
    }

    fn map(
        &self,
        messages: impl FnOnce(&[JinjaValue]) -> Vec<JinjaValue>,
        with_text_arguments: impl FnOnce(&[JinjaValue]) -> Vec<JinjaValue>,
    ) -> Self {
        Self {
            messages: messages(&self.messages),
            with_text_arguments: self.with_text_arguments.as_deref().map(with_text_arguments),
            tools: self.tools.clone(),
            kwargs: self.kwargs.clone(),
            ..*self
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.messages.len()
    }
}

/// The message with the arguments of its tool calls as JSON text; `None` if it has no arguments.
fn text_arguments(message: &Value) -> Result<Option<JinjaValue>> {
    let mut message = match message.get("tool_calls") {
        Some(Value::Array(_)) => message.clone(),
        _ => return Ok(None),
    };
    let mut any = false;
    for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
        let function = if call["function"].is_object() { &mut call["function"] } else { call };
        let Some(arguments) = function.get_mut("arguments").filter(|arguments| arguments.is_object()) else { continue };
        let text = to_json(&jinja_value(arguments), None, &Kwargs::from_iter([] as [(&str, JinjaValue); 0]));
        let text = text.map_err(|error| Error::data("arguments of a tool call").caused_by(error))?;
        (*arguments, any) = (text.to_string().into(), true);
    }
    Ok(any.then(|| message_value(&message)))
}

/// A message as templates see it. The reasoning of an assistant has three possible names. As in Transformers, a message
/// with any of them gets the two names that templates read.
fn message_value(message: &Value) -> JinjaValue {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let thought = names.iter().filter_map(|name| message.get(name)).find(|thought| !thought.is_null());
    match (message, thought) {
        (Value::Object(fields), Some(thought)) => {
            let mut named = serde_json::Map::new();
            named.insert("thinking".into(), thought.clone());
            named.extend(fields.clone());
            named.insert("reasoning_content".into(), thought.clone());
            jinja_value(&Value::Object(named))
        }
        _ => jinja_value(message),
    }
}

pub(super) fn jinja_value(value: &Value) -> JinjaValue {
    match value {
        Value::Null => JinjaValue::from(()),
        Value::Bool(flag) => JinjaValue::from(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => JinjaValue::from(number),
            (None, Some(number)) => JinjaValue::from(number),
            (None, None) => JinjaValue::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => JinjaValue::from(text.as_str()),
        Value::Array(items) => JinjaValue::from(items.iter().map(jinja_value).collect::<Vec<_>>()),
        Value::Object(fields) => {
            JinjaValue::from_pairs(fields.iter().map(|(name, field)| (name.as_str(), jinja_value(field))))
        }
    }
}

/// The size of a conversation, and the [`NONCHARACTERS`] in it.
#[derive(Default)]
struct TextSize {
    bytes: usize,
    marks: Vec<char>,
}

impl TextSize {
    fn add(&mut self, value: &Value) {
        match value {
            Value::String(text) => {
                self.bytes += text.len();
                // Only a text with the first two bytes of the marks can contain one.
                if text.as_bytes().windows(2).any(|pair| pair == [0xef, 0xb7]) {
                    self.marks.extend(text.chars().filter(|letter| NONCHARACTERS.contains(letter)));
                }
            }
            Value::Array(items) => items.iter().for_each(|item| self.add(item)),
            Value::Object(fields) => {
                for (name, item) in fields {
                    self.bytes += name.len();
                    self.add(item);
                }
            }
            _ => self.bytes += 8,
        }
    }
}

/// The message with its text as a list of one part.
pub(super) fn with_content_parts(message: &JinjaValue) -> JinjaValue {
    let content = message.get_attr("content").unwrap_or_default();
    if content.as_str().is_none() {
        return message.clone();
    }
    with_content(message, vec![JinjaValue::from_pairs([("type", JinjaValue::from("text")), ("text", content)])].into())
}

pub(super) fn with_content(message: &JinjaValue, content: JinjaValue) -> JinjaValue {
    let Ok(keys) = message.try_iter() else { return message.clone() };
    // A duplicate key keeps its first place and gets the last value.
    let fields = keys.map(|key| (key.clone(), message.get_item(&key).unwrap_or_default()));
    JinjaValue::from_pairs(fields.chain([(JinjaValue::from("content"), content)]))
}

/// A string for a message whose `content` is not one: its parts joined, or an empty string if it has none. `None` for
/// any other message.
pub(super) fn text_for_content(message: &JinjaValue) -> Option<String> {
    let content = message.get_attr("content").unwrap_or_default();
    match content.kind() {
        ValueKind::Seq => {
            let parts = content.try_iter().ok()?.filter_map(|part| part.get_attr("text").ok());
            Some(parts.filter_map(|text| text.as_str().map(str::to_owned)).collect())
        }
        ValueKind::None | ValueKind::Undefined => Some(String::new()),
        _ => None,
    }
}

//! Brings messages to the form that chat templates read. Tools and tool calls become what Transformers documents, also
//! from the older `functions` and `function_call`. Fields that choose the turns to train on are removed.
use serde_json::{Map, Value, json};

use super::json_type::json_type;
use super::numbers;
use super::row_images;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::RESERVED_KWARGS;

/// A conversation. Its messages are objects with a `role`; they keep all fields, because templates may read any.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Conversation {
    /// At least one message, the oldest first.
    pub messages: Vec<Value>,
    /// A list of tools for the template.
    pub tools: Option<Value>,
    /// Messages before this index never carry a loss: the prompt of a prompt/completion row.
    pub first_supervised: usize,
    /// The indices of assistant messages with `weight: 0` or `train: false`, in order. They carry no loss either.
    pub unlearned: Vec<usize>,
    /// The row's own variables for the template (`chat_template_kwargs`), such as `enable_thinking`.
    pub template_kwargs: Map<String, Value>,
    /// The pictures, in the order of the parts `{type: image}` that show them: each a file, relative to `data.image_dir`, or a
    /// `data:` URI.
    pub images: Vec<String>,
    /// The texts with which metrics compare a generation, such as several people's answers; empty if there is only the
    /// one that the row trains on.
    pub references: Box<[String]>,
    /// Whether it trains on the first of several people's answers, because they all differ.
    pub undecided: bool,
}

impl Conversation {
    /// Checks and normalizes messages. Takes `tools` or `functions` from `row`.
    ///
    /// # Errors
    /// There are no messages, or one is malformed.
    pub(super) fn new(mut messages: Vec<Value>, row: &mut Map<String, Value>, first_supervised: usize) -> Result<Self> {
        if messages.is_empty() {
            return Err(Error::data("the conversation has no messages"));
        }
        let mut unlearned = Vec::new();
        for (index, message) in messages.iter_mut().enumerate() {
            let place = |error: Error| error.context(format!("message {}", index + 1));
            if !learned(message).map_err(place)? {
                unlearned.push(index);
            }
            normalize(message).map_err(place)?;
        }
        let images = row_images::take(&mut messages, row)?;
        let template_kwargs = template_kwargs(row)?;
        let (references, tools) = (references(row)?, tools(row)?);
        Ok(Self { messages, tools, first_supervised, unlearned, template_kwargs, images, references, undecided: false })
    }

    /// The conversation as a row of the form `messages`.
    pub(super) fn into_json(self) -> Value {
        let Self { mut messages, tools, first_supervised, unlearned, template_kwargs, images, references, .. } = self;
        let silent = |(index, message): &(usize, &mut Value)| {
            unlearned.contains(index) || (*index < first_supervised && message["role"] == "assistant")
        };
        messages.iter_mut().enumerate().filter(silent).for_each(|(_, message)| message["train"] = false.into());
        let mut row = Map::from_iter([("messages".to_owned(), Value::Array(messages))]);
        row.extend(tools.map(|tools| ("tools".to_owned(), tools)));
        row.extend((!template_kwargs.is_empty()).then(|| (KWARGS.to_owned(), template_kwargs.into())));
        row.extend(
            (!images.is_empty()).then(|| ("images".to_owned(), images.into_iter().map(row_images::written).collect())),
        );
        row.extend((!references.is_empty()).then(|| (REFERENCES.to_owned(), references.into_vec().into())));
        row.into()
    }
}

/// A row's field with the texts that metrics compare a generation with.
const REFERENCES: &str = "reference_answers";

/// Takes the references from a row; empty if it has none.
fn references(row: &mut Map<String, Value>) -> Result<Box<[String]>> {
    let Some(found) = row.shift_remove(REFERENCES).filter(|value| !value.is_null()) else { return Ok(Box::default()) };
    let texts = found.as_array().and_then(|items| items.iter().map(|item| item.as_str().map(str::to_owned)).collect());
    texts.ok_or_else(|| Error::data(format!("{REFERENCES:?} is {}, expected a list of strings", json_type(&found))))
}

/// A row's field with variables for the template, as in TRL.
const KWARGS: &str = "chat_template_kwargs";

/// Takes the variables for the template from a row.
fn template_kwargs(row: &mut Map<String, Value>) -> Result<Map<String, Value>> {
    match row.shift_remove(KWARGS) {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(mut kwargs)) => {
            // In a column store, a variable of another row is null.
            kwargs.retain(|_, value| !value.is_null());
            match kwargs.keys().find(|name| RESERVED_KWARGS.contains(&name.as_str())) {
                None => Ok(kwargs),
                Some(name) => Err(Error::data(format!("{KWARGS:?} sets {name:?}, which the row or tunesmith sets"))),
            }
        }
        Some(other) => Err(Error::data(format!("{KWARGS:?} is {}, expected an object", json_type(&other)))),
    }
}

/// Whether a message may carry a loss. Removes the fields that say so: `weight` (`OpenAI`), `train` and `training`
/// (Axolotl).
fn learned(message: &mut Value) -> Result<bool> {
    let Value::Object(fields) = message else {
        return Err(Error::data(format!("found {}, expected an object", json_type(message))));
    };
    row_images::refuse_media_of_message(fields)?;
    let is_assistant = fields.get("role").is_some_and(|role| role == "assistant");
    if fields.get("train_detail").is_some_and(|detail| !detail.is_null()) {
        return Err(Error::data("\"train_detail\" chooses parts of a message, expected \"train\": true or false")
            .hint("a template can mark what is learned of a message by {% generation %}"));
    }
    let mut learned = true;
    for field in ["weight", "train", "training"] {
        let Some(value) = fields.shift_remove(field).filter(|value| !value.is_null()) else { continue };
        let (wanted, expected) = match field {
            "weight" => (
                value.as_f64().and_then(|weight| match weight {
                    0.0 => Some(false),
                    1.0 => Some(true),
                    _ => None,
                }),
                "0 or 1",
            ),
            _ => (value.as_bool(), "true or false"),
        };
        let wanted = wanted.ok_or_else(|| Error::data(format!("{field:?} is {value}, expected {expected}")))?;
        if wanted && !is_assistant && field != "weight" {
            return Err(Error::data(format!("{field:?} is true, but only assistant messages are trained on"))
                .hint("data.loss_on: all trains on every message"));
        }
        learned &= wanted;
    }
    Ok(learned || !is_assistant)
}

/// Checks a message and normalizes its tool calls.
fn normalize(message: &mut Value) -> Result<()> {
    let Value::Object(fields) = message else { return Ok(()) };
    match fields.get("role") {
        Some(Value::String(role)) if role == "function" => {
            fields.insert("role".to_owned(), "tool".into());
        }
        Some(Value::String(_)) => {}
        role => {
            let found = json_type(role.unwrap_or(&Value::Null));
            return Err(Error::data(format!("\"role\" is {found}, expected a string")));
        }
    }
    if let Some(call) = fields.shift_remove("function_call").filter(|call| !call.is_null()) {
        let call = from_text(call);
        if !call["name"].is_string() {
            return Err(Error::data(format!(
                "\"function_call\" is {}, expected {{name, arguments}}",
                json_type(&call)
            )));
        }
        fields.insert("tool_calls".to_owned(), json!([{ "type": "function", "function": call }]));
    }
    match fields.get_mut("tool_calls").map(Value::take).map(from_text) {
        None => {}
        Some(Value::Null) => drop(fields.shift_remove("tool_calls")),
        Some(Value::Array(calls)) if calls.is_empty() => drop(fields.shift_remove("tool_calls")),
        Some(Value::Array(calls)) => {
            let calls: Vec<Value> = calls.into_iter().map(call).collect::<Result<_>>()?;
            fields.insert("tool_calls".to_owned(), calls.into());
        }
        Some(other) => {
            return Err(Error::data(format!("\"tool_calls\" is {}, expected a list", json_type(&other))));
        }
    }
    let calls = fields.contains_key("tool_calls");
    match fields.get("content").unwrap_or(&Value::Null) {
        Value::String(_) | Value::Array(_) => {}
        Value::Null if calls => {}
        Value::Null => {
            let found = if fields.contains_key("content") { "null" } else { "missing" };
            return Err(Error::data(format!("\"content\" is {found}, expected a string or a list"))
                .hint("write the message's text; an empty one is \"\""));
        }
        content => {
            return Err(Error::data(format!("\"content\" is {}, expected a string or a list", json_type(content))));
        }
    }
    // Templates handle missing fields, but few handle null. Transformers drops null fields too.
    fields.retain(|_, value| !value.is_null());
    Ok(())
}

/// Normalizes a call `{function: {name, arguments}}` or `{name, arguments}`. Templates expect arguments as an object,
/// so JSON text becomes one.
fn call(call: Value) -> Result<Value> {
    let mut call = from_text(call);
    let function = if call["function"].is_object() { &mut call["function"] } else { &mut call };
    let Some(fields) = function.as_object_mut().filter(|fields| fields.get("name").is_some_and(Value::is_string))
    else {
        return Err(Error::data(format!("a tool call is {call}, expected {{function: {{name, arguments}}}}")));
    };
    if let Some(arguments) = fields.get_mut("arguments") {
        match from_text(arguments.take()) {
            Value::String(text) if text.trim().is_empty() => *arguments = json!({}),
            other => *arguments = other,
        }
    }
    Ok(call)
}

/// The list or object that a JSON text contains; any other value unchanged.
fn from_text(value: Value) -> Value {
    match &value {
        Value::String(text) if text.trim_start().starts_with(['{', '[']) => numbers::parse(text).unwrap_or(value),
        _ => value,
    }
}

/// The tools of a row: a list in `tools` or the older `functions`, or the same as JSON text.
fn tools(row: &mut Map<String, Value>) -> Result<Option<Value>> {
    let mut take = |field: &str| row.get_mut(field).map(Value::take).map(from_text).filter(|value| !value.is_null());
    let wrong = |field: &str, found: &Value| {
        Error::data(format!("{field:?} is {}, expected a list of functions, or one as JSON text", json_type(found)))
    };
    let (field, tools) = match (take("tools"), take("functions")) {
        (Some(tools), _) => ("tools", tools),
        (None, Some(Value::Array(functions))) => ("functions", Value::Array(functions)),
        (None, Some(other)) => return Err(wrong("functions", &other)),
        (None, None) => return Ok(None),
    };
    match tools {
        Value::Array(tools) if tools.is_empty() => Ok(None),
        Value::Array(tools) => {
            let tools: Vec<Value> = tools.into_iter().map(from_text).map(wrapped).collect();
            match tools.iter().find(|tool| !tool.is_object()) {
                None => Ok(Some(tools.into())),
                Some(tool) => {
                    Err(Error::data(format!("a tool in {field:?} is {}, expected an object", json_type(tool))))
                }
            }
        }
        Value::String(text) if text.trim().is_empty() => Ok(None),
        other => Err(wrong(field, &other)),
    }
}

/// A bare function, as in LLaMA-Factory and `OpenAI`'s older form, becomes the tool that templates read.
fn wrapped(tool: Value) -> Value {
    if tool["name"].is_string() && tool.get("function").is_none() && tool.get("type").is_none() {
        return json!({ "type": "function", "function": tool });
    }
    tool
}

/// Converts a ShareGPT turn `{from, value}` to a message.
///
/// # Errors
/// A field is missing, or `from` is unknown.
pub(super) fn share_gpt_turn(turn: Value) -> Result<Value> {
    // Some files have OpenAI's field names under ShareGPT's key.
    if turn.get("role").is_some() {
        return Ok(turn);
    }
    let Value::Object(mut turn) = turn else {
        return Err(Error::data(format!("a turn is {}, expected {{from, value}}", json_type(&turn))));
    };
    let text = |turn: &mut Map<String, Value>, field: &str| match turn.shift_remove(field) {
        Some(Value::String(text)) => Ok(text),
        other => {
            Err(Error::data(format!("field {field:?} is {}, expected a string", json_type(&other.unwrap_or_default()))))
        }
    };
    let (from, value) = (text(&mut turn, "from")?, text(&mut turn, "value")?);
    let role = match from.as_str() {
        "human" | "user" => "user",
        "gpt" | "chatgpt" | "assistant" | "model" | "bing" | "bard" => "assistant",
        "system" => "system",
        "tool" | "function_response" | "observation" => "tool",
        "function_call" | "tool_call" => {
            let calls = match from_text(Value::String(value)) {
                Value::Array(calls) => calls,
                call @ Value::Object(_) => vec![call],
                _ => return Err(Error::data(format!("a turn from {from:?} is no JSON, expected {{name, arguments}}"))),
            };
            let calls: Vec<Value> =
                calls.into_iter().map(|call| json!({ "type": "function", "function": call })).collect();
            return Ok(with_marks(json!({"role": "assistant", "content": "", "tool_calls": calls}), &turn));
        }
        other => {
            return Err(Error::data(format!(
                "a turn is from {other:?}, expected human, gpt, system, tool or function_call (or user, assistant)"
            )));
        }
    };
    Ok(with_marks(json!({"role": role, "content": value}), &turn))
}

/// Copies the fields that choose the turns to train on from the turn to the message.
fn with_marks(mut message: Value, turn: &Map<String, Value>) -> Value {
    for field in ["weight", "train", "training", "train_detail"] {
        if let Some(value) = turn.get(field) {
            message[field] = value.clone();
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(row: Value) -> Result<Conversation> {
        let Value::Object(mut row) = row else { panic!("no object") };
        let Some(Value::Array(messages)) = row.remove("messages") else { panic!("no messages") };
        Conversation::new(messages, &mut row, 0)
    }

    #[test]
    fn older_and_written_calls_become_the_same_call() {
        let expected = json!({"role": "assistant", "tool_calls":
            [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]});
        let function = json!({"name": "add", "arguments": "{\"a\": 1}"});
        let cases = [
            json!({"role": "assistant", "content": null, "function_call": function}),
            json!({"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": function}]}),
            json!({"role": "assistant", "content": null, "tool_calls":
                "[{\"type\": \"function\", \"function\": {\"name\": \"add\", \"arguments\": {\"a\": 1}}}]"}),
        ];
        for message in cases {
            assert_eq!(conversation(json!({"messages": [message]})).unwrap().messages[0], expected);
        }
        let turn = json!({"from": "function_call", "value": "{\"name\": \"add\", \"arguments\": {\"a\": 1}}"});
        let turn = share_gpt_turn(turn).unwrap();
        let call = &conversation(json!({"messages": [turn]})).unwrap().messages[0]["tool_calls"];
        assert_eq!(*call, expected["tool_calls"]);
        let answer = json!({"role": "function", "name": "add", "content": "1"});
        let answer = &conversation(json!({"messages": [answer]})).unwrap().messages[0];
        assert_eq!(*answer, json!({"role": "tool", "name": "add", "content": "1"}));
        let bare = json!({"role": "assistant", "content": "x", "tool_calls": null, "function_call": null});
        assert_eq!(
            conversation(json!({"messages": [bare]})).unwrap().messages[0],
            json!({"role": "assistant", "content": "x"})
        );
    }

    #[test]
    fn tools_come_as_a_list_or_as_text() {
        let tool = json!({"type": "function", "function": {"name": "add", "parameters": {}}});
        let message = json!({"role": "user", "content": "x"});
        let of = |field: &str, value: Value| conversation(json!({"messages": [message], field: value})).unwrap().tools;
        let expected = Some(json!([tool]));
        assert_eq!(of("tools", json!([tool])), expected);
        assert_eq!(of("tools", json!([tool]).to_string().into()), expected);
        assert_eq!(of("tools", json!([tool.to_string()])), expected);
        assert_eq!(of("functions", json!([tool["function"]])), expected);
        assert_eq!(of("tools", json!([tool["function"]]).to_string().into()), expected);
        assert_eq!(of("tools", json!([])), None);
        assert_eq!(of("tools", json!("")), None);
        for wrong in [json!("text"), json!(7), json!([7])] {
            assert!(conversation(json!({"messages": [message], "tools": wrong})).is_err());
        }
    }

    #[test]
    fn marks_choose_turns_and_are_taken_out() {
        let row = json!({"messages": [
            {"role": "user", "content": "a", "training": false},
            {"role": "assistant", "content": "b", "weight": 0},
            {"role": "assistant", "content": "c", "weight": 1.0},
            {"role": "assistant", "content": "d", "train": false},
            {"role": "assistant", "content": "e", "training": null},
        ]});
        let conversation_ = conversation(row).unwrap();
        assert_eq!(conversation_.unlearned, [1, 3]);
        assert!(conversation_.messages.iter().all(|message| message.as_object().unwrap().len() == 2));
        let again = conversation(conversation_.clone().into_json()).unwrap();
        assert_eq!(again, conversation_, "what process writes reads back the same");
        for (field, value) in [("weight", json!(0.5)), ("train", json!("no")), ("training", json!(1))] {
            let error =
                conversation(json!({"messages": [{"role": "assistant", "content": "", field: value}]})).unwrap_err();
            assert!(error.message().contains(field) && error.message().contains("message 1"), "{error}");
        }
        assert!(conversation(json!({"messages": [{"role": "user", "content": "", "train": true}]})).is_err());
    }
}

//! Which parts of a conversation the chat template leaves out. A template without tool support writes nothing for a
//! tool call, and the model would learn to answer nothing where it should call a tool. Such rows are refused. Messages
//! and tools that the template leaves out become notes in the data report. So does an end of turn that the tokenizer
//! does not have.
use std::collections::BTreeSet;

use regex::Regex;
use serde_json::{Value, json};

use super::messages::Conversation;
use super::template::{ChatTemplate, Rendered};
use super::tokenizer::Tokenizer;
use tunesmith_base::error::{Error, Result};

/// Checks that the template writes the tool calls of a conversation, given its `renderings`.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: the template leaves out a call.
pub fn check_calls(template: &ChatTemplate, conversation: &Conversation, renderings: &[Rendered]) -> Result<()> {
    let learned = || renderings.iter().flat_map(|one| one.spans.iter().filter_map(|span| one.text.get(span.clone())));
    for (index, message) in conversation.messages.iter().enumerate() {
        let Some(calls) = message["tool_calls"].as_array().filter(|calls| !calls.is_empty()) else { continue };
        if calls.iter().all(|call| tool_name(call).is_some_and(|name| learned().any(|text| text.contains(name)))) {
            continue;
        }
        // Renamed tools change the text if the template writes their names.
        let mut renamed = conversation.clone();
        for call in renamed.messages[index]["tool_calls"].as_array_mut().into_iter().flatten() {
            let function = if call["function"].is_object() { &mut call["function"] } else { call };
            function["name"] = format!("{}_", function["name"].as_str().unwrap_or_default()).into();
        }
        if template.render(&renamed, false)?.text == template.render(conversation, false)?.text {
            return Err(Error::data(format!(
                "message {}: the chat template ({}) does not write its call of {:?}",
                index + 1,
                template.origin(),
                tool_name(&calls[0]).unwrap_or_default()
            ))
            .hint("set data.template_path to a template that knows tools, or leave such rows out"));
        }
    }
    Ok(())
}

impl ChatTemplate {
    /// Renders a question and its answer, and another question after it if `followed`. Returns the text and the byte
    /// offset at which the answer ends; `None` if the template refuses the conversation.
    pub fn one_answer(&self, followed: bool) -> Option<(String, usize)> {
        const ANSWER: &str = "Certainly";
        let question = json!({"role": "user", "content": "Question"});
        let mut messages = vec![question.clone(), json!({"role": "assistant", "content": ANSWER})];
        messages.extend(followed.then_some(question));
        let text = self.render(&Conversation { messages, ..Conversation::default() }, false).ok()?.text;
        let end = text.rfind(ANSWER)? + ANSWER.len();
        Some((text, end))
    }
}

/// A warning if the template ends the assistant's turns with a mark, such as `<|im_end|>`, that is neither a token of
/// this tokenizer nor one of `stop_strings`. The model would then learn to write the mark's characters, and its answers
/// would not stop there.
pub fn unknown_end(template: &ChatTemplate, tokenizer: &Tokenizer, stop_strings: &[String]) -> Option<String> {
    let (text, answer_end) = template.one_answer(false)?;
    let mark = Regex::new(r"<\|?[^<>|\s]+\|?>").ok()?;
    let is_unknown = |mark: &&str| tokenizer.id(mark).is_none();
    let end = mark.find(&text[answer_end..]).map(|found| found.as_str()).filter(is_unknown)?;
    if stop_strings.iter().any(|stop| stop == end) {
        return None;
    }
    let unknown: BTreeSet<_> = mark.find_iter(&text).map(|found| found.as_str()).filter(is_unknown).collect();
    Some(format!(
        "the chat template ({}) ends a turn with {end}, which is not a token of this model: answers would not stop there. \
         Set tuning.new_tokens: {:?}, or gen.stop_strings: [{end:?}]",
        template.origin(),
        Vec::from_iter(unknown)
    ))
}

/// Phrases for the parts of a conversation that are not in `text`, its last rendering: messages other than the
/// assistant's, tools, and the reasoning of the last turn that is trained on. Also the row's variables that the template
/// does not read.
pub fn unwritten(template: &ChatTemplate, conversation: &Conversation, text: &str) -> Vec<String> {
    let names = conversation.template_kwargs.keys().filter(|name| !template.reads(name));
    names.map(|name| format!("the template variable {name:?}")).chain(left_out(conversation, text)).collect()
}

fn left_out(conversation: &Conversation, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut from = 0;
    for message in conversation.messages.iter().filter(|message| message["role"] != "assistant") {
        let Some(word) = message["content"].as_str().and_then(longest_word) else { continue };
        // Messages are mostly in order, so the search continues after the previous one.
        match text[from..].find(word) {
            Some(at) => from += at,
            None if text.contains(word) => {}
            None => found.push(format!("a message of role {:?}", message["role"].as_str().unwrap_or_default())),
        }
    }
    let tools = conversation.tools.as_ref().and_then(Value::as_array).into_iter().flatten();
    if tools.filter_map(tool_name).any(|name| !text.contains(name)) {
        found.push("tools".to_owned());
    }
    let mut assistants = conversation.messages.iter().enumerate().filter(|(_, message)| message["role"] == "assistant");
    let last = assistants.rfind(|(index, _)| !conversation.unlearned.contains(index));
    if last.and_then(|(_, message)| longest_word(reasoning(message)?)).is_some_and(|word| !text.contains(word)) {
        found.push("reasoning".to_owned());
    }
    found.extend(conversation.messages.iter().flat_map(|message| left_out_fields(message, text)));
    found.sort_unstable();
    found.dedup();
    found
}

/// Phrases for the fields of a message that templates do not know by convention, and of whose texts `text` has no trace. As with a row's
/// fields, those of a single word are ids and the like.
fn left_out_fields<'a>(message: &'a Value, text: &'a str) -> impl Iterator<Item = String> + 'a {
    const KNOWN: [&str; 8] =
        ["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "thinking", "reasoning"];
    let left_out = |value: &Value| {
        let words = value.as_str().filter(|words| words.trim().contains(char::is_whitespace));
        words.and_then(longest_word).is_some_and(|word| !text.contains(word))
    };
    let fields = message.as_object().into_iter().flatten();
    let fields = fields.filter(move |(name, value)| !KNOWN.contains(&name.as_str()) && left_out(value));
    fields.map(|(name, _)| format!("the field {name:?} of a message"))
}

/// The reasoning of an assistant: a field of its message, or its content up to `</think>`.
fn reasoning(message: &Value) -> Option<&str> {
    let field = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| message[*name].as_str());
    field.or_else(|| Some(message["content"].as_str()?.split_once("</think>")?.0))
}

/// The name of a tool or of a tool call.
fn tool_name(call: &Value) -> Option<&str> {
    call["function"]["name"].as_str().or(call["name"].as_str())
}

/// The longest run of letters and digits, which no quoting or escaping changes.
fn longest_word(text: &str) -> Option<&str> {
    text.split(|letter: char| !letter.is_alphanumeric()).filter(|word| !word.is_empty()).max_by_key(|word| word.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::{Form, Row};
    use serde_json::json;

    fn conversation(row: Value) -> Conversation {
        let Row::Chat(chat) = Row::parse(row, Form::ALL).unwrap() else { panic!("not a chat") };
        chat
    }

    #[test]
    fn what_the_text_has_no_trace_of_is_named_once() {
        let tool = json!({"type": "function", "function": {"name": "add"}});
        let row = json!({"tools": [tool], "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is \"this\\that\"?"},
            {"role": "tool", "content": "4711"},
            {"role": "tool", "content": "4712"},
            {"role": "user", "content": "?", "note": "a remark", "source": "x-1"},
            {"role": "assistant", "content": "gone", "reasoning_content": "because"},
        ]});
        let chat = conversation(row);
        let message = |role| format!("a message of role {role:?}");
        let note = "the field \"note\" of a message".to_owned();
        let all = [message("system"), message("tool"), "reasoning".into(), note, "tools".into()];
        assert_eq!(left_out(&chat, "that"), all);
        assert_eq!(left_out(&chat, "remark add 4712 4711 \"this\\\\that\" What brief because"), [""; 0]);
    }
}

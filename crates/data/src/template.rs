//! Chat templates from the model folder, a file or the built-in ones, and how they render conversations.
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;
use std::time::SystemTime;

use minijinja::Value as JinjaValue;
use minijinja::value::{Kwargs, ValueKind};
use serde_json::{Value, json};

use super::catch_panic::isolated;
use super::control::Control;
use super::jinja::{MAX_SOURCE, Program};
use super::jinja_limits::{Blame, blame};
use super::messages::Conversation;
use super::strftime::strftime;
use super::tojson::to_json;
use super::tokenizer::{Opener, Tokenizer, read_file, read_json};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::files;
use tunesmith_config::BuiltinTemplate;

/// Noncharacters, which Unicode reserves for internal use. Two of them mark generation blocks in the output.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// The hint for a template that cannot be used.
const OTHER_TEMPLATE: &str =
    "change a copy of the template and set data.template_path, or set data.chat_template: a built-in one";

/// A compiled chat template, with the special tokens of its tokenizer as variables.
pub struct ChatTemplate {
    program: Program,
    source: String,
    origin: String,
    special_tokens: Vec<(String, JinjaValue)>,
    pub(super) control: Control,
    /// The time that `strftime_now` writes; `None` for the current time.
    now: Option<SystemTime>,
    /// Whether the template reads `content` as a list of parts only, as those of some multimodal models do.
    parts: bool,
    /// Errors that occur even with a plain conversation, so no row has caused them.
    own_faults: OnceLock<Vec<Fault>>,
}

/// An error of a rendering: its line in the template and its message.
type Fault = (Option<usize>, String);

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("origin", &self.origin).finish_non_exhaustive()
    }
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendered {
    /// The output of the template.
    pub text: String,
    /// Byte ranges of generation blocks, or of the text that carries a loss.
    pub spans: Vec<Range<usize>>,
}

/// A conversation in minijinja's values, of which any number of first messages can be rendered.
pub(super) struct Turns {
    messages: Vec<JinjaValue>,
    /// The messages with the arguments of tool calls as JSON text; `None` if no call has arguments.
    written: Option<Vec<JinjaValue>>,
    tools: JinjaValue,
    bytes: usize,
    /// Two characters that do not occur in the conversation.
    pub(super) marks: (char, char),
}

impl Turns {
    /// Converts the messages.
    ///
    /// # Errors
    /// The conversation leaves no two noncharacters unused, or the arguments of a call are not JSON.
    pub(super) fn new(conversation: &Conversation) -> Result<Self> {
        let mut size = TextSize::default();
        conversation.messages.iter().chain(&conversation.tools).for_each(|value| size.add(value));
        let mut free = MARKS.filter(|mark| !size.marks.contains(mark));
        let (Some(open), Some(close)) = (free.next(), free.next()) else {
            return Err(Error::data("the conversation uses all noncharacters U+FDD0 to U+FDEF"));
        };
        let messages: Vec<JinjaValue> = conversation.messages.iter().map(message_value).collect();
        let written = conversation.messages.iter().zip(&messages).map(|(message, seen)| match written(message)? {
            Some(message) => Ok((message_value(&message), true)),
            None => Ok((seen.clone(), false)),
        });
        let written: Vec<(JinjaValue, bool)> = written.collect::<Result<_>>()?;
        let any = written.iter().any(|(_, other)| *other);
        Ok(Self {
            messages,
            written: any.then(|| written.into_iter().map(|(message, _)| message).collect()),
            tools: conversation.tools.as_ref().map_or(JinjaValue::from(()), jinja_value),
            bytes: size.bytes,
            marks: (open, close),
        })
    }

    /// The conversation with `message` in place of the one at `index`.
    pub(super) fn with_message(&self, index: usize, message: &Value) -> Self {
        let with = |messages: &Vec<JinjaValue>, message: &Value| {
            let mut messages = messages.clone();
            messages[index] = message_value(message);
            messages
        };
        let text = written(message).ok().flatten();
        let written = self.written.as_ref().map(|messages| with(messages, text.as_ref().unwrap_or(message)));
        Self { messages: with(&self.messages, message), written, tools: self.tools.clone(), ..*self }
    }

    /// The first `count` messages of the conversation, followed by `message`.
    pub(super) fn followed(&self, count: usize, message: &Value) -> Self {
        let mut messages = self.messages[..count].to_vec();
        messages.push(message_value(message));
        let written = self.written.as_ref().map(|written| {
            let mut written = written[..count].to_vec();
            written.push(message_value(message));
            written
        });
        Self { messages, written, tools: self.tools.clone(), ..*self }
    }

    /// The number of messages.
    pub(super) const fn len(&self) -> usize {
        self.messages.len()
    }
}

/// The message with the arguments of its tool calls as JSON text; `None` if it has none.
fn written(message: &Value) -> Result<Option<Value>> {
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
    Ok(any.then_some(message))
}

/// A message as templates see it. The reasoning of an assistant has three possible names. As in Transformers, a message
/// with any of them gets the two names that templates read.
fn message_value(message: &Value) -> JinjaValue {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let thought = names.iter().filter_map(|name| message.get(name)).find(|thought| !thought.is_null());
    match (message, thought) {
        (Value::Object(fields), Some(thought)) => {
            let mut seen = serde_json::Map::new();
            seen.insert("thinking".into(), thought.clone());
            seen.extend(fields.clone());
            seen.insert("reasoning_content".into(), thought.clone());
            jinja_value(&Value::Object(seen))
        }
        _ => jinja_value(message),
    }
}

fn jinja_value(value: &Value) -> JinjaValue {
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
                    self.marks.extend(text.chars().filter(|letter| MARKS.contains(letter)));
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

impl ChatTemplate {
    /// Finds and compiles the template: `path` or `builtin` if given, else `chat_template.jinja` of the model folder,
    /// else `chat_template` in its `tokenizer_config.json`, else in its `chat_template.json` (multimodal models).
    /// `None` if there is no template.
    ///
    /// # Errors
    /// A file cannot be read; those of [`Self::compile`].
    pub fn find(
        model_dir: &Path,
        tokenizer: &Tokenizer,
        path: Option<&Path>,
        builtin: Option<BuiltinTemplate>,
    ) -> Result<Option<Self>> {
        let in_folder = model_dir.join("chat_template.jinja");
        let (origin, source) = match (path, builtin) {
            (Some(path), _) => {
                let source = read_template(path, files::open)?.ok_or_else(|| {
                    Error::data(format!("{}: no such file", path.display())).hint("check data.template_path")
                })?;
                (path.display().to_string(), source)
            }
            (None, Some(builtin)) => (format!("built-in {builtin}"), builtin_source(builtin).to_owned()),
            (None, None) => {
                if let Some(source) = read_template(&in_folder, files::open_member)? {
                    (in_folder.display().to_string(), source)
                } else {
                    let origin = model_dir.join("tokenizer_config.json").display().to_string();
                    if let Some(source) = configured(tokenizer.config().get("chat_template"), &origin)? {
                        (origin, source)
                    } else {
                        let path = model_dir.join("chat_template.json");
                        let origin = path.display().to_string();
                        let source = configured(read_json(&path)?.get("chat_template"), &origin)?;
                        let Some(source) = source else { return Ok(None) };
                        (origin, source)
                    }
                }
            }
        };
        // A file that the user names is not part of the model.
        let kind = if path.is_some() { Kind::Data } else { Kind::Model };
        Self::compile(&source, origin, tokenizer).map(Some).map_err(|error| error.with_kind(kind))
    }

    /// Compiles a template. `origin` names it in errors.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`] with the line: the source is not valid Jinja, or too large.
    pub fn compile(source: &str, origin: impl Into<String>, tokenizer: &Tokenizer) -> Result<Self> {
        let origin = origin.into();
        let compiled = isolated("compiling", || Program::compile(source));
        let compiled = compiled.map_err(|panic| {
            panic.context(format!("chat template ({origin})")).with_kind(Kind::Model).hint(OTHER_TEMPLATE)
        })?;
        let program = compiled.map_err(|error| {
            if let Some(system) = std::error::Error::source(&error).and_then(|source| source.downcast_ref()) {
                return Error::no_thread(system);
            }
            Error::model(format!("{origin}:{}: {}", error.line().unwrap_or(1), describe(&error))).hint(OTHER_TEMPLATE)
        })?;
        let special_tokens = tokenizer.special_tokens();
        let special_tokens = special_tokens.iter().map(|(name, token)| (name.clone(), jinja_value(token))).collect();
        let control = Control::new(tokenizer, source);
        let template = Self {
            program,
            source: source.to_owned(),
            origin,
            special_tokens,
            control,
            now: None,
            parts: false,
            own_faults: OnceLock::new(),
        };
        Ok(Self { parts: template.reads_parts_only(), own_faults: OnceLock::new(), ..template })
    }

    /// Whether the template writes a message's text only if it is a part of a list.
    fn reads_parts_only(&self) -> bool {
        const WORD: &str = "Certainly";
        if !self.source.contains("type") || self.source.contains("is string") {
            return false;
        }
        let message = json!({ "role": "user", "content": WORD });
        let turns = Turns::new(&Conversation { messages: vec![message], ..Conversation::default() });
        let shows = |parts: bool| {
            let turns = turns.as_ref().ok()?;
            let messages: Vec<JinjaValue> = turns.messages.iter().map(|it| seen(it, parts)).collect();
            Some(self.render_messages(turns, &messages, false).ok()?.contains(WORD))
        };
        shows(false) != Some(true) && shows(true) == Some(true)
    }

    /// The template with a fixed time for `strftime_now`; `None` for the current time.
    #[must_use]
    pub fn at(self, now: Option<SystemTime>) -> Self {
        Self { now, ..self }
    }

    /// Whether the template calls `strftime_now`.
    pub fn is_dated(&self) -> bool {
        self.source.contains("strftime_now")
    }

    /// The date that the template may write; empty if it does not call `strftime_now`.
    pub(super) fn date(&self) -> String {
        let written = strftime("%Y-%m-%d", self.now.unwrap_or_else(SystemTime::now)).unwrap_or_default();
        if self.is_dated() { written } else { String::new() }
    }

    /// Whether the template marks the assistant's text by `{% generation %}`.
    pub const fn marks_generation(&self) -> bool {
        self.program.marks_generation()
    }

    /// Where the template is from, for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a whole conversation.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the template refuses the row. [`tunesmith_base::Kind::Model`]: it takes too much
    /// time or memory, or fails with any row.
    pub fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<Rendered> {
        let turns = Turns::new(conversation)?;
        self.render_first(&turns, turns.len(), add_generation_prompt)
    }

    /// Renders the first `count` messages.
    pub(super) fn render_first(&self, turns: &Turns, count: usize, add_generation_prompt: bool) -> Result<Rendered> {
        Ok(unmark(self.render_marked(turns, count, add_generation_prompt)?, turns.marks))
    }

    /// As [`Self::render_first`], with the marks of generation blocks in the text.
    pub(super) fn render_marked(&self, turns: &Turns, count: usize, add_generation_prompt: bool) -> Result<String> {
        let rendered = self.render_messages(turns, &turns.messages[..count], add_generation_prompt);
        // Most templates expect the arguments of a call as an object, but some concatenate them with text.
        match (&rendered, &turns.written) {
            (Err(_), Some(written)) => {
                self.render_messages(turns, &written[..count], add_generation_prompt).or(rendered)
            }
            _ => rendered,
        }
        .map_err(|error| match error.kind() {
            Kind::Data => self.for_its_content(turns, count, add_generation_prompt).unwrap_or(error),
            _ => error,
        })
    }

    /// A clearer error if the template fails only because a message's `content` is not a string.
    fn for_its_content(&self, turns: &Turns, count: usize, add_generation_prompt: bool) -> Option<Error> {
        let messages = turns.written.as_ref().unwrap_or(&turns.messages);
        let texts: Vec<Option<String>> = messages[..count].iter().map(text_instead).collect();
        let first = texts.iter().position(Option::is_some)?;
        let with = |(message, text): (&JinjaValue, &Option<String>)| match text {
            Some(text) => with_content(message, JinjaValue::from(text.as_str())),
            None => message.clone(),
        };
        let with: Vec<JinjaValue> = messages.iter().zip(&texts).map(with).collect();
        self.render_messages(turns, &with, add_generation_prompt).ok()?;
        let is_list = messages[first].get_attr("content").is_ok_and(|content| content.kind() == ValueKind::Seq);
        let (what, hint) = if is_list {
            ("is a list of parts", "write it as one string; or name a template that reads parts (data.template_path)")
        } else {
            ("is missing or null", "write \"content\": \"\"; or name a template that allows it (data.template_path)")
        };
        let message = format!(
            "message {}: its \"content\" {what}, and the chat template ({}) expects a string",
            first + 1,
            self.origin
        );
        Some(Error::data(message).hint(hint))
    }

    fn render_messages(&self, turns: &Turns, messages: &[JinjaValue], add_generation_prompt: bool) -> Result<String> {
        let failed = |text: String, line: Option<usize>, kind: Kind| {
            let line = line.map_or(String::new(), |line| format!(" line {line}"));
            Error::new(kind, format!("chat template ({}{line}): {text}", self.origin)).hint(match kind {
                Kind::Data => "change the row, or a copy of the template and set data.template_path",
                _ => OTHER_TEMPLATE,
            })
        };
        let rendered = isolated("rendering", || self.rendering(turns, messages, add_generation_prompt));
        let error = match rendered.map_err(|panic| failed(panic.message().to_owned(), None, Kind::Model))? {
            Ok(text) => return Ok(text),
            Err(error) => error,
        };
        let kind = match blame(&error) {
            Blame::Template => Kind::Model,
            Blame::Unclear if self.own_faults().contains(&fault(&error)) => Kind::Model,
            Blame::Row | Blame::Unclear => Kind::Data,
        };
        Err(failed(describe(&error), error.line(), kind))
    }

    /// Errors of the template with a plain question, and with a question and its answer. If a row causes the same
    /// error, the template is to blame.
    fn own_faults(&self) -> &[Fault] {
        self.own_faults.get_or_init(|| {
            let [question, answer] = ["user", "assistant"].map(|role| json!({ "role": role, "content": "Certainly" }));
            let mut faults = Vec::new();
            for (messages, prompt) in [(vec![question.clone()], true), (vec![question, answer], false)] {
                let Ok(turns) = Turns::new(&Conversation { messages, ..Conversation::default() }) else { continue };
                let rendered = isolated("rendering", || self.rendering(&turns, &turns.messages, prompt));
                if let Ok(Err(error)) = rendered
                    && blame(&error) == Blame::Unclear
                {
                    faults.push(fault(&error));
                }
            }
            faults
        })
    }

    fn rendering(
        &self,
        turns: &Turns,
        messages: &[JinjaValue],
        add_generation_prompt: bool,
    ) -> Result<String, minijinja::Error> {
        let messages: Vec<JinjaValue> = messages.iter().map(|message| seen(message, self.parts)).collect();
        let own = [
            ("messages", JinjaValue::from(messages)),
            ("tools", turns.tools.clone()),
            ("documents", JinjaValue::from(())),
            ("add_generation_prompt", JinjaValue::from(add_generation_prompt)),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
        let variables = JinjaValue::from_pairs(self.special_tokens.iter().cloned().chain(own));
        let now = self.now.unwrap_or_else(SystemTime::now);
        self.program.render(variables, turns.bytes + self.source.len(), turns.marks, now)
    }
}

fn fault(error: &minijinja::Error) -> Fault {
    (error.line(), describe(error))
}

/// The message; with `parts`, its text becomes a list of one part.
fn seen(message: &JinjaValue, parts: bool) -> JinjaValue {
    let content = message.get_attr("content").unwrap_or_default();
    if content.as_str().is_none() || !parts {
        return message.clone();
    }
    with_content(message, vec![JinjaValue::from_pairs([("type", JinjaValue::from("text")), ("text", content)])].into())
}

/// The message with another `content`.
fn with_content(message: &JinjaValue, content: JinjaValue) -> JinjaValue {
    let Ok(keys) = message.try_iter() else { return message.clone() };
    // A duplicate key keeps its first place and gets the last value.
    let fields = keys.map(|key| (key.clone(), message.get_item(&key).unwrap_or_default()));
    JinjaValue::from_pairs(fields.chain([(JinjaValue::from("content"), content)]))
}

/// A string in place of the `content` of a message: its parts joined, or empty if it has none. `None` if it is a
/// string.
fn text_instead(message: &JinjaValue) -> Option<String> {
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

/// Removes the marks, and returns the ranges that they enclosed.
fn unmark(marked: String, (open, close): (char, char)) -> Rendered {
    if !marked.contains([open, close]) {
        return Rendered { text: marked, spans: Vec::new() };
    }
    let mut rendered = Rendered { text: String::with_capacity(marked.len()), spans: Vec::new() };
    let mut starts = Vec::new();
    for letter in marked.chars() {
        if letter == open {
            starts.push(rendered.text.len());
        } else if letter == close {
            if let Some(start) = starts.pop() {
                rendered.spans.push(start..rendered.text.len());
            }
        } else {
            rendered.text.push(letter);
        }
    }
    rendered
}

fn describe(error: &minijinja::Error) -> String {
    match error.kind() {
        minijinja::ErrorKind::OutOfFuel => "the template takes too many steps (an endless loop?)".into(),
        kind => error.detail().map_or_else(|| kind.to_string(), str::to_owned),
    }
}

fn read_template(path: &Path, open: Opener) -> Result<Option<String>> {
    let Some(bytes) = read_file(path, open)? else { return Ok(None) };
    if bytes.len() > MAX_SOURCE {
        return Err(Error::model(format!(
            "{} has {} bytes, expected at most {MAX_SOURCE}",
            path.display(),
            bytes.len()
        ))
        .hint(OTHER_TEMPLATE));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| {
        Error::model(format!("{}: invalid UTF-8", path.display())).caused_by(error).hint(OTHER_TEMPLATE)
    })
}

/// The template in the field `chat_template`: a string, or a list of named templates.
fn configured(value: Option<&Value>, origin: &str) -> Result<Option<String>> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|entry| entry["name"] == "default").or(match named.as_slice() {
                [only] => Some(only),
                _ => None,
            });
            default.and_then(|entry| entry["template"].as_str()).map(|source| Some(source.to_owned())).ok_or_else(
                || {
                    let names: Vec<&str> = named.iter().filter_map(|entry| entry["name"].as_str()).collect();
                    Error::model(format!(
                        "{origin}: found the chat templates [{}], expected one named default",
                        names.join(", ")
                    ))
                    .hint("set data.template_path or data.chat_template")
                },
            )
        }
        Some(_) => {
            Err(Error::model(format!("{origin}: chat_template is neither a string nor a list")).hint(OTHER_TEMPLATE))
        }
    }
}

const fn builtin_source(builtin: BuiltinTemplate) -> &'static str {
    match builtin {
        BuiltinTemplate::Chatml => include_str!("templates/chatml.jinja"),
        BuiltinTemplate::Llama3 => include_str!("templates/llama3.jinja"),
        BuiltinTemplate::Gemma => include_str!("templates/gemma.jinja"),
        BuiltinTemplate::Mistral => include_str!("templates/mistral.jinja"),
        BuiltinTemplate::Phi => include_str!("templates/phi.jinja"),
    }
}

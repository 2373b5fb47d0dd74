//! Chat templates: where a model's template comes from, how it is compiled, and how it renders conversations.
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;
use std::time::SystemTime;

use minijinja::Value as JinjaValue;
use minijinja::value::ValueKind;
use serde_json::{Map, Value, json};

use super::catch_panic::isolated;
use super::control::Control;
use super::jinja::Program;
use super::jinja_limits::{Blame, GenerationMarks, blame, timed_out};
use super::messages::Conversation;
use super::strftime::{parse_date, strftime};
use super::template_input::{TemplateInput, jinja_value, text_for_content, with_content, with_content_parts};
use super::template_source::{self, OTHER_TEMPLATE, TemplateSource};
use super::tokenizer::Tokenizer;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_config::{BuiltinTemplate, DataConfig};

/// A compiled chat template, with the special tokens of its tokenizer as variables.
pub struct ChatTemplate {
    program: Program,
    source: String,
    origin: String,
    special_tokens: Vec<(String, JinjaValue)>,
    /// Further variables (`data.chat_template_kwargs`).
    kwargs: Vec<(String, JinjaValue)>,
    pub(super) control: Control,
    /// The time that `strftime_now` writes; `None` for the current time.
    now: Option<SystemTime>,
    /// Whether the template reads `content` as a list of parts only, as those of some multimodal models do.
    content_parts: bool,
    /// Whether the template writes a picture by itself; computed at the first request ([`Self::shows_pictures`]).
    pictures: OnceLock<bool>,
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

struct Failure {
    error: Error,
    /// Whether the template exceeded its time limit.
    timed_out: bool,
}

/// The text of a conversation, and the parts of it that matter for the loss.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendered {
    /// The output of the template.
    pub text: String,
    /// Byte ranges of generation blocks, or of the text that carries a loss.
    pub spans: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// Finds and compiles the template that the section `data` of a configuration selects, with its date and its
    /// variables. `None` if there is no template.
    ///
    /// # Errors
    /// The errors of [`Self::find`] and [`Self::with_kwargs`]; `data.template_date` is not a date.
    pub fn of(model_dir: &Path, tokenizer: &Tokenizer, data: &DataConfig) -> Result<Option<Self>> {
        let date = data.template_date.as_deref().map(parse_date).transpose()?;
        let found = Self::find(model_dir, tokenizer, data.template_path.as_deref(), data.chat_template)?;
        found.map(|template| template.at(date).with_kwargs(&data.chat_template_kwargs.0)).transpose()
    }

    /// Finds and compiles the template: `path` or `builtin` if given, else `chat_template.jinja` of the model folder,
    /// else `chat_template` in its `chat_template.json` (multimodal models), else in its `tokenizer_config.json`.
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
        let found = template_source::find(model_dir, tokenizer.config(), path, builtin)?;
        let Some(TemplateSource { origin, text }) = found else { return Ok(None) };
        // A file that the user names is not part of the model.
        let kind = if path.is_some() { Kind::Data } else { Kind::Model };
        Self::compile(&text, origin, tokenizer).map(Some).map_err(|error| error.with_kind(kind))
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
            kwargs: Vec::new(),
            control,
            now: None,
            content_parts: false,
            pictures: OnceLock::new(),
            own_faults: OnceLock::new(),
        };
        Ok(Self { content_parts: template.reads_parts_only(), own_faults: OnceLock::new(), ..template })
    }

    /// Whether the template writes the text of a message only if `content` is a list of parts.
    fn reads_parts_only(&self) -> bool {
        const WORD: &str = "Certainly";
        if !self.source.contains("type") || self.source.contains("is string") {
            return false;
        }
        let message = json!({ "role": "user", "content": WORD });
        let Ok(input) = TemplateInput::new(&Conversation { messages: vec![message], ..Conversation::default() }) else {
            return false;
        };
        let parts: Vec<JinjaValue> = input.messages.iter().map(with_content_parts).collect();
        let shows = |messages: &[JinjaValue]| {
            self.render_messages(&input, messages, false).is_ok_and(|text| text.contains(WORD))
        };
        !shows(&input.messages) && shows(&parts)
    }

    /// Whether the template writes `place` for a part `{type: image}`, and the text of the other parts. If not, the
    /// caller must turn the parts into one text.
    pub(super) fn shows_pictures(&self, place: &str) -> bool {
        const WORD: &str = "Certainly";
        let shows = || {
            let content = json!([{ "type": "image" }, { "type": "text", "text": WORD }]);
            let message = json!({ "role": "user", "content": content });
            let conversation = Conversation { messages: vec![message], ..Conversation::default() };
            let rendered = self.render(&conversation, false);
            rendered.is_ok_and(|rendered| rendered.text.contains(place) && rendered.text.contains(WORD))
        };
        *self.pictures.get_or_init(shows)
    }

    /// Sets the time that `strftime_now` writes; `None` for the current time.
    #[must_use]
    pub fn at(self, now: Option<SystemTime>) -> Self {
        Self { now, ..self }
    }

    /// Adds variables, such as `enable_thinking` (`data.chat_template_kwargs`). A row's own variables
    /// ([`Conversation::template_kwargs`]) take precedence.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the template does not read one of these variables.
    pub fn with_kwargs(self, kwargs: &Map<String, Value>) -> Result<Self> {
        if let Some(name) = kwargs.keys().find(|name| !self.reads(name)) {
            return Err(Error::config(format!(
                "data.chat_template_kwargs: the chat template ({}) does not read {name:?}",
                self.origin
            ))
            .hint("remove it, or use a template that knows it (data.template_path)"));
        }
        let kwargs = kwargs.iter().map(|(name, value)| (name.clone(), jinja_value(value))).collect();
        Ok(Self { kwargs, own_faults: OnceLock::new(), ..self })
    }

    /// Whether the name of this variable occurs in the template's source.
    pub(super) fn reads(&self, name: &str) -> bool {
        let letter = |letter: char| letter.is_alphanumeric() || letter == '_';
        self.source
            .match_indices(name)
            .any(|(at, _)| !self.source[..at].ends_with(letter) && !self.source[at + name.len()..].starts_with(letter))
    }

    /// Whether the template calls `strftime_now`.
    pub(super) fn is_dated(&self) -> bool {
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

    /// Where the template is from, for messages: a path or the name of a built-in template.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The template's source as its author wrote it, without the checks that `jinja` inserts.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a whole conversation.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the template refuses the row. [`tunesmith_base::Kind::Model`]: it takes too much
    /// time or memory, or fails with any row.
    pub fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<Rendered> {
        let input = TemplateInput::new(conversation)?;
        self.render_first(&input, input.len(), add_generation_prompt)
    }

    /// Renders the first `count` messages.
    pub(super) fn render_first(
        &self,
        input: &TemplateInput,
        count: usize,
        add_generation_prompt: bool,
    ) -> Result<Rendered> {
        Ok(unmark(self.render_marked(input, count, add_generation_prompt)?, input.marks))
    }

    /// As [`Self::render_first`], with the marks of generation blocks in the text.
    pub(super) fn render_marked(
        &self,
        input: &TemplateInput,
        count: usize,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let mut rendered = self.render_messages(input, &input.messages[..count], add_generation_prompt);
        // Most templates expect the arguments of a call as an object, but some concatenate them with text.
        if let (Err(first), Some(written)) = (&rendered, &input.with_text_arguments)
            && !first.timed_out
        {
            let second = self.render_messages(input, &written[..count], add_generation_prompt);
            if !matches!(&second, Err(second) if !second.timed_out) {
                rendered = second;
            }
        }
        let Failure { error, timed_out } = match rendered {
            Ok(text) => return Ok(text),
            Err(failure) => failure,
        };
        if timed_out || error.kind() != Kind::Data {
            return Err(error);
        }
        Err(self.content_error(input, count, add_generation_prompt).unwrap_or(error))
    }

    /// A clearer error if the template fails only because a message's `content` is not a string. The error of the time
    /// limit, if the template exceeds it with strings.
    fn content_error(&self, input: &TemplateInput, count: usize, add_generation_prompt: bool) -> Option<Error> {
        let messages = input.with_text_arguments.as_ref().unwrap_or(&input.messages);
        let texts: Vec<Option<String>> = messages[..count].iter().map(text_for_content).collect();
        let first = texts.iter().position(Option::is_some)?;
        let with = |(message, text): (&JinjaValue, &Option<String>)| match text {
            Some(text) => with_content(message, JinjaValue::from(text.as_str())),
            None => message.clone(),
        };
        let with: Vec<JinjaValue> = messages.iter().zip(&texts).map(with).collect();
        if let Err(Failure { error, timed_out }) = self.render_messages(input, &with, add_generation_prompt) {
            return timed_out.then_some(error);
        }
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

    fn render_messages(
        &self,
        input: &TemplateInput,
        messages: &[JinjaValue],
        add_generation_prompt: bool,
    ) -> Result<String, Failure> {
        let failed = |text: String, line: Option<usize>, kind: Kind| {
            let line = line.map_or(String::new(), |line| format!(" line {line}"));
            Error::new(kind, format!("chat template ({}{line}): {text}", self.origin)).hint(match kind {
                Kind::Data => "change the row, or a copy of the template and set data.template_path",
                _ => OTHER_TEMPLATE,
            })
        };
        let error = match isolated("rendering", || self.rendering(input, messages, add_generation_prompt)) {
            Ok(Ok(text)) => return Ok(text),
            Ok(Err(error)) => error,
            Err(panic) => {
                return Err(Failure { error: failed(panic.message().to_owned(), None, Kind::Model), timed_out: false });
            }
        };
        let timed_out = timed_out();
        let kind = match blame(&error) {
            Blame::Template => Kind::Model,
            Blame::Unclear if self.own_faults().contains(&fault(&error)) => Kind::Model,
            Blame::Row | Blame::Unclear => Kind::Data,
        };
        Err(Failure { error: failed(describe(&error), error.line(), kind), timed_out })
    }

    /// Errors of the template with a plain question, and with a question and its answer. If a row causes the same
    /// error, the template is to blame.
    fn own_faults(&self) -> &[Fault] {
        self.own_faults.get_or_init(|| {
            let [question, answer] = ["user", "assistant"].map(|role| json!({ "role": role, "content": "Certainly" }));
            let mut faults = Vec::new();
            for (messages, prompt) in [(vec![question.clone()], true), (vec![question, answer], false)] {
                let Ok(input) = TemplateInput::new(&Conversation { messages, ..Conversation::default() }) else {
                    continue;
                };
                let rendered = isolated("rendering", || self.rendering(&input, &input.messages, prompt));
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
        input: &TemplateInput,
        messages: &[JinjaValue],
        add_generation_prompt: bool,
    ) -> Result<String, minijinja::Error> {
        let messages =
            if self.content_parts { messages.iter().map(with_content_parts).collect() } else { messages.to_vec() };
        let own = [
            ("messages", JinjaValue::from(messages)),
            ("tools", input.tools.clone()),
            ("documents", JinjaValue::from(())),
            ("add_generation_prompt", JinjaValue::from(add_generation_prompt)),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
        // If a name occurs twice, the later value counts, so a row's variable replaces that of the configuration.
        let kwargs = self.kwargs.iter().chain(&input.kwargs).cloned();
        let variables = JinjaValue::from_pairs(self.special_tokens.iter().cloned().chain(kwargs).chain(own));
        let now = self.now.unwrap_or_else(SystemTime::now);
        self.program.render(variables, input.bytes + self.source.len(), input.marks, now)
    }
}

fn fault(error: &minijinja::Error) -> Fault {
    (error.line(), describe(error))
}

/// Removes the marks, and returns the ranges that they enclosed.
fn unmark(marked: String, marks: GenerationMarks) -> Rendered {
    if !marked.contains([marks.open, marks.close]) {
        return Rendered { text: marked, spans: Vec::new() };
    }
    let mut rendered = Rendered { text: String::with_capacity(marked.len()), spans: Vec::new() };
    let mut starts = Vec::new();
    for letter in marked.chars() {
        if letter == marks.open {
            starts.push(rendered.text.len());
        } else if letter == marks.close {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::of_json(&json!({"model": {"type": "WordLevel", "unk_token": "u", "vocab": {"u": 0}}}))
    }

    #[test]
    fn the_time_limit_is_never_hidden_by_another_error() {
        let call = json!({"function": {"name": "f", "arguments": {"a": 1}}});
        // Each template fails with the row as it is. With text in place of what it refuses, it would not.
        for (source, message) in [
            (
                "{{ messages[0].tool_calls[0].function.arguments + '' }}",
                json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            ),
            ("{{ messages[0].content + '' }}", json!({"role": "user", "content": [{"type": "text", "text": "q"}]})),
        ] {
            let template = ChatTemplate::compile(source, "test", &tokenizer()).unwrap();
            let conversation = Conversation { messages: vec![message], ..Conversation::default() };
            let before = template.render(&conversation, false);
            assert_eq!(before.is_ok(), source.contains("arguments"), "{before:?}");
            template.program.use_up_time();
            let error = template.render(&conversation, false).unwrap_err();
            assert_eq!(error.kind(), Kind::Model, "{error}");
            assert!(error.message().contains("of processor time"), "{error}");
        }
    }
}

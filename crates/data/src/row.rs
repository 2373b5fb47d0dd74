//! Parses rows of training data, in any of the forms that `data.format` knows. Each form is a file of the folder `row`
//! with its `Shape`, and a line in [`tunesmith_base::registry`]. With `format: auto`, a row has the first form, in the
//! order of these lines, whose fields it has.
//!
//! The first `PROBE_ROWS` rows of a file decide which forms the file has; a later row of another form is an error. A
//! row of any form may have a `loss_weight`. A field with null counts as absent.
use std::fmt;

use serde_json::{Map, Value, json};

use super::classification_rows::{self, ClassifierInput};
use super::fields;
use super::json_type::json_type;
pub use super::messages::Conversation;
use super::minhash::add_words;
use super::row_images;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Format;

/// How many rows at the start of a file decide which forms it has.
pub(super) const PROBE_ROWS: usize = 64;

/// The fields that may have a question, and then those that may have an answer.
const QUESTION: [&str; 6] = ["user", "question", "prompt", "input", "instruction", "query"];
const ANSWER: [&str; 5] = ["assistant", "answer", "response", "target", "output"];

/// How to detect and read a row form.
struct Shape {
    /// The fields that a row needs, for error messages.
    fields: &'static str,
    /// Whether its rows need no chat template.
    plain: bool,
    /// Whether a row has these fields.
    fits: fn(&Map<String, Value>) -> bool,
    /// Reads a row that has these fields.
    parse: fn(&mut Map<String, Value>) -> Result<Row>,
    /// The source text of a row ([`source_of`]), if it is not the last turn of the user.
    source_text: fn(&Map<String, Value>) -> Option<&str>,
}

macro_rules! forms {
    ($($name:ident = $module:ident, $word:literal, $doc:literal;)+) => {
        $( mod $module; )+

        /// The form of a row (`data.format`).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Form {
            $( #[doc = $doc] $name, )+
            /// `{text, label}`: every row of a classification or regression, and no other row
            Labeled,
        }

        impl Form {
            /// All forms for causal language modeling, in the order in which `auto` tries them.
            pub const ALL: &'static [Self] = &[$( Self::$name ),+];

            /// The form that `data.format` names; `None` for `auto`.
            pub const fn of(format: Format) -> Option<Self> {
                match format {
                    Format::Auto => None,
                    $( Format::$name => Some(Self::$name), )+
                }
            }

            /// The value of `data.format` that selects this form.
            pub const fn name(self) -> &'static str {
                match self {
                    $( Self::$name => $word, )+
                    Self::Labeled => "labeled",
                }
            }

            const fn shape(self) -> &'static Shape {
                match self {
                    $( Self::$name => &$module::SHAPE, )+
                    Self::Labeled => &LABELED,
                }
            }
        }
    };
}
tunesmith_base::registry::row_forms!(forms);

/// Fits every row, so that the parser can say which field is missing.
const LABELED: Shape =
    Shape { fields: "text, label", plain: true, fits: |_| true, parse: parse_labeled, source_text: |_| None };

fn parse_labeled(row: &mut Map<String, Value>) -> Result<Row> {
    classification_rows::parse(row).map(|(input, label)| Row::Labeled { input, label })
}

impl Form {
    /// Whether a row has the fields of this form.
    pub(super) fn fits(self, row: &Map<String, Value>) -> bool {
        (self.shape().fits)(row)
    }

    /// Whether its rows need no chat template.
    pub const fn is_plain(self) -> bool {
        self.shape().plain
    }

    /// The form that `data.format: auto` detects; `None` if no form fits.
    pub fn detect(row: &Map<String, Value>) -> Option<Self> {
        let is_page = |form: Self| form == Self::Captions && captions::is_linked(row) && !captions::is_of_image(row);
        Self::ALL.iter().copied().find(|&form| form.fits(row) && !is_page(form))
    }
}

/// The forms that a file with these first rows may have. Its rows `{url, text}` have one form, captions or texts: that
/// of most of them.
pub(super) fn forms_of<'a>(rows: impl Iterator<Item = &'a Map<String, Value>>) -> Vec<Form> {
    let (mut forms, mut linked) = (Vec::new(), [0, 0]);
    for row in rows {
        let form = Form::detect(row);
        if captions::is_linked(row) && matches!(form, Some(Form::Captions | Form::Text)) {
            linked[usize::from(form == Some(Form::Captions))] += 1;
        } else {
            forms.extend(form);
        }
    }
    let [texts, captions] = linked;
    forms.extend((texts + captions > 0).then_some(if captions >= texts { Form::Captions } else { Form::Text }));
    forms.sort_unstable();
    forms.dedup();
    forms
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.shape().fields)
    }
}

/// A row in one of the few shapes that tokenizing knows.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// A conversation, which the chat template renders.
    Chat(Conversation),
    /// Plain text in two parts. Only the completion carries a loss.
    Completion {
        /// The text without a loss.
        prompt: String,
        /// The text with a loss.
        completion: String,
    },
    /// Plain text, which carries a loss throughout.
    Text(String),
    /// A row that comes tokenized and labeled.
    Tokens {
        /// Token ids of the row, without padding.
        input_ids: Vec<u32>,
        /// One label per token, before the shift: an id or [`crate::IGNORE`].
        labels: Vec<i32>,
    },
    /// An image and its captions. Each caption is an example of its own: the rows of the image, the caption, EOS. For a
    /// model that reads images in chats, the image is the question and the caption the answer.
    Caption {
        /// The name of the image, as in [`Conversation::images`].
        image: String,
        /// At least one caption, none of them empty.
        captions: Vec<String>,
    },
    /// A text or conversation with one label.
    Labeled {
        /// The text or conversation to classify or score.
        input: ClassifierInput,
        /// The name of the class; in a regression, the number as text.
        label: String,
    },
}

impl Row {
    /// Reads a row of one of the given forms.
    ///
    /// # Errors
    /// The row fits none of the forms, or shows an image, a video or audio that its form does not read. The message has
    /// no file and line; the caller adds them.
    pub fn parse(value: Value, forms: &[Form]) -> Result<Self> {
        let mut left = Map::new();
        let row = Self::take(value, forms, &mut left)?;
        row.refuse_unread(&left)?;
        Ok(row)
    }

    /// Refuses a row that shows an image, a video or audio that its form does not read. Training would otherwise go on
    /// without it. `left` has the fields that the form has not read.
    ///
    /// # Errors
    /// A field of `left` shows an image, a video or audio.
    pub(super) fn refuse_unread(&self, left: &Map<String, Value>) -> Result<()> {
        // `pixel_values` are the output of an image processor, stored beside the ids of its text.
        let pixels = matches!(self, Self::Tokens { .. }).then_some("pixel_values");
        let pixels = pixels.filter(|field| left.get(*field).is_some_and(row_images::is_there));
        let (form, hint) = match self {
            Self::Tokens { .. } => (
                "rows {input_ids} are text only",
                "write the text and its images as {messages, images}: tunesmith puts the images in their places",
            ),
            Self::Completion { .. } => {
                ("rows {prompt, completion} of plain text show no images", "write such rows as {messages, images}")
            }
            Self::Text(_) => (
                "rows {text} are text only",
                "write such rows as {image, caption} or {messages, images}; to train on the text alone, set data.format: text",
            ),
            Self::Caption { .. } => {
                ("rows {image, caption} show one image", "write rows of several images as {messages, images}")
            }
            Self::Chat(_) => ("its form does not read it", "write such rows as {messages, images}"),
            Self::Labeled { .. } => return row_images::refuse_beside_label(left),
        };
        if let Some(field) = row_images::shown_in(left).or(pixels) {
            return Err(Error::data(format!("the row shows images in {field:?}, but {form}")).hint(hint));
        }
        match row_images::refuse_other_media(left) {
            Err(error) if matches!(self, Self::Text(_)) => Err(error
                .hint("tunesmith reads no video and no audio: leave such rows out, or set data.format: text to train on the text alone")),
            checked => checked,
        }
    }

    /// As [`Self::parse`], but accepts images, videos and audio that the form does not read. `left` receives all fields
    /// that it does not read.
    pub(super) fn take(value: Value, forms: &[Form], left: &mut Map<String, Value>) -> Result<Self> {
        let Value::Object(mut row) = value else {
            return Err(Error::data(format!("found {}, expected an object", json_type(&value))));
        };
        let taken = Self::of(&mut row, forms)?;
        *left = row;
        Ok(taken)
    }

    fn of(row: &mut Map<String, Value>, forms: &[Form]) -> Result<Self> {
        let form = if forms.len() == 1 { forms[0] } else { Form::detect(row).unwrap_or(forms[0]) };
        // A row `{url, text}` has the form that most such rows of its file have ([`forms_of`]).
        let form =
            match form {
                Form::Captions | Form::Text if !forms.contains(&form) && captions::is_linked(row) => {
                    if form == Form::Text { Form::Captions } else { Form::Text }
                }
                form => form,
            };
        if !forms.contains(&form) || !form.fits(row) {
            if has(row, "chosen") && has(row, "rejected") {
                return Err(preference(row));
            }
            let found: Vec<&str> =
                row.iter().filter(|(_, value)| !value.is_null()).map(|(key, _)| key.as_str()).collect();
            let expected: Vec<String> = forms.iter().map(Form::to_string).collect();
            return Err(Error::data(format!(
                "found the fields [{}], expected {}",
                found.join(", "),
                expected.join(" or ")
            ))
            .hint("check data.format, or rename the fields"));
        }
        (form.shape().parse)(row)
    }

    /// The names of the images that the row shows, as [`super::Pictures::keep`] takes them.
    pub(super) fn into_images(self) -> Vec<String> {
        self.images().to_vec()
    }

    /// A hash of the names of the images that the row shows; 0 if it shows none.
    pub(super) fn images_hash(&self) -> u64 {
        let images = self.images();
        let hash = || blake3::hash(format!("{images:?}").as_bytes());
        if images.is_empty() { 0 } else { u64::from_le_bytes(*hash().as_bytes().first_chunk().expect("32 bytes")) }
    }

    fn images(&self) -> &[String] {
        match self {
            Self::Chat(conversation) => &conversation.images,
            Self::Caption { image, .. } => std::slice::from_ref(image),
            Self::Completion { .. } | Self::Text(_) | Self::Tokens { .. } | Self::Labeled { .. } => &[],
        }
    }

    /// The row as `tunesmith process` writes it: a conversation in the form `messages`, any other row in its own form.
    pub(super) fn into_json(self) -> Value {
        match self {
            Self::Chat(conversation) => conversation.into_json(),
            Self::Completion { prompt, completion } => json!({ "prompt": prompt, "completion": completion }),
            Self::Text(text) => json!({ "text": text }),
            Self::Tokens { input_ids, labels } => json!({ "input_ids": input_ids, "labels": labels }),
            Self::Caption { image, captions } => {
                json!({ "image": row_images::written(image), "caption": captions })
            }
            Self::Labeled { input, label } => {
                let mut row = input.into_json();
                row["label"] = label.into();
                row
            }
        }
    }

    /// Hashes of the row's words in order, to find duplicates and contaminated rows; for a tokenized row, numbers of
    /// its ids. System messages and the label count only with `system`.
    pub(super) fn words(&self, system: bool) -> Vec<u64> {
        fn add(value: &Value, words: &mut Vec<u64>) {
            match value {
                Value::String(text) => add_words(text, words),
                Value::Array(items) => items.iter().for_each(|item| add(item, words)),
                Value::Object(fields) => fields.values().for_each(|field| add(field, words)),
                Value::Number(number) => add_words(&number.to_string(), words),
                Value::Null | Value::Bool(_) => {}
            }
        }
        let mut words = Vec::new();
        let turns = |conversation: &Conversation, words: &mut Vec<u64>| {
            for message in conversation.messages.iter().filter(|message| system || message["role"] != "system") {
                add(&message["content"], words);
                add(&message["tool_calls"], words);
            }
        };
        match self {
            Self::Chat(conversation) => turns(conversation, &mut words),
            Self::Labeled { input, label } => {
                match input {
                    ClassifierInput::Text(text) => add_words(text, &mut words),
                    ClassifierInput::Chat(conversation) => turns(conversation, &mut words),
                }
                if system {
                    add_words(label, &mut words);
                }
            }
            Self::Completion { prompt, completion } => {
                add_words(prompt, &mut words);
                add_words(completion, &mut words);
            }
            Self::Text(text) => add_words(text, &mut words),
            Self::Caption { image, captions } => {
                add_words(image, &mut words);
                for caption in captions {
                    add_words(caption, &mut words);
                }
            }
            Self::Tokens { input_ids, .. } => words.extend(input_ids.iter().map(|&id| u64::from(id) + 1)),
        }
        words
    }
}

/// The source text of a row, for metrics that compare an answer with its source (SARI, custom scorers).
///
/// It is the last turn of the user before the last answer, the `input` of an Alpaca row if it has one, or the prompt of
/// a prompt/completion row. It is empty for any other row.
///
/// # Errors
/// The row fits none of the forms, or is malformed.
pub fn source_of(row: Value, forms: &[Form]) -> Result<String> {
    let field = |row: &Map<String, Value>| {
        let form = if let [only] = forms { Some(*only) } else { Form::detect(row) };
        form.and_then(|form| (form.shape().source_text)(row)).map(str::to_owned)
    };
    let input = row.as_object().and_then(field);
    let row = Row::take(row, forms, &mut Map::new())?;
    Ok(match (input, row) {
        (Some(input), _) => input,
        (None, Row::Chat(conversation)) => {
            let turns = &conversation.messages;
            let answer = turns.iter().rposition(|turn| turn["role"] == "assistant").unwrap_or(turns.len());
            let asked = turns[..answer].iter().rev().find(|turn| turn["role"] == "user");
            asked.map_or_else(String::new, |turn| content_text(&turn["content"]))
        }
        (None, Row::Completion { prompt, .. }) => prompt,
        (None, Row::Text(_) | Row::Tokens { .. } | Row::Caption { .. } | Row::Labeled { .. }) => String::new(),
    })
}

/// The text of a message's `content`. The parts of a list are joined by line breaks.
pub(super) fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n"),
        _ => String::new(),
    }
}

/// The error for a preference row (`chosen`, `rejected`).
fn preference(row: &Map<String, Value>) -> Error {
    let name = match (&row["chosen"], has(row, "prompt")) {
        (_, true) => "completion",
        (Value::Array(_), false) => "messages",
        (_, false) => "text",
    };
    Error::data("these are preference rows (chosen, rejected), which are not supported yet")
        .hint(format!("to learn the chosen answers, rename `chosen` to `{name}`"))
}

/// Whether the row has a field, and it is not null.
fn has(row: &Map<String, Value>, name: &str) -> bool {
    row.get(name).is_some_and(|value| !value.is_null())
}

/// How many of the fields the row has.
fn count(row: &Map<String, Value>, names: &[&str]) -> usize {
    names.iter().filter(|name| has(row, name)).count()
}

fn text(row: &mut Map<String, Value>, field: &str) -> Result<String> {
    match row.get_mut(field).map(Value::take) {
        Some(Value::String(text)) => Ok(text),
        other => {
            Err(Error::data(format!("field {field:?} is {}, expected a string", json_type(&other.unwrap_or_default()))))
        }
    }
}

fn text_of(row: &mut Map<String, Value>, fields: &[&str]) -> Result<String> {
    let field = fields.iter().find(|field| has(row, field));
    text(row, field.unwrap_or(&fields[0]))
}

fn list(row: &mut Map<String, Value>, field: &str) -> Result<Vec<Value>> {
    match row.get_mut(field).map(Value::take) {
        Some(Value::Array(items)) => Ok(items),
        other => {
            Err(Error::data(format!("field {field:?} is {}, expected a list", json_type(&other.unwrap_or_default()))))
        }
    }
}

/// Makes a conversation. A system message in a field of the row becomes its first message.
fn chat(mut messages: Vec<Value>, row: &mut Map<String, Value>) -> Result<Row> {
    if let Some(system) = fields::system(row)? {
        match messages.first() {
            Some(first) if first["role"] == "system" && first["content"] == *system => {}
            Some(first) if first["role"] == "system" => {
                return Err(Error::data("the row has two system messages: a field, and its first turn"));
            }
            _ => messages.insert(0, json!({"role": "system", "content": system})),
        }
    }
    Conversation::new(messages, row, 0).map(Row::Chat)
}

fn pair(question: &str, answer: &str, row: &mut Map<String, Value>) -> Result<Row> {
    chat(vec![json!({"role": "user", "content": question}), json!({"role": "assistant", "content": answer})], row)
}

#[cfg(test)]
mod tests;

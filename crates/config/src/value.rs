//! Untyped values of a configuration ([`Node`]), and how each type of setting is read from them ([`ConfigValue`]).
use serde_json::{Value as Json, json};
use std::collections::HashSet;
use std::path::PathBuf;
use tunesmith_base::words::count;

/// A YAML value without its position in the file.
#[derive(Debug, Clone, PartialEq)]
pub enum Node {
    /// Nothing after the colon, `null` or `~`.
    Null,
    /// `true` or `false`, without quotes.
    Bool(bool),
    /// An integer; its range is checked when a setting is read from it.
    Int(i128),
    /// A number with a point or an exponent.
    Float(f64),
    /// A string, quoted or not.
    Str(String),
    /// A list, whose items may have different types.
    List(Vec<Node>),
    /// A mapping, in file order.
    Map(Vec<(String, Node)>),
}

impl Node {
    /// The value in words, for messages: `the string "abc"`.
    pub fn describe(&self) -> String {
        match self {
            Self::Null => "nothing".to_owned(),
            Self::Bool(value) => format!("{value}"),
            Self::Int(value) => format!("the integer {value}"),
            Self::Float(value) => format!("the number {value:?}"),
            Self::Str(text) => format!("the string {}", quoted(text)),
            Self::List(items) => format!("a list of {}", count(items.len(), "item")),
            Self::Map(entries) => format!("a mapping of {}", count(entries.len(), "key")),
        }
    }

    /// A key that a mapping in this value has twice: where the mapping is in the value, such as `[1]` or `.inner`, and the key.
    pub fn given_twice(&self) -> Option<(String, &str)> {
        match self {
            Self::List(items) => items.iter().enumerate().find_map(|(index, item)| {
                let (place, key) = item.given_twice()?;
                Some((format!("[{index}]{place}"), key))
            }),
            Self::Map(entries) => {
                let mut names = HashSet::new();
                if let Some((key, _)) = entries.iter().find(|(key, _)| !names.insert(key)) {
                    return Some((String::new(), key));
                }
                entries.iter().find_map(|(name, value)| {
                    let (place, key) = value.given_twice()?;
                    Some((format!(".{name}{place}"), key))
                })
            }
            _ => None,
        }
    }

    /// The value as JSON; an integer beyond 64 bits becomes a float.
    pub(super) fn to_json(&self) -> Json {
        match self {
            Self::Null => Json::Null,
            Self::Bool(flag) => (*flag).into(),
            Self::Int(number) => i64::try_from(*number).map_or_else(|_| (*number as f64).into(), Json::from),
            Self::Float(number) => (*number).into(),
            Self::Str(text) => text.as_str().into(),
            Self::List(items) => items.iter().map(Self::to_json).collect(),
            Self::Map(entries) => entries
                .iter()
                .map(|(key, node)| (key.clone(), node.to_json()))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        }
    }
}

impl From<&Json> for Node {
    fn from(value: &Json) -> Self {
        match value {
            Json::Null => Self::Null,
            Json::Bool(value) => Self::Bool(*value),
            Json::Number(number) => match number.as_i128() {
                Some(integer) => Self::Int(integer),
                None => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::Str(text.clone()),
            Json::Array(items) => Self::List(items.iter().map(Self::from).collect()),
            Json::Object(map) => Self::Map(map.iter().map(|(key, value)| (key.clone(), Self::from(value))).collect()),
        }
    }
}

/// The text in quotes, control characters escaped, cut at 60 characters.
pub(super) fn quoted(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// Why a value is not accepted. The caller adds the key and the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The value in words, from [`Node::describe`].
    pub found: String,
    /// What the setting accepts, in words.
    pub expected: String,
    /// What to change, if that is not obvious.
    pub hint: Option<String>,
}

impl Refusal {
    /// Refuses `node`; `expected` says in words what is accepted.
    pub fn new(node: &Node, expected: impl Into<String>) -> Self {
        Self { found: node.describe(), expected: expected.into(), hint: None }
    }

    /// Adds what the user can change, printed as `hint: …`.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// A type that a setting can have.
pub trait ConfigValue: Sized {
    /// Reads a value.
    ///
    /// # Errors
    /// What was found and what is expected.
    fn from_node(node: &Node) -> Result<Self, Refusal>;
    /// The effective value, for `tunesmith config` and the files of a run.
    fn to_json(&self) -> Json;
    /// What is accepted, in words.
    fn expected() -> String;
    /// What is accepted, as JSON Schema.
    fn schema() -> Json;
    /// The numbers in it, which must lie within the setting's bounds.
    fn numbers(&self) -> Vec<f64> {
        Vec::new()
    }
}

impl ConfigValue for bool {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Bool(value) => Ok(*value),
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        (*self).into()
    }

    fn expected() -> String {
        "true or false".to_owned()
    }

    fn schema() -> Json {
        json!({ "type": "boolean" })
    }
}

/// From here on no integer of 64 bits.
const LARGEST_WHOLE: f64 = 1e19;

/// Whether another digit follows a first zero, as in `010`.
fn begins_with_zeros(text: &str) -> bool {
    let digits = text.trim_start_matches(['+', '-']).as_bytes();
    digits.len() > 1 && digits[0] == b'0' && digits[1].is_ascii_digit()
}

/// Adds a hint where a number was written as a string.
fn unquote_hint(refusal: Refusal, node: &Node) -> Refusal {
    match node {
        Node::Str(text) => match text.trim().parse::<f64>() {
            Ok(number) if !number.is_finite() => refusal.hint(format!("{text} is not a finite number")),
            // A whole number that fits no integer stays a word.
            Ok(number) if number.abs() >= LARGEST_WHOLE => refusal.hint(format!("{text} is too large")),
            // YAML takes `010` for a word even without quotes.
            Ok(number) if begins_with_zeros(text.trim()) => {
                refusal.hint(format!("write {number}: a number does not begin with zeros"))
            }
            Ok(_) => refusal.hint(format!("write {text} without quotes")),
            Err(_) => refusal,
        },
        _ => refusal,
    }
}

/// What an unsigned setting without bounds expects in place of a negative number.
pub(super) const NATURAL: &str = "an integer of at least 0";

macro_rules! integers {
    ($($type:ty)*) => {$(
        impl ConfigValue for $type {
            fn from_node(node: &Node) -> Result<Self, Refusal> {
                let refusal = || unquote_hint(Refusal::new(node, Self::expected()), node);
                match node {
                    Node::Int(value) => Self::try_from(*value).map_err(|_| match refusal() {
                        refusal if *value < 0 && Self::MIN == 0 => Refusal { expected: NATURAL.to_owned(), ..refusal },
                        refusal => refusal,
                    }),
                    _ => Err(refusal()),
                }
            }

            fn to_json(&self) -> Json {
                (*self).into()
            }

            fn expected() -> String {
                "an integer".to_owned()
            }

            fn schema() -> Json {
                json!({ "type": "integer" })
            }

            fn numbers(&self) -> Vec<f64> {
                vec![*self as f64]
            }
        }
    )*};
}
integers!(i64 u64 usize);

impl ConfigValue for f64 {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Int(value) => Ok(*value as Self),
            Node::Float(value) if value.is_finite() => Ok(*value),
            _ => Err(unquote_hint(Refusal::new(node, Self::expected()), node)),
        }
    }

    fn to_json(&self) -> Json {
        (*self).into()
    }

    fn expected() -> String {
        "a number".to_owned()
    }

    fn schema() -> Json {
        json!({ "type": "number" })
    }

    fn numbers(&self) -> Vec<f64> {
        vec![*self]
    }
}

impl ConfigValue for String {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        let refusal = Refusal::new(node, Self::expected());
        match node {
            Node::Str(text) if !text.is_empty() => Ok(text.clone()),
            Node::Bool(_) | Node::Int(_) | Node::Float(_) => Err(refusal.hint("put it in quotes")),
            _ => Err(refusal),
        }
    }

    fn to_json(&self) -> Json {
        self.as_str().into()
    }

    fn expected() -> String {
        "a string".to_owned()
    }

    fn schema() -> Json {
        json!({ "type": "string", "minLength": 1 })
    }
}

/// The user's home folder, for messages.
fn home() -> PathBuf {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    home.filter(|home| home.is_absolute()).unwrap_or_else(|| PathBuf::from("/home/you"))
}

impl ConfigValue for PathBuf {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Str(text) if text.contains('\0') => Err(Refusal::new(node, "a path without NUL bytes")),
            // The shell would expand it; here it would be a folder of this name.
            Node::Str(text) if text == "~" || text.starts_with("~/") => {
                let refusal = Refusal::new(node, "a path that does not begin with ~");
                let rest = text.trim_start_matches(['~', '/']);
                Err(refusal.hint(format!("write your home folder out, such as {}", home().join(rest).display())))
            }
            _ => String::from_node(node)
                .map(Self::from)
                .map_err(|refusal| Refusal { expected: Self::expected(), ..refusal }),
        }
    }

    fn to_json(&self) -> Json {
        self.to_string_lossy().into()
    }

    fn expected() -> String {
        "a path".to_owned()
    }

    fn schema() -> Json {
        json!({ "type": "string", "minLength": 1 })
    }
}

impl<T: ConfigValue> ConfigValue for Option<T> {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Null => Ok(None),
            _ => T::from_node(node).map(Some).map_err(|mut refusal| {
                if refusal.expected == T::expected() {
                    refusal.expected = Self::expected();
                }
                refusal
            }),
        }
    }

    fn to_json(&self) -> Json {
        self.as_ref().map_or(Json::Null, ConfigValue::to_json)
    }

    fn expected() -> String {
        format!("{} or null", T::expected())
    }

    fn schema() -> Json {
        json!({ "anyOf": [T::schema(), { "type": "null" }] })
    }

    fn numbers(&self) -> Vec<f64> {
        self.iter().flat_map(ConfigValue::numbers).collect()
    }
}

/// One value or a list of them; `null` is the empty list.
impl<T: ConfigValue> ConfigValue for Vec<T> {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Null => Ok(Self::new()),
            Node::List(items) => items.iter().map(T::from_node).collect(),
            _ => T::from_node(node)
                .map(|item| vec![item])
                .map_err(|refusal| Refusal { expected: Self::expected(), ..refusal }),
        }
    }

    fn to_json(&self) -> Json {
        self.iter().map(ConfigValue::to_json).collect()
    }

    fn expected() -> String {
        format!("{} or a list of them", T::expected())
    }

    fn schema() -> Json {
        json!({ "anyOf": [T::schema(), { "type": "array", "items": T::schema() }, { "type": "null" }] })
    }

    fn numbers(&self) -> Vec<f64> {
        self.iter().flat_map(ConfigValue::numbers).collect()
    }
}

/// Values by pattern on module names, in file order. The first pattern that matches a name counts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Patterns<T>(pub Vec<(String, T)>);

impl<T: ConfigValue> ConfigValue for Patterns<T> {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Null => Ok(Self(Vec::new())),
            Node::Map(entries) => {
                let entries = entries.iter().map(|(pattern, node)| match T::from_node(node) {
                    Ok(value) => Ok((pattern.clone(), value)),
                    Err(refusal) => {
                        Err(Refusal { expected: format!("{} for {}", refusal.expected, quoted(pattern)), ..refusal })
                    }
                });
                entries.collect::<Result<_, _>>().map(Self)
            }
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        self.0
            .iter()
            .map(|(pattern, value)| (pattern.clone(), value.to_json()))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }

    fn expected() -> String {
        format!("a mapping from module-name pattern to {}", T::expected())
    }

    fn schema() -> Json {
        json!({ "type": ["object", "null"], "additionalProperties": T::schema() })
    }

    fn numbers(&self) -> Vec<f64> {
        self.0.iter().flat_map(|(_, value)| value.numbers()).collect()
    }
}

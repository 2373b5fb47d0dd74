//! A value of a foreign configuration: its key, its source, and how functions of the tables read it.
use super::outcomes::cut;
use crate::option::Scalar;
use crate::source::Source;
use crate::value::Node;
use tunesmith_base::error::{Error, Result};

/// A value of the file.
#[derive(Debug, Clone)]
pub struct Value {
    /// The full key as the file spells it.
    pub key: String,
    /// The value, as the file has it.
    pub node: Node,
    /// The file with the line, and the key.
    pub source: Source,
}

impl Value {
    /// Whether it is `auto`, which leaves the decision to our key.
    pub fn is_auto(&self) -> bool {
        matches!(&self.node, Node::Str(word) if word.eq_ignore_ascii_case("auto"))
    }

    /// The value as JSON for messages, cut where it is long; a secret is not shown.
    pub fn shown(&self) -> String {
        if is_secret(&self.key) { "***".to_owned() } else { cut(&self.node.to_json().to_string()) }
    }

    /// How errors name the value: source and key.
    fn place(&self) -> String {
        match &self.source {
            Source::Foreign { .. } => self.source.place(),
            Source::Word(_) if is_secret(&self.key) => format!("argument {}", self.key),
            other => format!("{}: {}", other.place(), self.key),
        }
    }

    /// The error for a value of the wrong type; `what` is expected.
    pub fn expected(&self, what: &str) -> Error {
        Error::config(format!("{}: expected {what}, found {}", self.place(), self.node.describe()))
    }

    /// The error for a value that this version does not support, with the reason as a hint.
    pub fn refused(&self, why: &str) -> Error {
        Error::config(format!("{}: {} is not supported", self.place(), self.shown())).hint(why)
    }

    /// An integer of at least `least`; also accepts `5e8`.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn count(&self, least: u64) -> Result<u64> {
        let number = match &self.node {
            Node::Int(number) => u64::try_from(*number).ok(),
            Node::Float(number) if number.fract() == 0.0 && (0.0..1e15).contains(number) => Some(*number as u64),
            _ => None,
        };
        number
            .filter(|&number| number >= least)
            .ok_or_else(|| self.expected(&format!("an integer of at least {least}")))
    }

    /// A number.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn number(&self) -> Result<f64> {
        match &self.node {
            Node::Int(number) => Ok(*number as f64),
            Node::Float(number) if number.is_finite() => Ok(*number),
            _ => Err(self.expected("a number")),
        }
    }

    /// A word, in lower case.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn word(&self) -> Result<String> {
        match &self.node {
            Node::Str(word) => Ok(word.to_lowercase()),
            // YAML's `no`, and FSDP's numbers of strategies.
            Node::Bool(false) => Ok("no".to_owned()),
            Node::Int(number) => Ok(number.to_string()),
            _ => Err(self.expected("a word")),
        }
    }

    /// `true` or `false`, also as a string.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn flag(&self) -> Result<bool> {
        match &self.node {
            Node::Bool(flag) => Ok(*flag),
            Node::Str(text) if text.eq_ignore_ascii_case("true") => Ok(true),
            Node::Str(text) if text.eq_ignore_ascii_case("false") => Ok(false),
            _ => Err(self.expected("true or false")),
        }
    }

    /// Whether it equals one of these, with numbers compared by value (`5e8` is 500000000) and words without case (`True`).
    pub(super) fn is(&self, scalars: &[Scalar]) -> bool {
        scalars.iter().any(|scalar| match scalar {
            Scalar::Null => self.node == Node::Null,
            Scalar::Bool(flag) => self.flag().is_ok_and(|found| found == *flag),
            Scalar::Str(text) => match (&self.node, text.parse::<f64>()) {
                (Node::Str(found), _) => found.eq_ignore_ascii_case(text),
                (_, Ok(number)) => self.number().is_ok_and(|found| found == number),
                _ => false,
            },
        })
    }
}

/// Whether a key holds a token of the hub, which no message may show.
fn is_secret(key: &str) -> bool {
    key.ends_with("hub_token") || key.ends_with("to_hub_token")
}

/// Whether a value asks for nothing: `null`, `false`, `none`, or a section with nothing in it that is on.
pub fn is_off(node: &Node) -> bool {
    match node {
        Node::Null | Node::Bool(false) => true,
        Node::Bool(true) | Node::Int(_) | Node::Float(_) => false,
        Node::Str(text) => matches!(text.to_lowercase().as_str(), "" | "none" | "no" | "false" | "null"),
        Node::List(items) => items.is_empty(),
        Node::Map(entries) => {
            let enabled = entries.iter().find(|(key, _)| key == "enabled");
            enabled.map_or_else(|| entries.iter().all(|(_, node)| is_off(node)), |(_, node)| is_off(node))
        }
    }
}

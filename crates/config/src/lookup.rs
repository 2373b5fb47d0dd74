//! Settings by any of their spellings, and whether a setting takes a value.
use super::schema::{Config, OptionDef, options};
use super::source::Source;
use super::value::{Node, Refusal};
use tunesmith_base::error::{Error, Result};

/// The setting that a full key names: its own key, or an alias.
pub(super) fn find(spelled: &str) -> Option<&'static OptionDef> {
    options().find(|def| def.spellings().any(|spelling| spelling == spelled))
}

/// Whether this version takes a value under a full key; never, if there is no such key.
pub(super) fn takes(key: &str, node: &Node) -> bool {
    find(key).is_some_and(|def| (def.set)(&mut Config::default(), node).is_ok())
}

/// Checks a value against the type and the range of a setting; `spelled` is the full key as it was given.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the setting does not take it.
pub(super) fn check(def: &OptionDef, spelled: &str, node: &Node, source: &Source) -> Result<()> {
    (def.set)(&mut Config::default(), node).map_err(|refusal| refused(source, spelled, refusal))
}

/// Turns a string into a number where the key accepts only the number. Some YAML readers read `2e-5` as a string.
pub fn unquoted(key: &str, node: Node) -> Node {
    let number = match &node {
        Node::Str(text) => text.trim().parse::<f64>().ok().filter(|number| number.is_finite()),
        _ => None,
    };
    match number {
        Some(number) if !takes(key, &node) && takes(key, &Node::Float(number)) => Node::Float(number),
        _ => node,
    }
}

/// The error for a value that its setting does not take.
pub(super) fn refused(source: &Source, key: &str, refusal: Refusal) -> Error {
    let error =
        Error::config(format!("{}: {key}: expected {}, found {}", source.place(), refusal.expected, refusal.found));
    match refusal.hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

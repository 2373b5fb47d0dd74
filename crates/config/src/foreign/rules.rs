//! The tables that say what becomes of each key of another toolkit, and the one walk that applies them.
//!
//! Files that a configuration names are translated while it is resolved; the first value that this version does not support is an error.
//! `tunesmith import` translates whole configurations, and notes such a value instead. Both are [`Translation`]s.
use super::value::{Value, is_off};
use crate::option::Scalar;
use crate::suggest::nearest;
use crate::value::Node;
use std::collections::HashSet;
use tunesmith_base::error::{Error, Result};

/// What becomes of a key. `F` is the type of a table's functions.
#[derive(Debug, Clone, Copy)]
pub enum Action<F> {
    /// The same value under our key.
    To(&'static str),
    /// The same value under our key; the text says what differs.
    ToBut(&'static str, &'static str),
    /// A function reads the value.
    With(F),
    /// Read together with other keys, after all keys are known.
    Together,
    /// These values describe what always holds here. Any other value has no effect, and a note says why.
    Always(&'static [Scalar], &'static str),
    /// These values describe what always holds here. Any other is changed to it, which changes the result, and a note says so.
    Becomes(&'static [Scalar], &'static str),
    /// No effect here; a note says why.
    NotNeeded(&'static str),
    /// These values ask for what holds anyway; any other is not supported, for this reason.
    Only(&'static [Scalar], &'static str),
    /// Not supported unless it is off, for this reason.
    Unsupported(&'static str),
}

/// One entry of a toolkit's table.
#[derive(Debug)]
pub struct Rule<F: 'static> {
    /// Full keys. `section.*` is a section that is read as one value; any other `*` at the end stands for all keys that begin so.
    pub keys: &'static [&'static str],
    /// What becomes of each of them.
    pub action: Action<F>,
    /// What becomes of them, for the documentation; empty where `action` says it.
    pub summary: &'static str,
}

/// Writes a table of [`Rule`]s: `"key" | "other key" => ACTION; "summary",`, where the summary may be absent.
#[macro_export]
macro_rules! rules {
    ($( $($key:literal)|+ => $action:expr $(; $summary:literal)?, )*) => {
        &[$( $crate::foreign::rules::Rule { keys: &[$($key),+], action: $action, summary: concat!($($summary)?) } ),*]
    };
}

/// The rule for a key, and the name in the table that matches it. A full name goes before a pattern.
pub fn find_rule<F>(rules: &'static [Rule<F>], key: &str) -> Option<(&'static str, &'static Rule<F>)> {
    let all = || rules.iter().flat_map(|rule| rule.keys.iter().map(move |name| (*name, rule)));
    let exact = |name: &str| name == key || name.strip_suffix(".*") == Some(key);
    let begins =
        |name: &str| name.strip_suffix('*').is_some_and(|start| !start.ends_with('.') && key.starts_with(start));
    all().find(|(name, _)| exact(name)).or_else(|| all().find(|(name, _)| begins(name)))
}

/// The keys that a table names in full, in its order; patterns are left out, and sections are named without `.*`.
pub fn key_names<F>(rules: &'static [Rule<F>]) -> impl Iterator<Item = &'static str> + Clone {
    let names = rules.iter().flat_map(|rule| rule.keys.iter().copied());
    names.map(|name| name.strip_suffix(".*").unwrap_or(name)).filter(|name| !name.ends_with('*'))
}

/// A toolkit's configuration while its keys become settings of ours.
///
/// An error of any function ends the translation.
#[allow(clippy::missing_errors_doc, reason = "said once, above")]
pub trait Translation {
    /// The functions of its table.
    type Function: Copy;

    /// The key with its value and its source. `steps` are the indices that lead to it.
    fn value(&self, key: String, node: Node, steps: &[usize]) -> Value;
    /// What becomes of the key; `None` for an unknown one.
    fn action(&mut self, value: &Value) -> Option<Action<Self::Function>>;
    /// Whether the table has keys below this one.
    fn is_section(&self, key: &str) -> bool;
    /// Calls a function of the table.
    fn call(&mut self, function: Self::Function, value: &Value) -> Result<()>;
    /// Sets our key `ours`. `why` says what differs from the value; empty if nothing does.
    fn put(&mut self, value: &Value, ours: &str, node: Node, why: &str) -> Result<()>;
    /// The value has no effect, since it asks for what holds anyway.
    fn same(&mut self, value: &Value, why: &str) -> Result<()>;
    /// The value has no effect.
    fn not_needed(&mut self, value: &Value, why: &str) -> Result<()>;
    /// Something else is done than the value asks for.
    fn changed(&mut self, value: &Value, why: &str) -> Result<()>;
    /// This version does not support the value.
    fn unsupported(&mut self, value: &Value, why: &str) -> Result<()>;
    /// The table does not have the key.
    fn unknown(&mut self, value: &Value) -> Result<()>;
    /// Whether the value asks for nothing.
    fn is_off(&self, node: &Node) -> bool {
        is_off(node)
    }
    /// Whether the value leaves the decision to our key.
    fn is_auto(&self, value: &Value) -> bool {
        value.is_auto()
    }
    /// Notes that `ours` decides, where [`Translation::is_auto`] holds.
    fn auto(&mut self, value: &Value, ours: &str) -> Result<()> {
        self.put(value, ours, value.node.clone(), "")
    }
}

/// Applies the table to each key, section by section, in the order of the file.
///
/// # Errors
/// A key that is given twice, a value where a section belongs, or an error of the translation.
pub fn translate(to: &mut impl Translation, entries: &[(String, Node)]) -> Result<()> {
    walk(to, "", entries, &mut Vec::new())
}

fn walk(to: &mut impl Translation, prefix: &str, entries: &[(String, Node)], steps: &mut Vec<usize>) -> Result<()> {
    let mut names = HashSet::new();
    for (index, (name, node)) in entries.iter().enumerate() {
        steps.push(index);
        let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let value = to.value(key, node.clone(), steps);
        if !names.insert(name) {
            return Err(Error::config(format!("{}: it is given twice", value.source.place())).hint("keep one"));
        }
        match (to.action(&value), node) {
            (Some(action), _) => apply(to, action, &value)?,
            (None, Node::Map(inner)) if to.is_section(&value.key) => walk(to, &value.key, inner, steps)?,
            (None, node) if to.is_section(&value.key) && is_off(node) => {}
            (None, _) if to.is_section(&value.key) => {
                return Err(value.expected("keys, within braces or indented below it"));
            }
            (None, _) => to.unknown(&value)?,
        }
        steps.pop();
    }
    Ok(())
}

/// Does with one value what the table says.
///
/// # Errors
/// An error of the translation.
pub fn apply<T: Translation>(to: &mut T, action: Action<T::Function>, value: &Value) -> Result<()> {
    match action {
        _ if value.node == Node::Null => to.same(value, "empty"),
        Action::Together => Ok(()),
        Action::With(function) => to.call(function, value),
        Action::To(ours) | Action::ToBut(ours, _) if to.is_auto(value) => to.auto(value, ours),
        Action::To(ours) => to.put(value, ours, value.node.clone(), ""),
        Action::ToBut(ours, why) => to.put(value, ours, value.node.clone(), why),
        Action::Always(scalars, why) | Action::Becomes(scalars, why) if value.is(scalars) || to.is_auto(value) => {
            to.same(value, why)
        }
        Action::Becomes(_, why) => to.changed(value, why),
        Action::Only(scalars, _) if value.is(scalars) => to.same(value, "already so"),
        Action::Only(..) | Action::Unsupported(_) if to.is_auto(value) => to.same(value, "already so"),
        // Where only `true` asks for nothing, `false` asks for something.
        Action::Only(scalars, _) if to.is_off(&value.node) && !scalars.contains(&Scalar::Bool(true)) => {
            to.same(value, "off")
        }
        Action::Unsupported(_) | Action::NotNeeded(_) if to.is_off(&value.node) => to.same(value, "off"),
        Action::Only(_, why) | Action::Unsupported(why) => to.unsupported(value, why),
        Action::Always(_, why) | Action::NotNeeded(why) => to.not_needed(value, why),
    }
}

/// The key of a table that is most like an unknown one: the same name in another section, a similar name in its section, or a similar
/// full key.
pub fn nearest_key(key: &str, known: impl Iterator<Item = &'static str> + Clone) -> Option<String> {
    let (section, leaf) = key.rsplit_once('.').unwrap_or(("", key));
    let misplaced = known.clone().find(|name| name.rsplit('.').next() == Some(leaf)).map(str::to_owned);
    let within = known.clone().filter_map(|name| name.strip_prefix(section)?.strip_prefix('.'));
    let similar = || nearest(leaf, within).map(|near| format!("{section}.{near}"));
    misplaced.or_else(similar).or_else(|| nearest(key, known).map(str::to_owned))
}

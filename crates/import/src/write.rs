//! Writes settings as YAML that reads back as the same settings.
use super::report::Refused;
use super::toolkit::Toolkit;
use std::fmt::Write;
use std::path::Path;
use tunesmith_config::foreign::KeyOutcome;
use tunesmith_config::{Node, parse_yaml, schema};

/// The longest value that a message shows, in characters.
const SHOWN: usize = 60;

/// One setting of the written file.
pub(super) struct SettingLine {
    pub key: String,
    pub node: Node,
    /// Comment at the end of its line; empty for none.
    pub why: String,
}

/// The text of the file: a header with what is refused or not supported, then the sections in the order of the documentation.
pub(super) fn file(
    path: &Path,
    toolkit: Toolkit,
    lines: &[SettingLine],
    unsupported: &[&KeyOutcome],
    refused: &[Refused],
) -> String {
    let mut out = format!(
        "# Made by `tunesmith import` from {}, a configuration of {}.\n",
        printable(&path.display().to_string()),
        toolkit.title()
    );
    if !refused.is_empty() {
        out.push_str("#\n# This version refuses these settings; the file loads once they are supported:\n");
        for one in refused {
            let _ = writeln!(out, "#   {}   ({})", one.setting, printable(&one.why));
        }
    }
    if !unsupported.is_empty() {
        out.push_str("#\n# Not imported:\n");
        for one in unsupported {
            let _ = writeln!(out, "#   {}   ({})", one.given(), printable(&one.why));
        }
    }
    for section in sections() {
        let prefix = format!("{section}.");
        let own: Vec<(&str, &SettingLine)> =
            lines.iter().filter_map(|line| Some((line.key.strip_prefix(&prefix)?, line))).collect();
        if own.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n{section}:");
        let mut inner: Vec<&str> = Vec::new();
        for (key, line) in own.iter().filter(|(key, _)| !key.contains('.')) {
            entry(&mut out, 1, key, line);
        }
        for (key, _) in own.iter().filter(|(key, _)| key.contains('.')) {
            let name = key.split('.').next().unwrap_or_default();
            if !inner.contains(&name) {
                inner.push(name);
            }
        }
        for name in inner {
            let _ = writeln!(out, "  {name}:");
            for (key, line) in &own {
                if let Some(key) = key.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')) {
                    entry(&mut out, 2, key, line);
                }
            }
        }
    }
    out
}

/// The sections of a configuration, in the order of the documentation.
fn sections() -> Vec<&'static str> {
    let mut sections = Vec::new();
    for option in schema::options() {
        let section = option.section.split('.').next().unwrap_or_default();
        if !section.is_empty() && !sections.contains(&section) {
            sections.push(section);
        }
    }
    sections
}

fn entry(out: &mut String, depth: usize, key: &str, line: &SettingLine) {
    let indent = "  ".repeat(depth);
    let why = if line.why.is_empty() { String::new() } else { format!(" # {}", printable(&line.why)) };
    match &line.node {
        Node::List(items) if items.iter().any(|item| matches!(item, Node::Map(_))) => {
            let _ = writeln!(out, "{indent}{key}:{why}");
            for item in items {
                let _ = writeln!(out, "{indent}  - {}", flow(item));
            }
        }
        node => {
            let _ = writeln!(out, "{indent}{key}: {}{why}", flow(node));
        }
    }
}

/// A value in YAML's flow style, on one line.
pub(super) fn flow(node: &Node) -> String {
    match node {
        Node::Null => "null".to_owned(),
        Node::Bool(flag) => flag.to_string(),
        Node::Int(number) => number.to_string(),
        Node::Float(number) if number.is_finite() => {
            let text = format!("{number:?}");
            // YAML 1.1 wants a point before an exponent.
            match text.split_once('e') {
                Some((digits, power)) if !digits.contains('.') => format!("{digits}.0e{power}"),
                _ => text,
            }
        }
        Node::Float(number) => if number.is_nan() {
            ".nan"
        } else if *number > 0.0 {
            ".inf"
        } else {
            "-.inf"
        }
        .to_owned(),
        Node::Str(text) => string(text),
        Node::List(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Node::Map(entries) => {
            let pairs: Vec<String> =
                entries.iter().map(|(key, node)| format!("{}: {}", string(key), flow(node))).collect();
            format!("{{{}}}", pairs.join(", "))
        }
    }
}

/// A string without quotes if it reads back as the same string, or else in double quotes.
fn string(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || "./_".contains(c))
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "._/-".contains(c))
        && !["y", "n", "yes", "no", "on", "off"].contains(&text.to_lowercase().as_str())
        && parse_yaml(text) == Some(Node::Str(text.to_owned()));
    if plain {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            other if other.is_control() || "\u{2028}\u{2029}\u{feff}".contains(other) => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(other));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

/// A value for messages: on one line, cut after [`SHOWN`] characters.
pub(super) fn short(node: &Node) -> String {
    let text = flow(node);
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The text with control characters and line breaks replaced: it can neither end its comment nor control a terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || "\u{2028}\u{2029}\u{85}".contains(c) { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nodes() -> impl Strategy<Value = Node> {
        let leaf = prop_oneof![
            Just(Node::Null),
            any::<bool>().prop_map(Node::Bool),
            any::<i64>().prop_map(|number| Node::Int(number.into())),
            any::<f64>().prop_filter("finite", |number| number.is_finite()).prop_map(Node::Float),
            any::<String>().prop_map(Node::Str),
            "[a-z0-9.:#\\[\\]{},&*!|>'\"%@ -]{0,12}".prop_map(Node::Str),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Node::List),
                prop::collection::vec((any::<String>(), inner), 0..4).prop_map(Node::Map),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_value_reads_back(node in nodes()) {
            prop_assert_eq!(parse_yaml(&flow(&node)), Some(node.clone()), "{}", flow(&node));
        }
    }

    #[test]
    fn words_that_yaml_takes_for_something_else_are_quoted() {
        for text in ["no", "on", "null", "1", "1e3", "true", "~", "", "a: b", "- a", "a #b", "\u{85}", "0x1f"] {
            assert!(string(text).starts_with('"'), "{text:?}");
        }
        assert_eq!(string("./outputs/out-1"), "./outputs/out-1");
        assert_eq!(flow(&Node::Float(2e-5)), "2.0e-5");
    }
}

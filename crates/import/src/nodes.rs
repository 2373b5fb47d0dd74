//! Values that a source may write in several ways.
use serde_json::Value as Json;
use tunesmith_config::Node;

/// The texts of a list, or a single text as a list of one. Items of other types are left out.
pub(super) fn texts(node: &Node) -> Vec<String> {
    let text = |node: &Node| match node {
        Node::Str(text) => Some(text.clone()),
        _ => None,
    };
    match node {
        Node::List(items) => items.iter().filter_map(text).collect(),
        other => text(other).into_iter().collect(),
    }
}

/// The value with a single text turned into a list of one.
pub(super) fn joined(node: &Node) -> Node {
    match node {
        Node::Str(_) => Node::List(vec![node.clone()]),
        other => other.clone(),
    }
}

/// The entries of a mapping, or of the JSON object that a text holds.
pub(super) fn entries(node: &Node) -> Option<Vec<(String, Node)>> {
    match node {
        Node::Map(entries) => Some(entries.clone()),
        Node::Str(text) => match serde_json::from_str(text) {
            Ok(Json::Object(map)) => Some(map.into_iter().map(|(key, value)| (key, of_json(&value))).collect()),
            _ => None,
        },
        _ => None,
    }
}

fn of_json(value: &Json) -> Node {
    match value {
        Json::Null => Node::Null,
        Json::Bool(flag) => Node::Bool(*flag),
        Json::Number(number) => match number.as_i64() {
            Some(whole) => Node::Int(whole.into()),
            None => Node::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Node::Str(text.clone()),
        Json::Array(items) => Node::List(items.iter().map(of_json).collect()),
        Json::Object(map) => Node::Map(map.iter().map(|(key, value)| (key.clone(), of_json(value))).collect()),
    }
}

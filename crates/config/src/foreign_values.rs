//! The types of `train.deepspeed`, `train.fsdp` and `train.fsdp_config`.
use super::value::{ConfigValue, Node, Refusal};
use serde_json::{Value as Json, json};

/// A configuration of DeepSpeed or FSDP: the path of its file, or the mapping itself; null without one.
#[derive(Debug, Clone, PartialEq)]
pub struct FileOrMapping(pub Node);

impl Default for FileOrMapping {
    fn default() -> Self {
        Self(Node::Null)
    }
}

impl ConfigValue for FileOrMapping {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Str(text) if text.is_empty() || text.contains('\0') => Err(Refusal::new(node, Self::expected())),
            Node::Null | Node::Str(_) | Node::Map(_) => Ok(Self(node.clone())),
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        self.0.to_json()
    }

    fn expected() -> String {
        "a path, a mapping or null".to_owned()
    }

    fn schema() -> Json {
        json!({ "type": ["string", "object", "null"] })
    }
}

/// Transformers' `fsdp`: `true`, `false`, or words in one string or a list.
#[derive(Debug, Clone, PartialEq)]
pub struct FsdpWords(pub Node);

impl Default for FsdpWords {
    fn default() -> Self {
        Self(Node::Bool(false))
    }
}

impl FsdpWords {
    /// The words in lower case; empty for `true`, `None` where it is off or no list of words.
    pub fn words(node: &Node) -> Option<Vec<String>> {
        match node {
            Node::Bool(true) => Some(Vec::new()),
            Node::Str(text) => Some(text.split_whitespace().map(str::to_lowercase).collect()),
            Node::List(items) => {
                let word = |item: &Node| match item {
                    Node::Str(word) => Some(word.to_lowercase()),
                    _ => None,
                };
                items.iter().map(word).collect()
            }
            _ => None,
        }
    }
}

impl ConfigValue for FsdpWords {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Null => Ok(Self::default()),
            Node::Bool(_) => Ok(Self(node.clone())),
            _ if Self::words(node).is_some() => Ok(Self(node.clone())),
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        self.0.to_json()
    }

    fn expected() -> String {
        "true, false, or words such as \"full_shard auto_wrap\"".to_owned()
    }

    fn schema() -> Json {
        json!({ "anyOf": [{ "type": ["boolean", "string", "null"] }, { "type": "array", "items": { "type": "string" } }] })
    }
}

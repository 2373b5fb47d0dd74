//! `data.chat_template_kwargs`: variables for the chat template.
use serde_json::{Map, Value as Json, json};

use super::value::{ConfigValue, Node, Refusal, quoted};

/// The variables that a row or tunesmith sets, which no other setting may.
pub const RESERVED_KWARGS: [&str; 5] =
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"];

/// Variables for the chat template, such as `enable_thinking`, in file order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TemplateKwargs(pub Map<String, Json>);

impl std::fmt::Display for TemplateKwargs {
    /// Nothing without variables, else a JSON object.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { self.to_json().fmt(f) }
    }
}

impl ConfigValue for TemplateKwargs {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        let entries = match node {
            Node::Null => return Ok(Self::default()),
            Node::Map(entries) => entries,
            _ => return Err(Refusal::new(node, Self::expected())),
        };
        let mut kwargs = Map::new();
        for (name, value) in entries {
            let refusal = |hint: String| Err(Refusal::new(node, Self::expected()).hint(hint));
            if RESERVED_KWARGS.contains(&name.as_str()) {
                return refusal(format!("{name} comes from the row or from tunesmith"));
            }
            if kwargs.insert(name.clone(), value.to_json()).is_some() {
                return refusal(format!("{} is given twice", quoted(name)));
            }
        }
        Ok(Self(kwargs))
    }

    fn to_json(&self) -> Json {
        Json::Object(self.0.clone())
    }

    fn expected() -> String {
        "a mapping from a template's variable to its value".to_owned()
    }

    fn schema() -> Json {
        json!({ "type": ["object", "null"] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_a_mapping_without_those_of_the_row() {
        let read = |text: &str| TemplateKwargs::from_node(&Node::from(&serde_json::from_str::<Json>(text).unwrap()));
        let kwargs = read(r#"{"enable_thinking": false, "budget": 512, "parts": [{"a": null}]}"#).unwrap();
        assert_eq!(kwargs.to_string(), r#"{"enable_thinking":false,"budget":512,"parts":[{"a":null}]}"#);
        assert_eq!(
            (read("null").unwrap(), read("{}").unwrap().to_string()),
            (TemplateKwargs::default(), String::new())
        );
        assert!(read("[1]").is_err() && read("\"a=1\"").is_err());
        assert!(read(r#"{"tools": []}"#).unwrap_err().hint.unwrap().contains("tools"));
    }
}

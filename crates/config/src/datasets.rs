//! One entry of `data.datasets`: the source of rows, their format, and their weight in the mix.
use std::path::PathBuf;

use serde_json::{Map, Value as Json, json};

use super::enums::Format;
use super::suggest::nearest;
use super::value::{ConfigValue, Node, Refusal, quoted};

/// A source of training rows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DatasetSpec {
    /// Files or glob patterns. With `name` it is empty until the files are downloaded.
    pub path: Vec<PathBuf>,
    /// Data set on the hub: `owner/name`.
    pub name: Option<String>,
    /// Configuration (subset) of the hub data set.
    pub config: Option<String>,
    /// Split of the hub data set.
    pub split: Option<String>,
    /// Branch, tag or commit of the hub data set.
    pub revision: Option<String>,
    /// Format of its rows; `None`: `data.format`.
    pub format: Option<Format>,
    /// Weight in the mix, relative to the other sources. `None`: 1; but if no source has a weight, every row is used once.
    pub weight: Option<f64>,
}

const KEYS: [&str; 7] = ["path", "name", "config", "split", "revision", "format", "weight"];

impl DatasetSpec {
    fn put(&mut self, key: &str, node: &Node) -> Result<(), Refusal> {
        match key {
            "path" => self.path = Vec::from_node(node)?,
            "name" => self.name = Option::from_node(node)?,
            "config" => self.config = Option::from_node(node)?,
            "split" => self.split = Option::from_node(node)?,
            "revision" => self.revision = Option::from_node(node)?,
            "format" => self.format = Option::from_node(node)?,
            "weight" => {
                self.weight = Option::from_node(node)?;
                if self.weight.is_some_and(|weight| weight <= 0.0) {
                    return Err(Refusal::new(node, "a number greater than 0").hint("leave the source out instead"));
                }
            }
            _ => {
                let near = nearest(key, KEYS).map(|name| format!("did you mean {name}?"));
                let refusal = Refusal {
                    found: format!("the key {}", quoted(key)),
                    expected: format!("one of {}", KEYS.join(", ")),
                    hint: near,
                };
                return Err(refusal);
            }
        }
        Ok(())
    }
}

impl ConfigValue for DatasetSpec {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        let mut spec = Self::default();
        match node {
            Node::Str(_) => spec.path = Vec::from_node(node)?,
            Node::Map(entries) => {
                for (key, value) in entries {
                    spec.put(key, value).map_err(|refusal| match key.as_str() {
                        known if KEYS.contains(&known) => {
                            Refusal { expected: format!("{} for {known}", refusal.expected), ..refusal }
                        }
                        _ => refusal,
                    })?;
                }
            }
            _ => return Err(Refusal::new(node, Self::expected())),
        }
        if spec.path.is_empty() == spec.name.is_none() {
            return Err(Refusal::new(node, "either path or name in each source"));
        }
        let of_hub = [("config", &spec.config), ("split", &spec.split), ("revision", &spec.revision)];
        if let Some((key, _)) = of_hub.into_iter().find(|(_, value)| value.is_some() && spec.name.is_none()) {
            return Err(
                Refusal::new(node, format!("no {key} beside path")).hint("it belongs to a data set of the hub (name)")
            );
        }
        Ok(spec)
    }

    fn to_json(&self) -> Json {
        let mut fields = Map::new();
        if !self.path.is_empty() && self.name.is_none() {
            fields.insert("path".into(), self.path.to_json());
        }
        let texts =
            [("name", &self.name), ("config", &self.config), ("split", &self.split), ("revision", &self.revision)];
        fields.extend(texts.into_iter().filter_map(|(key, text)| Some((key.to_owned(), text.as_ref()?.to_json()))));
        fields.extend(self.format.map(|format| ("format".to_owned(), format.to_json())));
        fields.extend(self.weight.map(|weight| ("weight".to_owned(), weight.to_json())));
        fields.into()
    }

    fn expected() -> String {
        "a source {path or name, weight, format, …}".to_owned()
    }

    fn schema() -> Json {
        let text = Option::<String>::schema();
        json!({
            "anyOf": [
                { "type": "string", "minLength": 1 },
                {
                    "type": "object",
                    "properties": {
                        "path": Vec::<PathBuf>::schema(),
                        "name": text,
                        "config": text,
                        "split": text,
                        "revision": text,
                        "format": Option::<Format>::schema(),
                        "weight": { "anyOf": [{ "type": "number", "exclusiveMinimum": 0 }, { "type": "null" }] },
                    },
                    "additionalProperties": false,
                },
            ],
        })
    }
}

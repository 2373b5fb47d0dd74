//! The labels of a classification, and the weights of their rows in the loss.
use super::value::{ConfigValue, Node, Refusal, quoted};
use serde_json::{Map, Value as Json, json};

/// Names of labels in the order of their numbers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Labels(pub Vec<String>);

/// A label as rows may write it: text, a whole number, true or false.
fn label(node: &Node) -> Option<String> {
    match node {
        Node::Str(text) if !text.is_empty() => Some(text.clone()),
        Node::Int(number) => Some(number.to_string()),
        Node::Bool(value) => Some(value.to_string()),
        _ => None,
    }
}

impl ConfigValue for Labels {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        let items = match node {
            Node::Null => &[][..],
            Node::List(items) => items,
            _ => return Err(Refusal::new(node, Self::expected())),
        };
        let mut labels: Vec<String> = Vec::with_capacity(items.len());
        for item in items {
            let label = label(item).ok_or_else(|| Refusal::new(item, "a label: a text or a whole number"))?;
            if labels.contains(&label) {
                let found = format!("the label {} twice", quoted(&label));
                return Err(Refusal { found, expected: Self::expected(), hint: None });
            }
            labels.push(label);
        }
        if labels.len() == 1 {
            return Err(Refusal::new(node, "at least two labels"));
        }
        Ok(Self(labels))
    }

    fn to_json(&self) -> Json {
        json!(self.0)
    }

    fn expected() -> String {
        "a list of labels".to_owned()
    }

    fn schema() -> Json {
        json!({ "type": ["array", "null"], "items": { "type": ["string", "integer", "boolean"] }, "uniqueItems": true })
    }
}

/// The weight of a row in the loss, by its label.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum ClassWeights {
    /// Every row has the weight 1.
    #[default]
    None,
    /// Inversely proportional to the rows of a label, so that every label has the same total.
    Balanced,
    /// Weights by label; labels that are left out count 1.
    Given(Vec<(String, f64)>),
}

impl ConfigValue for ClassWeights {
    fn from_node(node: &Node) -> Result<Self, Refusal> {
        match node {
            Node::Null => Ok(Self::None),
            Node::Str(word) if word == "none" => Ok(Self::None),
            Node::Str(word) if word == "balanced" => Ok(Self::Balanced),
            Node::Map(entries) => {
                let weight = |(label, node): &(String, Node)| match f64::from_node(node) {
                    Ok(weight) => Ok((label.clone(), weight)),
                    Err(refusal) => {
                        Err(Refusal { expected: format!("{} for {}", refusal.expected, quoted(label)), ..refusal })
                    }
                };
                let weights = entries.iter().map(weight).collect::<Result<Vec<_>, _>>()?;
                if !weights.is_empty() && weights.iter().all(|(_, weight)| *weight == 0.0) {
                    return Err(Refusal::new(node, "a weight above 0"));
                }
                Ok(Self::Given(weights))
            }
            _ => Err(Refusal::new(node, Self::expected())),
        }
    }

    fn to_json(&self) -> Json {
        match self {
            Self::None => "none".into(),
            Self::Balanced => "balanced".into(),
            Self::Given(weights) => {
                weights.iter().map(|(label, weight)| (label.clone(), (*weight).into())).collect::<Map<_, _>>().into()
            }
        }
    }

    fn expected() -> String {
        "none, balanced, or a mapping from label to weight".to_owned()
    }

    fn schema() -> Json {
        json!({ "anyOf": [
            { "enum": ["none", "balanced", null] },
            { "type": "object", "additionalProperties": { "type": "number" } },
        ] })
    }

    fn numbers(&self) -> Vec<f64> {
        match self {
            Self::Given(weights) => weights.iter().map(|(_, weight)| *weight).collect(),
            Self::None | Self::Balanced => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_texts_or_numbers_each_once() {
        let list = |items: &[Node]| Labels::from_node(&Node::List(items.to_vec()));
        let labels = list(&[Node::Str("ham".into()), Node::Int(3), Node::Bool(true)]).unwrap();
        assert_eq!(labels.0, ["ham", "3", "true"]);
        assert!(list(&[Node::Int(1), Node::Str("1".into())]).unwrap_err().found.contains("twice"));
        assert!(list(&[Node::Int(1)]).is_err() && list(&[Node::Null, Node::Int(1)]).is_err());
        assert_eq!(Labels::from_node(&Node::Null).unwrap(), Labels::default());
    }

    #[test]
    fn weights_are_a_word_or_a_mapping() {
        let map = |weight| Node::Map(vec![("a".into(), Node::Float(weight))]);
        assert_eq!(ClassWeights::from_node(&map(0.5)).unwrap(), ClassWeights::Given(vec![("a".into(), 0.5)]));
        assert_eq!(ClassWeights::from_node(&Node::Str("balanced".into())).unwrap().to_json(), "balanced");
        assert!(ClassWeights::from_node(&map(0.0)).is_err(), "nothing would be learned");
        assert!(ClassWeights::from_node(&Node::Str("heavy".into())).is_err());
    }
}

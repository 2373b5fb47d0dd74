//! The head for sequence classification and regression (Transformers' `…ForSequenceClassification`), and its keys in
//! `config.json`.
use serde_json::{Map, Value, json};

use super::family::Family;
use super::hf_json::Source;
use tunesmith_base::error::{Error, Result};

/// The most labels that are accepted.
const MOST: usize = 1 << 16;

/// Tensor name of the head's weight, `[outputs, hidden_size]`.
pub const SCORE: &str = "score.weight";

/// A linear head on the last token of a row: one logit for each label, or one number for a regression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreHead {
    /// Labels in the order of `id2label`; empty for a regression.
    pub labels: Vec<String>,
}

impl ScoreHead {
    /// A regression head with one output.
    pub const fn number() -> Self {
        Self { labels: Vec::new() }
    }

    /// Whether it is a regression head.
    pub const fn is_number(&self) -> bool {
        self.labels.is_empty()
    }

    /// Rows of its weight: one for each label, or 1 for a regression.
    pub const fn outputs(&self) -> usize {
        if self.is_number() { 1 } else { self.labels.len() }
    }

    /// Writes it into a `config.json`: class, labels and `problem_type`. Also writes `padding` where the file names no `pad_token_id`,
    /// since Transformers needs it to find the last token of a row.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: Transformers has no such class for the family.
    pub fn describe(&self, family: &Family, padding: Option<u32>, config: &mut Map<String, Value>) -> Result<()> {
        let class = family.classifier.ok_or_else(|| Self::refusal(family))?;
        config.insert("architectures".into(), json!([class]));
        let single = ["LABEL_0".to_owned()];
        let labels = if self.is_number() { &single[..] } else { &self.labels };
        let names = labels.iter().enumerate().map(|(id, label)| (id.to_string(), label.as_str().into()));
        config.insert("id2label".into(), names.collect::<Map<_, _>>().into());
        let ids = labels.iter().enumerate().map(|(id, label)| (label.clone(), id.into()));
        config.insert("label2id".into(), ids.collect::<Map<_, _>>().into());
        let kind = if self.is_number() { "regression" } else { "single_label_classification" };
        config.insert("problem_type".into(), kind.into());
        // Transformers derives it from the labels; a value from another head would contradict them.
        config.remove("num_labels");
        if config.get("pad_token_id").is_none_or(Value::is_null)
            && let Some(padding) = padding
        {
            config.insert("pad_token_id".into(), padding.into());
        }
        Ok(())
    }

    /// The error for a family that Transformers has no classification class for.
    pub fn refusal(family: &Family) -> Error {
        Error::model(format!(
            "not supported: a classification head on {}, since Transformers has no class that loads it",
            family.model_type
        ))
    }
}

impl Source<'_> {
    /// The classification head, if `architectures` names the family's classification class.
    pub(super) fn score_head(&self, family: &Family) -> Result<Option<ScoreHead>> {
        let classes = self.get("architectures").and_then(Value::as_array);
        let class = family.classifier;
        let named = classes.into_iter().flatten().any(|found| found.as_str().is_some_and(|it| Some(it) == class));
        if !named {
            return Ok(None);
        }
        let kind = self.text("problem_type")?;
        if kind == Some("multi_label_classification") {
            return Err(self.not_yet("problem_type \"multi_label_classification\""));
        }
        let expected = "an object from 0, 1, … to labels";
        let count = match self.get("id2label") {
            Some(Value::Object(names)) => names.len(),
            Some(_) => return Err(self.mismatch("id2label", expected)),
            None => self.size_up_to("num_labels", Some(2), MOST)?,
        };
        if count == 0 || count > MOST {
            return Err(self.mismatch("id2label", expected));
        }
        if kind == Some("regression") || count == 1 {
            return match count {
                1 => Ok(Some(ScoreHead::number())),
                _ => Err(self.not_yet(format!("a regression of {count} numbers"))),
            };
        }
        let label = |id: usize| match self.get("id2label") {
            None => Ok(format!("LABEL_{id}")),
            Some(names) => {
                let name = names.get(id.to_string()).and_then(Value::as_str).map(str::to_owned);
                name.ok_or_else(|| self.mismatch("id2label", expected))
            }
        };
        let labels = (0..count).map(label).collect::<Result<Vec<_>>>()?;
        let mut sorted: Vec<&String> = labels.iter().collect();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(self.error(format!("id2label has {:?} twice", pair[0]))),
            None => Ok(Some(ScoreHead { labels })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;
    use std::path::Path;

    fn config(more: &Value) -> Value {
        let mut config = json!({
            "architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "hidden_size": 8,
            "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 10,
        });
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }

    fn read(config: &Value) -> Result<Arch> {
        Arch::from_json(&config.to_string(), Path::new("config.json"))
    }

    #[test]
    fn what_is_described_is_read_back() {
        let arch = read(&config(&json!({}))).unwrap();
        assert_eq!(arch.score.as_ref().unwrap().labels, ["LABEL_0", "LABEL_1"], "as Transformers assumes");
        assert_eq!((arch.outputs(), arch.head_tensor()), (2, "score.weight"));
        assert_eq!(arch.tensors().last().unwrap().shape, [2, 8]);
        for head in [ScoreHead { labels: ["b", "a", "c"].map(String::from).to_vec() }, ScoreHead::number()] {
            let mut file = config(&json!({}));
            head.describe(arch.family, Some(7), file.as_object_mut().unwrap()).unwrap();
            assert_eq!(file["pad_token_id"], 7);
            let read = read(&file).unwrap();
            assert_eq!((read.score, read.pad_token_id), (Some(head), Some(7)));
        }
    }

    #[test]
    fn what_is_no_head_of_ours_is_refused() {
        for (more, found) in [
            (json!({ "problem_type": "multi_label_classification" }), "multi_label"),
            (json!({ "problem_type": "regression", "id2label": { "0": "a", "1": "b" } }), "regression of 2"),
            (json!({ "id2label": { "0": "a", "2": "b" } }), "id2label"),
            (json!({ "id2label": { "0": "a", "1": "a" } }), "twice"),
            (json!({ "architectures": ["GraniteForSequenceClassification"] }), "architectures"),
        ] {
            let error = read(&config(&more)).unwrap_err();
            assert!(error.message().contains(found), "{error}");
        }
    }
}

//! Evaluation of a classification head: every model's prediction for each row, measured against its label or number.
use serde_json::{Map, Value, json};

use super::super::atomic_lines::AtomicLines;
use super::super::classify::prediction;
use super::evaluation::Evaluation;
use crate::config::arch::ScoreHead;
use crate::error::Result;
use crate::eval::EvalSplit;
use crate::eval::metrics::scored::{Bootstrap, Scored};
use crate::eval::metrics::{Difference, Score};
use crate::model::Model;
use crate::telemetry::report::Confusion;
use crate::telemetry::report::answers::{Answered, Rows};
use crate::words::count;

/// Predictions by the head that all models share.
pub(super) struct Predictions<'a> {
    pub eval_split: EvalSplit<'a>,
    pub split_name: &'a str,
    pub head: ScoreHead,
}

impl Predictions<'_> {
    fn bootstrap(&self) -> Bootstrap {
        let config = self.eval_split.config;
        Bootstrap {
            replicates: config.eval.bootstrap_samples,
            confidence: config.eval.confidence,
            seed: config.train.seed,
        }
    }
}

impl Evaluation for Predictions<'_> {
    type Measured = Scored;

    fn measure(&self, model: &Model) -> Result<Scored> {
        self.eval_split.classify(model, &self.head)
    }

    fn scores(&self, scored: &Scored) -> Vec<Score> {
        scored.scores(self.bootstrap()).into_iter().filter(|score| score.value.is_finite()).collect()
    }

    fn differences(&self, first: &Scored, second: &Scored) -> Vec<Difference> {
        first.differences(second, self.bootstrap())
    }

    /// Rows that the last model has wrong come first in the report.
    fn write_samples(&self, samples: &mut AtomicLines, names: &[&str], scored: &[Scored]) -> Result<Rows> {
        let Self { eval_split: EvalSplit { dataset, split, rows, .. }, head, .. } = self;
        let (mut right, mut wrong) = (Vec::new(), Vec::new());
        for row in 0..*rows {
            let prompt = dataset.tokenizer.decode(&split.example(row)?.input_ids, false)?;
            let reference = match split.labelled(row)? {
                _ if head.is_number() => json!(scored[0].number(row)),
                Some((class, _)) => json!(head.labels.get(class as usize)),
                None => Value::Null,
            };
            let predictions: Vec<_> = scored.iter().map(|scored| prediction(head, scored.outputs(row))).collect();
            let by_name = |value: fn(&(Value, Option<Value>)) -> Value| -> Map<String, Value> {
                names.iter().zip(&predictions).map(|(name, found)| ((*name).to_owned(), value(found))).collect()
            };
            let found = by_name(|(found, _)| found.clone());
            let mut line = json!({ "row": row, "text": prompt, "label": reference, "predictions": found });
            if !head.is_number() {
                line["probabilities"] = by_name(|(_, probabilities)| json!(probabilities)).into();
            }
            samples.push(&line.to_string())?;
            let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let answers: Vec<String> = predictions.iter().map(|(found, _)| plain(found)).collect();
            let reference = plain(&reference);
            let is_right = answers.last() == Some(&reference);
            if is_right { &mut right } else { &mut wrong }.push(Answered {
                pictures: Vec::new(),
                question: prompt.clone(),
                prompt,
                reference,
                answers,
            });
        }
        wrong.extend(right);
        Ok(Rows { first: wrong, ..Rows::default() })
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        vec![("task", self.eval_split.config.task().as_str().into()), ("labels", json!(self.head.labels))]
    }

    fn model_fields(&self, scored: &Scored) -> Vec<(&'static str, Value)> {
        vec![("confusion", json!(scored.confusion()))]
    }

    fn picture(&self, name: &str, scored: &Scored) -> Option<String> {
        let title = format!("{name}: {} ({})", count(self.eval_split.rows, "row"), self.split_name);
        let confusion = Confusion { title, labels: self.head.labels.clone(), cells: scored.confusion() };
        (!self.head.is_number()).then(|| format!("<h2>Labels</h2>\n{}", confusion.render()))
    }
}

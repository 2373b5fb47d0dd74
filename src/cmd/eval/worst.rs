//! The rows of an evaluation with the worst score of one model.
use serde_json::Value;

use crate::config::{Config, EvalMetric, greater_is_better};
use crate::telemetry::report::answers::WORST;

/// A row with each model's answer.
#[derive(Debug, PartialEq)]
pub(super) struct WorstRow {
    /// The number of the row in its split.
    pub index: usize,
    /// Each model's answer.
    pub answers: Vec<String>,
    /// How bad it is: a score and the loss, both the greater the worse.
    badness: [f64; 2],
}

/// The worst rows so far, at most [`WORST`], the worst one first. Of equal scores, the greater loss is the worse.
#[derive(Debug)]
pub(super) struct Worst {
    /// The score that counts, such as `exact_match`.
    pub measure: String,
    /// The rows, the worst one first.
    pub rows: Vec<WorstRow>,
}

impl Worst {
    /// By the first metric of `eval.metrics` that single rows have; without one, by the loss.
    pub fn new(config: &Config) -> Self {
        let measure = config.eval.metrics.iter().find_map(|metric| match metric {
            EvalMetric::Rouge => Some("rougeL"),
            EvalMetric::Bleu => Some("bleu"),
            EvalMetric::Chrf => Some("chrf"),
            EvalMetric::ChrfPlusPlus => Some("chrf++"),
            EvalMetric::Meteor => Some("meteor"),
            EvalMetric::ExactMatch => Some("exact_match"),
            EvalMetric::Contains => Some("contains"),
            EvalMetric::Sari => Some("sari"),
            EvalMetric::VqaAccuracy => Some("vqa_accuracy"),
            EvalMetric::Choice => Some("choice"),
            EvalMetric::YesNo => Some("yes_no_accuracy"),
            EvalMetric::Json => Some("json_equal"),
            EvalMetric::Cider => None,
        });
        Self { measure: measure.unwrap_or("loss").to_owned(), rows: Vec::new() }
    }

    /// Keeps a row if it is one of the worst. A row without the score, such as one that a metric leaves out, does not count.
    pub fn offer(&mut self, index: usize, scores: &Value, answers: &[String]) {
        let of = |name: &str| scores[name].as_f64().filter(|score| score.is_finite());
        let Some(score) = of(&self.measure) else { return };
        let score = if greater_is_better(&self.measure) { -score } else { score };
        let badness = [score, of("loss").unwrap_or(0.0)];
        let worse = |row: &WorstRow| {
            let [score, loss] = [0, 1].map(|at| row.badness[at].total_cmp(&badness[at]));
            score.then(loss).is_ge()
        };
        let place = self.rows.partition_point(worse);
        if place < WORST {
            self.rows.truncate(WORST - 1);
            self.rows.insert(place, WorstRow { index, answers: answers.to_vec(), badness });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_worst_rows_stay_in_their_order() {
        let mut worst = Worst { measure: "exact_match".to_owned(), rows: Vec::new() };
        for index in 0..30 {
            let right = f64::from(u8::from(usize::is_multiple_of(index, 2)));
            worst.offer(index, &json!({"exact_match": right, "loss": (index % 7) as f64}), &[]);
        }
        worst.offer(30, &json!({"loss": 100.0}), &[]);
        worst.offer(31, &json!({"exact_match": null}), &[]);
        let rows: Vec<usize> = worst.rows.iter().map(|row| row.index).collect();
        // The wrong rows are the odd ones; of these the loss decides, and of equal ones the first comes first.
        assert_eq!(rows, [13, 27, 5, 19, 11, 25, 3, 17, 9, 23]);
        let mut by_loss = Worst { measure: "loss".to_owned(), rows: Vec::new() };
        (0..3).for_each(|index| by_loss.offer(index, &json!({"loss": index}), &[]));
        assert_eq!(by_loss.rows.iter().map(|row| row.index).collect::<Vec<_>>(), [2, 1, 0]);
    }
}

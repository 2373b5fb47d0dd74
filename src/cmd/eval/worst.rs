//! The rows of an evaluation with the worst score of one model.
use serde_json::{Map, Value};

use crate::config::greater_is_better;
use crate::eval::metrics::Likelihood;
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
#[derive(Debug, Default)]
pub(super) struct Worst {
    /// The score that counts: the first that single rows have besides their likelihood, such as `exact_match`, or else the loss.
    /// Empty before the first row.
    pub measure: String,
    /// The rows, the worst one first.
    pub rows: Vec<WorstRow>,
}

impl Worst {
    /// Keeps a row if it is one of the worst. A row without the score, such as one that a metric leaves out, does not count.
    pub fn offer(&mut self, index: usize, scores: &Map<String, Value>, answers: &[String]) {
        if self.measure.is_empty() {
            let of_likelihood = Likelihood::default().scores().map(|(name, _)| name);
            let first = scores.keys().find(|name| !of_likelihood.contains(&name.as_str()));
            first.map_or("loss", String::as_str).clone_into(&mut self.measure);
        }
        let of = |name: &str| scores.get(name)?.as_f64().filter(|score| score.is_finite());
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
        let offer = |worst: &mut Worst, index, scores: Value| worst.offer(index, scores.as_object().unwrap(), &[]);
        let mut worst = Worst::default();
        for index in 0..30 {
            let right = f64::from(u8::from(usize::is_multiple_of(index, 2)));
            offer(&mut worst, index, json!({"loss": index % 7, "perplexity": 1.0, "exact_match": right}));
        }
        offer(&mut worst, 30, json!({"loss": 100.0}));
        offer(&mut worst, 31, json!({"exact_match": null}));
        let rows: Vec<usize> = worst.rows.iter().map(|row| row.index).collect();
        // The wrong rows are the odd ones; of these the loss decides, and of equal ones the first comes first.
        assert_eq!(worst.measure, "exact_match");
        assert_eq!(rows, [13, 27, 5, 19, 11, 25, 3, 17, 9, 23]);
        let mut by_loss = Worst::default();
        (0..3).for_each(|index| offer(&mut by_loss, index, json!({"loss": index})));
        assert_eq!(by_loss.rows.iter().map(|row| row.index).collect::<Vec<_>>(), [2, 1, 0]);
    }
}

//! Metrics of a classification head: accuracy, precision, recall, F1, the confusion matrix and the area under the ROC curve; of
//! a regression, errors and correlation. The values equal scikit-learn's.
//!
//! Rows are kept as outputs, label and weight, because metrics such as ROC-AUC need all rows at once.
use rayon::prelude::*;

use super::bootstrap::{interval, times};
use super::{Difference, Score};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::ScoreHead;
use tunesmith_config::task::{CLASS_MEASURES, LABEL_MEASURES, NUMBER_MEASURES};
use tunesmith_data::Split;

/// Settings of bootstrap confidence intervals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bootstrap {
    /// `eval.bootstrap_samples`; 0 for no intervals.
    pub replicates: usize,
    /// Confidence level of intervals (`eval.confidence`).
    pub confidence: f64,
    /// Seed of the replicates (`train.seed`).
    pub seed: u64,
}

impl Bootstrap {
    /// No replicates, so that scores have no confidence intervals.
    pub const NONE: Self = Self { replicates: 0, confidence: 0.0, seed: 0 };
}

/// Values of the rows that are computed once, because all bootstrap replicates use them.
struct Found {
    losses: Vec<f64>,
    /// For ROC-AUC: the rows by rising probability of a label, `(label, [(probability, row)])`. Two labels need only the second
    /// one; several need each.
    orders: Vec<(usize, Vec<(f64, usize)>)>,
}

/// Outputs of a classification head for rows, with their labels.
#[derive(Debug, Clone)]
pub struct Scored {
    head: ScoreHead,
    /// `[rows, outputs]`.
    outputs: Vec<f32>,
    /// The index of each row's label; in a regression, the bits of its number as `f32`.
    targets: Vec<i32>,
    weights: Vec<f32>,
}

impl Scored {
    /// No rows yet, for outputs of `head`.
    pub const fn new(head: ScoreHead) -> Self {
        Self { head, outputs: Vec::new(), targets: Vec::new(), weights: Vec::new() }
    }

    /// The first rows of a split with the `outputs` of the head for them, `[rows, outputs]`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a row has no label; [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
    pub fn of_rows(head: &ScoreHead, split: &Split, outputs: &[f32]) -> Result<Self> {
        let mut scored = Self::new(head.clone());
        for (row, outputs) in outputs.chunks_exact(head.outputs()).enumerate() {
            let labelled = split.labelled(row)?;
            let (target, weight) = labelled.ok_or_else(|| Error::data(format!("row {} has no label", row + 1)))?;
            scored.push(outputs, target, weight);
        }
        Ok(scored)
    }

    /// Adds a row: the head's outputs, the index of its label (in a regression, the bits of its number), and its loss weight.
    pub fn push(&mut self, outputs: &[f32], target: i32, weight: f32) {
        assert_eq!(outputs.len(), self.head.outputs(), "a score for each label");
        self.outputs.extend_from_slice(outputs);
        self.targets.push(target);
        self.weights.push(weight);
    }

    /// How many rows there are.
    pub const fn rows(&self) -> usize {
        self.targets.len()
    }

    /// The head's outputs for a row, `[outputs]`.
    pub fn outputs(&self, row: usize) -> &[f32] {
        let width = self.head.outputs();
        &self.outputs[row * width..][..width]
    }

    /// The index of a row's label.
    fn class(&self, row: usize) -> usize {
        self.targets[row].unsigned_abs() as usize
    }

    /// The target of a row in a regression.
    pub fn number(&self, row: usize) -> f64 {
        f64::from(f32::from_bits(self.targets[row].cast_unsigned()))
    }

    /// A row's loss: cross-entropy, or the squared error.
    fn loss_of(&self, row: usize) -> f64 {
        if self.head.is_number() {
            return (f64::from(self.outputs(row)[0]) - self.number(row)).powi(2);
        }
        -log_softmax(self.outputs(row))[self.class(row)]
    }

    /// The weighted mean loss.
    fn loss(&self, times: Option<&[u8]>, losses: &[f64]) -> f64 {
        let (mut sum, mut all) = (0.0, 0.0);
        for (row, loss) in losses.iter().enumerate() {
            let weight = f64::from(self.weights[row]) * count(times, row);
            (sum, all) = (sum + weight * loss, all + weight);
        }
        sum / all
    }

    /// The confusion matrix, `[label][predicted]`; empty for a regression.
    pub fn confusion(&self) -> Vec<Vec<u64>> {
        let cells = self.cells(None);
        cells.into_iter().map(|row| row.into_iter().map(|count| count as u64).collect()).collect()
    }

    fn cells(&self, times: Option<&[u8]>) -> Vec<Vec<f64>> {
        let labels = self.head.labels.len();
        let mut cells = vec![vec![0.0; labels]; labels];
        for row in (0..self.rows()).filter(|_| labels > 0) {
            cells[self.class(row)][best(self.outputs(row))] += count(times, row);
        }
        cells
    }

    /// The scores over all rows, with their intervals, the loss first.
    pub fn scores(&self, bootstrap: Bootstrap) -> Vec<Score> {
        let (found, names) = (self.found(), names(&self.head));
        let values = self.values(None, &found);
        let replicates = self.replicates(bootstrap, &found);
        let score = |(index, name): (usize, String)| Score {
            name,
            value: values[index],
            interval: interval(replicates.iter().map(|values| values[index]).collect(), bootstrap.confidence),
        };
        names.into_iter().enumerate().map(score).collect()
    }

    /// Compares with the scores of another model on the same rows in the same order.
    pub fn differences(&self, other: &Self, bootstrap: Bootstrap) -> Vec<Difference> {
        let (found, others) = (self.found(), other.found());
        let (first, second) = (self.values(None, &found), other.values(None, &others));
        let (before, after) = (self.replicates(bootstrap, &found), other.replicates(bootstrap, &others));
        let difference = |(index, name): (usize, String)| {
            let pairs = before.iter().zip(&after).map(|(before, after)| after[index] - before[index]);
            Difference::of(name, first[index], second[index], pairs.collect(), bootstrap.confidence)
        };
        names(&self.head).into_iter().enumerate().map(difference).collect()
    }

    fn replicates(&self, bootstrap: Bootstrap, found: &Found) -> Vec<Vec<f64>> {
        let measures = names(&self.head).len();
        let one = |replicate| {
            let times = times(bootstrap.seed, self.rows(), replicate);
            // Without rows, the metrics of a label would be 0 instead of undefined.
            if times.iter().all(|&times| times == 0) {
                vec![f64::NAN; measures]
            } else {
                self.values(Some(&times), found)
            }
        };
        (0..bootstrap.replicates as u64).into_par_iter().map(one).collect()
    }

    fn found(&self) -> Found {
        let labels = match self.head.labels.len() {
            0 => 0..0,
            2 => 1..2,
            labels => 0..labels,
        };
        let order = |label: usize| {
            let of_row = |row: usize| (softmax(self.outputs(row))[label], row);
            let mut rows: Vec<(f64, usize)> = (0..self.rows()).map(of_row).collect();
            rows.sort_by(|one, other| one.0.total_cmp(&other.0));
            (label, rows)
        };
        Found { losses: (0..self.rows()).map(|row| self.loss_of(row)).collect(), orders: labels.map(order).collect() }
    }

    /// The metrics in the order of [`names`]. `times` says how often each row counts in a replicate; `None` counts each once.
    fn values(&self, times: Option<&[u8]>, found: &Found) -> Vec<f64> {
        let mut values = vec![self.loss(times, &found.losses)];
        if self.head.is_number() {
            values.extend(self.of_numbers(times));
            return values;
        }
        let cells = self.cells(times);
        let labels = self.head.labels.len();
        let each: Vec<Class> = (0..labels).map(|label| Class::of(&cells, label)).collect();
        let all: f64 = each.iter().map(|class| class.rows).sum();
        let right: f64 = each.iter().map(|class| class.hits).sum();
        // A label without rows and predictions is left out, as in scikit-learn.
        let present: Vec<&Class> = each.iter().filter(|class| class.rows + class.found > 0.0).collect();
        let mean = |of: fn(&Class) -> f64| present.iter().map(|class| of(class)).sum::<f64>() / present.len() as f64;
        let weighted = present.iter().map(|class| class.rows * class.f1()).sum::<f64>() / all;
        values.extend([
            right / all,
            mean(Class::f1),
            right / all,
            weighted,
            mean(Class::precision),
            mean(Class::recall),
        ]);
        let areas = found.orders.iter().map(|(label, order)| self.area(times, order, *label));
        values.push(areas.sum::<f64>() / found.orders.len() as f64);
        for of in [Class::precision as fn(&Class) -> f64, Class::recall, Class::f1] {
            values.extend(each.iter().map(of));
        }
        values
    }

    /// The area under the ROC curve of a label against the rest: how probably a row with it ranks above one without (Mann and
    /// Whitney; half where they are level). NaN where there are only rows of one kind.
    fn area(&self, times: Option<&[u8]>, order: &[(f64, usize)], label: usize) -> f64 {
        let (mut area, mut below, mut positives) = (0.0, 0.0, 0.0);
        let mut at = 0;
        while at < order.len() {
            let level = order[at].0;
            let (mut with, mut without) = (0.0, 0.0);
            while at < order.len() && order[at].0 == level {
                let row = order[at].1;
                let side = if self.class(row) == label { &mut with } else { &mut without };
                *side += count(times, row);
                at += 1;
            }
            area += with * (below + without / 2.0);
            (below, positives) = (below + without, positives + with);
        }
        area / (positives * below)
    }

    /// Mean squared error, mean absolute error, R², and Pearson's correlation.
    fn of_numbers(&self, times: Option<&[u8]>) -> [f64; 4] {
        let rows =
            || (0..self.rows()).map(|row| (f64::from(self.outputs(row)[0]), self.number(row), count(times, row)));
        let all: f64 = rows().map(|(.., times)| times).sum();
        let mean = |of: &dyn Fn(f64, f64) -> f64| {
            rows().map(|(found, real, times)| times * of(found, real)).sum::<f64>() / all
        };
        let (found, real) = (mean(&|found, _| found), mean(&|_, real| real));
        let squared = mean(&|found, real| (found - real).powi(2));
        let variance = mean(&|_, value| (value - real).powi(2));
        let own = mean(&|value, _| (value - found).powi(2));
        let both = mean(&|one, other| (one - found) * (other - real));
        let r2 = if variance > 0.0 { 1.0 - squared / variance } else { f64::NAN };
        [squared, mean(&|found, real| (found - real).abs()), r2, both / (own * variance).sqrt()]
    }
}

/// The names of the metrics: the loss, those over all labels, then those of each label.
pub fn names(head: &ScoreHead) -> Vec<String> {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
    if head.is_number() {
        return [vec!["loss".to_owned()], owned(&NUMBER_MEASURES)].concat();
    }
    let area = if head.labels.len() == 2 { "roc_auc" } else { "roc_auc_ovr" };
    let over_all: Vec<&str> =
        CLASS_MEASURES.into_iter().filter(|name| !name.starts_with("roc_auc") || *name == area).collect();
    let of_labels =
        LABEL_MEASURES.iter().flat_map(|measure| head.labels.iter().map(move |label| format!("{measure}.{label}")));
    [vec!["loss".to_owned()], owned(&over_all), of_labels.collect()].concat()
}

/// Row counts of one label, for precision and recall.
struct Class {
    /// Rows with this label.
    rows: f64,
    /// Rows predicted as this label.
    found: f64,
    /// Rows with this label that were predicted as it.
    hits: f64,
}

impl Class {
    fn of(cells: &[Vec<f64>], label: usize) -> Self {
        Self {
            rows: cells[label].iter().sum(),
            found: cells.iter().map(|row| row[label]).sum(),
            hits: cells[label][label],
        }
    }

    fn precision(&self) -> f64 {
        share(self.hits, self.found)
    }

    fn recall(&self) -> f64 {
        share(self.hits, self.rows)
    }

    fn f1(&self) -> f64 {
        share(2.0 * self.hits, self.rows + self.found)
    }
}

/// Precision, recall and F1 of each label of a confusion `[label][found]`.
pub fn of_labels(confusion: &[Vec<u64>]) -> Vec<[f64; 3]> {
    let cells: Vec<Vec<f64>> = confusion.iter().map(|row| row.iter().map(|&count| count as f64).collect()).collect();
    let of = |label| Class::of(&cells, label);
    (0..cells.len()).map(of).map(|class| [class.precision(), class.recall(), class.f1()]).collect()
}

/// Division by zero gives 0, as scikit-learn's `zero_division=0`.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn count(times: Option<&[u8]>, row: usize) -> f64 {
    times.map_or(1.0, |times| f64::from(times[row]))
}

/// The index of the largest value; the first one if several are equal.
pub fn best(outputs: &[f32]) -> usize {
    let mut best = 0;
    for (index, value) in outputs.iter().enumerate() {
        if *value > outputs[best] {
            best = index;
        }
    }
    best
}

fn log_softmax(outputs: &[f32]) -> Vec<f64> {
    let top = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = outputs.iter().map(|value| (f64::from(*value) - f64::from(top)).exp()).sum();
    outputs.iter().map(|value| f64::from(*value) - f64::from(top) - sum.ln()).collect()
}

/// The probabilities of the labels.
pub fn softmax(outputs: &[f32]) -> Vec<f64> {
    log_softmax(outputs).into_iter().map(f64::exp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measures_of_a_label_have_no_replicates_without_rows() {
        let mut scored = Scored::new(ScoreHead { labels: vec!["a".into(), "b".into()] });
        scored.push(&[1.0, 0.0], 0, 1.0);
        let bootstrap = Bootstrap { replicates: 200, confidence: 0.95, seed: 1 };
        let scores = scored.scores(bootstrap);
        let recall = scores.iter().find(|score| score.name == "recall.a").unwrap();
        // One row, and it is right: a replicate has it, or nothing.
        assert_eq!((recall.value, recall.interval), (1.0, Some((1.0, 1.0))));
        let wrong = {
            let mut other = Scored::new(ScoreHead { labels: vec!["a".into(), "b".into()] });
            other.push(&[0.0, 1.0], 0, 1.0);
            other
        };
        let differences = wrong.differences(&scored, bootstrap);
        let recall = differences.iter().find(|difference| difference.name == "recall.a").unwrap();
        assert_eq!((recall.interval, recall.p_value), (Some((1.0, 1.0)), Some(0.0)));
    }
}

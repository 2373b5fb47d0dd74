//! The labels of a classification: their names, row counts and loss weights.
use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::inputs::Inputs;
use super::progress::Progress;
use super::row::{Form, Row};
use super::row_pass::{Walker, threads};
use super::source::RawRow;
use super::split::Split;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{ClassWeights, Config, nearest};

/// The most labels of a classification. More of them suggest that the task is a regression.
const MOST: usize = 1 << 16;

/// The labels of the training rows, sorted numerically if all are integers, else as text.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: a row cannot be read or has no label, or there are fewer than 2 or more than 65,536
/// labels.
pub fn find(config: &Config, progress: &dyn Progress) -> Result<Vec<String>> {
    let inputs = Inputs::of(config)?;
    let threads = threads(config)?;
    let walker = Walker { threads: &threads, progress, max_rows: config.data.max_rows };
    let mut rows: BTreeMap<String, u64> = BTreeMap::new();
    let work = |row: RawRow, forms: &[Form]| match row.parse(forms)? {
        Row::Labeled { label, .. } => Ok(Some(label)),
        _ => Ok(None),
    };
    for input in &inputs.train {
        walker.walk("looking for labels", input, &work, &mut |label| {
            if let Some(label) = label {
                *rows.entry(label).or_default() += 1;
            }
            if rows.len() > MOST {
                return Err(Error::data(format!("{}: more than {MOST} labels", input.setting))
                    .hint("a number to be predicted is task: regression"));
            }
            Ok(())
        })?;
    }
    let mut labels: Vec<String> = rows.into_keys().collect();
    if labels.len() < 2 {
        let found = labels.first().map_or_else(|| "no label".to_owned(), |label| format!("only the label {label:?}"));
        return Err(Error::data(format!("found {found} in the training rows, expected at least two labels")));
    }
    let numbers: Option<Vec<i64>> = labels.iter().map(|label| label.parse().ok()).collect();
    if let Some(mut numbers) = numbers {
        numbers.sort_unstable();
        labels = numbers.iter().map(i64::to_string).collect();
    }
    Ok(labels)
}

/// A label of a classification, with its number of rows and its loss weight.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Class {
    /// The label as rows write it.
    pub label: String,
    /// Rows with this label to train on.
    pub train: u64,
    /// Rows with this label that are held out for validation.
    pub validation: u64,
    /// The factor by which the loss of its rows is multiplied.
    pub weight: f64,
}

/// Counts the rows of each label in `names` and sets its weight. `balanced` weights depend on the training rows.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: a weight for an unknown label. [`tunesmith_base::Kind::Io`]: the tokens cannot be
/// read from disk.
pub fn classes(
    names: &[String],
    weights: &ClassWeights,
    train: &Split,
    validation: Option<&Split>,
) -> Result<Vec<Class>> {
    let counted = |split: &Split| -> Result<Vec<u64>> {
        let mut counts = vec![0; names.len()];
        for index in 0..split.len() {
            if let Some(count) = split.target(index)?.and_then(|class| counts.get_mut(class as usize)) {
                *count += 1;
            }
        }
        Ok(counts)
    };
    let rows = counted(train)?;
    let held_out = validation.map(counted).transpose()?.unwrap_or_else(|| vec![0; names.len()]);
    let weights = match weights {
        ClassWeights::None => vec![1.0; names.len()],
        ClassWeights::Balanced => balanced(&rows),
        ClassWeights::Given(given) => {
            if let Some((label, _)) = given.iter().find(|(label, _)| !names.contains(label)) {
                let error = Error::config(format!("train.class_weights: {label:?} is none of the labels"));
                return Err(match nearest(label, names.iter().map(String::as_str)) {
                    Some(near) => error.hint(format!("did you mean {near}?")),
                    None => error.hint(format!("they are {}", names.join(", "))),
                });
            }
            let weight =
                |name: &String| given.iter().find(|(label, _)| label == name).map_or(1.0, |(_, weight)| *weight);
            names.iter().map(weight).collect()
        }
    };
    let one = |(id, label): (usize, &String)| Class {
        label: label.clone(),
        train: rows[id],
        validation: held_out[id],
        weight: weights[id],
    };
    Ok(names.iter().enumerate().map(one).collect())
}

/// The weights of scikit-learn's `compute_class_weight("balanced")`: rows / (labels x rows of the label), over the
/// labels with rows. Labels without rows get 1.
fn balanced(rows: &[u64]) -> Vec<f64> {
    let (all, present) = (rows.iter().sum::<u64>() as f64, rows.iter().filter(|&&rows| rows > 0).count() as f64);
    rows.iter().map(|&rows| if rows == 0 { 1.0 } else { all / (present * rows as f64) }).collect()
}

/// The loss weight of each class; `None` if all are 1.
pub fn weights(classes: &[Class]) -> Option<Arc<[f32]>> {
    let weighs = classes.iter().any(|class| class.weight != 1.0);
    weighs.then(|| classes.iter().map(|class| class.weight as f32).collect())
}

/// Warnings for the user, one sentence each.
pub fn warnings(classes: &[Class]) -> Vec<String> {
    let without = |rows: fn(&Class) -> u64| -> Vec<&str> {
        classes.iter().filter(|class| rows(class) == 0).map(|class| class.label.as_str()).collect()
    };
    let mut warnings = Vec::new();
    let absent = without(|class| class.train);
    if !absent.is_empty() {
        warnings.push(format!("no training row has the label {}: it cannot be learned", absent.join(", ")));
    }
    let absent = without(|class| class.validation);
    if !absent.is_empty() && classes.iter().any(|class| class.validation > 0) {
        warnings.push(format!("no validation row has the label {}: nothing measures it", absent.join(", ")));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balanced_weights_are_scikit_learn_s() {
        // compute_class_weight("balanced", classes=[0, 1, 2], y=[0] * 6 + [1] * 3 + [2])
        let weights = balanced(&[6, 3, 1]);
        for (found, expected) in weights.iter().zip([10.0 / 18.0, 10.0 / 9.0, 10.0 / 3.0]) {
            assert!((found - expected).abs() < 1e-12, "{weights:?}");
        }
        assert_eq!(balanced(&[5, 0, 5]), [1.0, 1.0, 1.0], "a label without rows takes no part");
    }
}

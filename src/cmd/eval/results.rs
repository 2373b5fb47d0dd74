//! Scores in the files and tables of `eval`, for answers and for a classifier's labels.
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::eval::metrics::{Difference, Score};
use crate::files;
use crate::files::output::Existing;
use crate::telemetry::report::answers::{Asked, figure};
use crate::words::count;

/// Describes the confidence intervals.
pub(super) fn intervals(confidence: f64, replicates: usize) -> String {
    match replicates {
        0 => "none (eval.bootstrap_samples: 0)".to_owned(),
        replicates => format!("{} %, by a bootstrap of {}", confidence * 100.0, count(replicates, "replicate")),
    }
}

/// The lines below the table: those facts of the report that the terminal shows too.
pub(super) fn footer(facts: &[(String, String)]) -> String {
    const SHOWN: [&str; 5] = ["rows", "intervals", "peak memory", "memory budget", "report"];
    let shown = facts.iter().filter(|(label, _)| SHOWN.contains(&label.as_str()));
    shown.fold(String::new(), |all, (label, text)| all + &format!("{label:16}{text}\n"))
}

/// The rule for existing files: those of an earlier evaluation are replaced, others only with `overwrite`.
pub(super) const fn existing(overwrite: bool) -> Existing {
    if overwrite { Existing::Replace } else { Existing::Ours(is_ours, "--overwrite") }
}

/// Whether an evaluation wrote the file, by its content.
fn is_ours(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = files::open_own(path).and_then(|file| file.take(files::SMALL).read_to_end(&mut start));
    if read.is_err() {
        return false;
    }
    let text = String::from_utf8_lossy(&start);
    let object = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap_or_default();
    match path.extension().and_then(|end| end.to_str()) {
        Some("json") => ["models", "split", "rows"].iter().all(|key| object(&text).contains_key(*key)),
        Some("jsonl") => text.lines().next().is_none_or(|line| object(line).contains_key("row")),
        _ => text.lines().take(9).any(|line| line.contains(" · evaluation</title>")),
    }
}

/// A score under its name, with its confidence interval, for `metrics.json`.
pub(super) fn score_json(score: &Score) -> (String, Value) {
    let (low, high) = score.interval.unzip();
    (score.name.clone(), json!({ "value": score.value, "low": low, "high": high }))
}

/// The difference of two models' scores under its name, with interval and p-value, for `metrics.json`.
pub(super) fn difference_json(difference: &Difference) -> (String, Value) {
    let (low, high) = difference.interval.unzip();
    let by = difference.second - difference.first;
    (difference.name.clone(), json!({ "value": by, "low": low, "high": high, "p_value": difference.p_value }))
}

/// [`figure`] with its sign.
fn signed(value: f64) -> String {
    let sign = if value > 0.0 { "+" } else { "" };
    format!("{sign}{}", figure(value))
}

/// The table of scores: one line per metric, one column per model, then the difference.
pub(super) fn table(asked: &[Asked], differences: &[Difference]) -> String {
    let names = asked.iter().flat_map(|model| &model.scores).map(|score| score.name.chars().count() + 2);
    let left = names.fold(16, usize::max);
    let mut text = format!("{:left$}", "");
    let width = asked.iter().map(|model| model.name.chars().count() + 2).fold(14, usize::max);
    for model in asked {
        let _ = write!(text, "{:>width$}", model.name); // a String never fails
    }
    text += if differences.is_empty() { "\n" } else { "    difference (interval)\n" };
    let Some(first) = asked.first() else { return text };
    for (index, score) in first.scores.iter().enumerate() {
        let _ = write!(text, "{:left$}", score.name);
        for score in asked.iter().filter_map(|model| model.scores.get(index)) {
            let _ = write!(text, "{:>width$}", figure(score.value));
        }
        if let Some(difference) = differences.iter().find(|difference| difference.name == score.name) {
            let by = difference.second - difference.first;
            let _ = write!(text, "    {}", signed(by));
            if let Some((low, high)) = difference.interval {
                let _ = write!(text, " ({} … {})", signed(low), signed(high));
            }
        }
        text.push('\n');
    }
    text
}

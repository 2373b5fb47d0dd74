//! `metrics.jsonl`: a JSON object on each line, for each optimizer step and each evaluation. Scripts and the report
//! read it. A resumed run cuts the file back to its checkpoint, so that no step appears twice.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::{self, atomic};

/// The line of an optimizer step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepLine {
    /// Optimizer steps done, including this one.
    pub step: u64,
    /// Epochs done, as a fraction.
    pub epoch: f64,
    /// Mean loss over the step's label tokens; null if it was not finite.
    pub loss: Option<f64>,
    /// For classification: the share of the step's rows that were predicted correctly before the update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// The rate that the step used.
    pub learning_rate: f64,
    /// Gradient norm before clipping; null if it was not finite.
    pub grad_norm: Option<f64>,
    /// Tokens of the step that carry a loss.
    pub label_tokens: u64,
    /// Tokens of the step, with and without a loss.
    pub tokens: u64,
    /// Tokens of the step over its wall time.
    pub tokens_per_second: f64,
    /// The most memory the process has held so far.
    pub peak_bytes: u64,
    /// The loss scale after the step, with `train.fp16`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
}

/// The line of an evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalLine {
    /// Optimizer steps done before the evaluation.
    pub step: u64,
    /// Epochs done, as a fraction.
    pub epoch: f64,
    /// Mean loss over the label tokens of the validation split; null if it was not finite.
    pub eval_loss: Option<f64>,
    /// Label tokens of the validation split; in a classification or regression, its rows.
    pub eval_label_tokens: u64,
    /// Rows of the validation split.
    pub eval_rows: u64,
    /// Wall time of the evaluation in seconds.
    pub eval_seconds: f64,
    /// Scores by name: `perplexity` and `byte_perplexity` of a language model, those of its generations with
    /// `train.predict_with_generate`, or those of a classification or regression.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub eval_scores: BTreeMap<String, f64>,
    /// For classification: rows by label and predicted label, `[label][found]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eval_confusion: Vec<Vec<u64>>,
}

/// A line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MetricsLine {
    /// One optimizer step on the training rows.
    Step(StepLine),
    /// One evaluation on the validation split.
    Eval(EvalLine),
}

/// `value`, or none if it is NaN or infinite, which JSON cannot express.
pub fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

/// Appends lines to the file. A line is in the file when [`MetricsWriter::write`] returns.
#[derive(Debug)]
pub struct MetricsWriter {
    file: File,
    path: PathBuf,
}

impl MetricsWriter {
    /// Creates an empty file, which replaces an existing one.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: &Path) -> Result<Self> {
        let file = files::open_to_write(path, true).and_then(|file| file.set_len(0).map(|()| file));
        let file = file.map_err(|source| Error::io("create", path, &source))?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Continues the file of an interrupted run. Keeps the steps up to `step` and the evaluations up to that after step
    /// `evaluated`, and drops later and incomplete lines. A missing file starts empty.
    ///
    /// # Errors
    /// The file cannot be read or rewritten.
    pub fn resume(path: &Path, step: u64, evaluated: u64) -> Result<Self> {
        let known = |line: &MetricsLine| match line {
            MetricsLine::Step(line) => line.step <= step,
            MetricsLine::Eval(line) => line.step <= evaluated,
        };
        // Keeps the text of each line: a number that is parsed and written again may differ in its last digit.
        let mut kept = Vec::new();
        for (_, text) in lines(path)?.into_iter().filter(|(line, _)| known(line)) {
            kept.extend_from_slice(&text);
            kept.push(b'\n');
        }
        atomic::write(path, &kept).map_err(|source| Error::io("rewrite", path, &source))?;
        let file = files::open_to_write(path, true).map_err(|source| Error::io("append to", path, &source))?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// Whether the file is still in place, neither removed nor replaced.
    pub fn is_in_place(&self) -> bool {
        files::is_at(&self.file, &self.path)
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends one line.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, line: &MetricsLine) -> Result<()> {
        let written = self.file.write_all(encode(line).as_bytes());
        written.map_err(|source| Error::io("append to", &self.path, &source))
    }

    /// Syncs the lines to the disk, so that they survive a loss of power. A checkpoint calls this first, so that the file never
    /// has fewer steps than a durable checkpoint.
    ///
    /// # Errors
    /// The disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|source| Error::io("write", &self.path, &source))
    }
}

fn encode(line: &MetricsLine) -> String {
    let json = serde_json::to_string(line).expect("plain numbers encode as JSON");
    json + "\n"
}

/// Whether a file with this text was written by a run. If the run was killed or lost power in its first line, that line
/// may be incomplete, or have zeros instead of bytes that never reached the disk.
pub fn begins_as_written(text: &str) -> bool {
    const BEGINNING: &str = "{\"step\":";
    match text.split_once('\n') {
        Some((first, _)) if !first.contains('\0') => serde_json::from_str::<MetricsLine>(first).is_ok(),
        Some(_) => true,
        None => {
            let whole = text.trim_end_matches('\0');
            whole.starts_with(BEGINNING) || BEGINNING.starts_with(whole)
        }
    }
}

/// The lines of the file, without those that do not parse (incomplete after a crash). A missing file has no lines.
///
/// # Errors
/// The file cannot be read.
pub fn read(path: &Path) -> Result<Vec<MetricsLine>> {
    Ok(lines(path)?.into_iter().map(|(line, _)| line).collect())
}

/// As [`read`], with the text of each line.
fn lines(path: &Path) -> Result<Vec<(MetricsLine, Vec<u8>)>> {
    let file = match files::open_own(path) {
        Ok(file) => file,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(Error::io("read", path, &source)),
    };
    let mut lines = Vec::new();
    for text in BufReader::new(file).split(b'\n') {
        let text = text.map_err(|source| Error::io("read", path, &source))?;
        if let Ok(line) = serde_json::from_slice::<MetricsLine>(&text) {
            lines.push((line, text));
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> MetricsLine {
        MetricsLine::Step(StepLine {
            step,
            epoch: step as f64 / 4.0,
            loss: finite(1.0 / step as f64),
            accuracy: None,
            learning_rate: 1e-3,
            grad_norm: finite(f64::NAN),
            label_tokens: 7,
            tokens: 20,
            tokens_per_second: 100.5,
            peak_bytes: 1 << 20,
            loss_scale: None,
        })
    }

    #[test]
    fn a_step_line_has_exactly_the_promised_keys() {
        assert_eq!(
            encode(&step(2)),
            "{\"step\":2,\"epoch\":0.5,\"loss\":0.5,\"learning_rate\":0.001,\"grad_norm\":null,\"label_tokens\":7,\
             \"tokens\":20,\"tokens_per_second\":100.5,\"peak_bytes\":1048576}\n"
        );
    }

    #[test]
    fn a_first_line_that_was_lost_is_still_a_runs() {
        let whole = encode(&step(1)) + &encode(&step(2));
        for length in 0..=whole.len() {
            assert!(begins_as_written(&whole[..length]), "{length} bytes");
            let zeros = "\0".repeat(whole.len() - length);
            assert!(begins_as_written(&(whole[..length].to_owned() + &zeros)), "{length} bytes and zeros");
        }
        for foreign in
            ["x", "{}", "{\"loss\":1}", "{\"loss\":1}\n", "{\"step\":1,\"reward\":2}\n", "\n", "step,loss\n1,2\n"]
        {
            assert!(!begins_as_written(foreign), "{foreign:?}");
        }
    }

    #[test]
    fn resuming_keeps_every_digit() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("metrics.jsonl");
        let mut metrics = MetricsWriter::create(&path).unwrap();
        // A reader that rounds makes ...509 of it.
        for loss in [13.810_967_483_520_507, 11.352_293_008_565_905] {
            let MetricsLine::Step(line) = step(1) else { unreachable!() };
            metrics.write(&MetricsLine::Step(StepLine { loss: Some(loss), ..line })).unwrap();
        }
        let before = std::fs::read(&path).unwrap();
        MetricsWriter::resume(&path, 1, 1).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }

    #[test]
    fn resuming_cuts_back_to_the_checkpoint_and_drops_half_a_line() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("metrics.jsonl");
        let eval = |step| {
            MetricsLine::Eval(EvalLine {
                step,
                epoch: 0.5,
                eval_loss: Some(0.25),
                eval_label_tokens: 9,
                eval_rows: 2,
                eval_seconds: 0.1,
                eval_scores: BTreeMap::new(),
                eval_confusion: Vec::new(),
            })
        };
        let mut metrics = MetricsWriter::create(&path).unwrap();
        for line in [step(1), step(2), eval(2), step(3)] {
            metrics.write(&line).unwrap();
        }
        metrics.file.write_all(b"{\"step\":4,\"epo").unwrap();
        let mut metrics = MetricsWriter::resume(&path, 2, 2).unwrap();
        metrics.write(&step(3)).unwrap();
        assert_eq!(read(&path).unwrap(), [step(1), step(2), eval(2), step(3)]);
        MetricsWriter::resume(&path, 2, 0).unwrap();
        assert_eq!(read(&path).unwrap(), [step(1), step(2)], "an evaluation that will be made again");
        assert!(!path.with_extension("jsonl.tmp").exists());
    }
}

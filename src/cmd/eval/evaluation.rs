//! The steps of every evaluation: load each model, measure it, compare, and write metrics.json, samples.jsonl and report.html.
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::super::atomic_lines::{self, AtomicLines};
use super::super::terminal::{print, print_text};
use super::candidates::Candidate;
use super::results::{difference_json, existing, footer, intervals, score_json, table};
use crate::checkpoint::Manifest;
use crate::config::arch::Arch;
use crate::error::Result;
use crate::eval::EvalSplit;
use crate::eval::metrics::{Difference, Score};
use crate::files::output::{Existing, check_output_file};
use crate::model::{Model, device};
use crate::plan::{human_bytes, human_seconds};
use crate::telemetry::machine;
use crate::telemetry::report::answers::{self, Asked, Page, Rows};
use crate::train::memory_prediction::used_of_budget;

/// What differs between kinds of task.
pub(super) trait Evaluation {
    /// The result of measuring one model.
    type Measured;

    /// Measures a model on all rows.
    ///
    /// # Errors
    /// The engine, the disk.
    fn measure(&self, model: &Model) -> Result<Self::Measured>;

    /// The scores over all rows.
    fn scores(&self, measured: &Self::Measured) -> Vec<Score>;

    /// How the second model's scores differ from the first's.
    fn differences(&self, first: &Self::Measured, second: &Self::Measured) -> Vec<Difference>;

    /// Writes one line per row to samples.jsonl, and returns the rows that the report shows.
    ///
    /// # Errors
    /// The disk, the tokenizer.
    fn write_samples(&self, samples: &mut AtomicLines, names: &[&str], measured: &[Self::Measured]) -> Result<Rows>;

    /// The fields of metrics.json that only this kind has.
    fn fields(&self) -> Vec<(&'static str, Value)>;

    /// The fields that only this kind has for each model in metrics.json.
    fn model_fields(&self, _: &Self::Measured) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// A figure for the report about one model, as HTML; `None` if this kind has none.
    fn picture(&self, _: &str, _: &Self::Measured) -> Option<String> {
        None
    }

    /// A fact for the report: label and text.
    fn fact(&self) -> Option<(String, String)> {
        None
    }
}

/// The files that an evaluation writes.
pub(super) struct Outputs {
    dir: PathBuf,
    existing: Existing,
    samples: AtomicLines,
}

impl Outputs {
    /// Refuses files that must not be replaced, before the first model is loaded.
    ///
    /// # Errors
    /// [`crate::Kind::Io`]: a file of another origin is there, or the folder cannot be written.
    pub fn claim(dir: PathBuf, overwrite: bool, inputs: &[PathBuf]) -> Result<Self> {
        let existing = existing(overwrite);
        for name in ["metrics.json", "report.html"] {
            check_output_file(&dir.join(name), existing, inputs)?;
        }
        let samples = AtomicLines::create(&dir.join("samples.jsonl"), existing, inputs)?;
        Ok(Self { dir, existing, samples })
    }
}

pub(super) struct Job<'a> {
    pub eval_split: EvalSplit<'a>,
    /// The split's name in results.
    pub split_name: &'a str,
    pub candidates: &'a [Candidate],
    pub base: &'a Path,
    /// The base model's shape, with new tokens.
    pub arch: &'a Arch,
    pub allow: &'a [String],
}

/// Runs an evaluation.
///
/// # Errors
/// The models, the engine, the disk.
pub(super) fn evaluate<E: Evaluation>(job: &Job<'_>, evaluation: &E, outputs: Outputs) -> Result<()> {
    let Outputs { dir, existing, mut samples } = outputs;
    let EvalSplit { config, split, rows, .. } = job.eval_split;
    let (mut results, mut seconds) = (Vec::new(), 0.0);
    let device = device::device(config.model.device)?;
    let chosen = device::chosen(config.model.device, device);
    if let Some(chosen) = &chosen {
        print_text(&format!("device: {chosen}\n"));
    }
    for candidate in job.candidates {
        print_text(&format!("asking {} ({})\n", candidate.name, candidate.dir.display()));
        let model = candidate.load(config, job.base, job.arch, job.allow)?;
        let began = Instant::now();
        results.push(evaluation.measure(&model)?);
        seconds += began.elapsed().as_secs_f64();
    }
    let differences = match results.as_slice() {
        [first, second] => evaluation.differences(first, second),
        _ => Vec::new(),
    };
    let asked: Vec<Asked> = job
        .candidates
        .iter()
        .zip(&results)
        .map(|(candidate, result)| Asked {
            name: candidate.name.clone(),
            origin: candidate.dir.display().to_string(),
            scores: evaluation.scores(result),
        })
        .collect();
    let names: Vec<&str> = asked.iter().map(|model| model.name.as_str()).collect();
    let shown = evaluation.write_samples(&mut samples, &names, &results)?;
    samples.publish()?;

    let mut models = Map::new();
    for ((model, result), candidate) in asked.iter().zip(&results).zip(job.candidates) {
        let scores: Map<String, Value> = model.scores.iter().map(score_json).collect();
        let mut fields = json!({ "path": model.origin, "scores": scores });
        if let Some(hash) = Manifest::fingerprint(&candidate.dir) {
            fields["manifest"] = hash.into();
        }
        evaluation.model_fields(result).into_iter().for_each(|(name, value)| fields[name] = value);
        models.insert(model.name.clone(), fields);
    }
    let mut metrics = json!({ "split": job.split_name, "rows": rows });
    evaluation.fields().into_iter().for_each(|(name, value)| metrics[name] = value);
    for (name, value) in [
        ("confidence", json!(config.eval.confidence)),
        ("bootstrap_samples", json!(config.eval.bootstrap_samples)),
        ("seed", json!(config.train.seed)),
        ("models", models.into()),
        ("differences", differences.iter().map(difference_json).collect::<Map<_, _>>().into()),
    ] {
        metrics[name] = value;
    }
    atomic_lines::write(&dir.join("metrics.json"), existing, &format!("{metrics:#}\n"))?;

    let mut facts: Vec<(String, String)> =
        asked.iter().map(|model| (model.name.clone(), model.origin.clone())).collect();
    facts.push(("rows".into(), format!("{rows} of {} ({})", split.len(), job.split_name)));
    facts.extend(evaluation.fact());
    facts.push(("intervals".into(), intervals(config.eval.confidence, config.eval.bootstrap_samples)));
    facts.push(("time".into(), human_seconds(seconds)));
    facts.extend(chosen.map(|chosen| ("device".into(), chosen)));
    facts.push(("peak memory".into(), human_bytes(machine::peak_bytes(device))));
    facts.extend(config.train.memory_budget.map(|budget| used_of_budget(budget.0)));
    let title =
        config.train.output_dir.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
    let pictures: Vec<String> =
        names.iter().zip(&results).filter_map(|(name, result)| evaluation.picture(name, result)).collect();
    let page = Page {
        title: &title,
        asked: &asked,
        differences: &differences,
        pictures: &pictures,
        count: rows,
        rows: &shown,
        facts: &facts,
    };
    let report = dir.join("report.html");
    atomic_lines::write(&report, existing, &answers::render(&page))?;
    facts.push(("report".into(), report.display().to_string()));
    print(&(table(&asked, &differences) + &footer(&facts)))
}

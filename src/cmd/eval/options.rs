//! The options of `eval`.
use std::path::PathBuf;

use super::super::args::ConfigArgs;
use super::super::numbers::whole;
use crate::config::Range;

/// Measure a model's answers on held-out rows, next to its base
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    /// Evaluate this checkpoint, adapter or model instead of the run's result
    #[arg(long, value_name = "DIR", conflicts_with_all = ["base", "compare"])]
    pub(super) checkpoint: Option<PathBuf>,
    /// Evaluate only the base model
    #[arg(long, conflicts_with = "compare")]
    pub(super) base: bool,
    /// Evaluate two models and report B's difference from A: folders, or the words `base` and `tuned`
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    pub(super) compare: Vec<String>,
    /// Leave out the base model
    #[arg(long, conflicts_with_all = ["base", "compare"])]
    pub(super) alone: bool,
    /// Choose the held-out rows (default: `val`, or `test` without validation rows)
    #[arg(long, value_name = "val|test")]
    pub(super) split: Option<String>,
    /// Evaluate only the first N rows (default: all)
    #[arg(long, value_name = "N", value_parser = whole::<u64>(Range::at_least(1.0)))]
    pub(super) rows: Option<u64>,
    /// Accept an adapter that was trained on another base model: `--allow base_model`
    #[arg(long, value_name = "FIELD")]
    pub(super) allow: Vec<String>,
    /// Write metrics.json, samples.jsonl and report.html to this folder (default: `eval` in the run's output folder)
    #[arg(long, value_name = "DIR")]
    pub(super) output: Option<PathBuf>,
    /// Replace these files even if `eval` did not write them
    #[arg(long)]
    pub(super) overwrite: bool,
}

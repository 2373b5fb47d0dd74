//! The options of `eval`, with the models that they name and the rows that they choose.
use std::path::{Path, PathBuf};

use super::args::ConfigArgs;
use crate::config::Config;
use crate::data::process::Part as RowPart;
use crate::data::{Dataset, Split};
use crate::error::{Error, Result};
use crate::train::output;

/// Measure what a model answers on held-out rows.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    /// Ask this checkpoint, adapter or model, and the base beside it, instead of the run's result
    #[arg(long, value_name = "DIR", conflicts_with_all = ["base", "compare"])]
    pub(super) checkpoint: Option<PathBuf>,
    /// Ask the base model alone
    #[arg(long, conflicts_with = "compare")]
    pub(super) base: bool,
    /// Ask these two, the second against the first: folders, or the words `base` and `tuned`
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    pub(super) compare: Vec<String>,
    /// Do not ask the base beside the tuned model
    #[arg(long, conflicts_with_all = ["base", "compare"])]
    pub(super) alone: bool,
    /// The rows: `val` or `test` (the default is the first that there is)
    #[arg(long, value_name = "val|test")]
    pub(super) split: Option<String>,
    /// Ask only so many rows, the first ones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) rows: Option<u64>,
    /// Accept that the adapter was trained on another base than this one, as its backend.json says (`base_model`)
    #[arg(long, value_name = "FIELD")]
    pub(super) allow: Vec<String>,
    /// The folder for metrics.json, samples.jsonl and report.html (`eval` in the output folder of the run)
    #[arg(long, value_name = "DIR")]
    pub(super) output: Option<PathBuf>,
    /// Replace these files whoever wrote them; those of an earlier `eval` are replaced anyway
    #[arg(long)]
    pub(super) overwrite: bool,
}

/// A model to evaluate.
pub(super) enum Which {
    Base,
    Tuned,
    Dir(PathBuf),
}

impl Which {
    pub(super) fn parse(word: &str) -> Self {
        match word {
            "base" => Self::Base,
            "tuned" => Self::Tuned,
            dir => Self::Dir(dir.into()),
        }
    }

    pub(super) fn name(&self) -> String {
        match self {
            Self::Base => "base".into(),
            Self::Tuned => "tuned".into(),
            Self::Dir(dir) => {
                dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
        }
    }
}

/// Names of the models in results: the word `base` or `tuned`, or the folder's name; the whole path if two names are equal.
///
/// # Errors
/// [`crate::Kind::Config`]: both are the same model.
pub(super) fn names(which: &[Which], places: &[PathBuf]) -> Result<Vec<String>> {
    let names: Vec<String> = which.iter().map(Which::name).collect();
    let ([first, second], [here, there]) = (names.as_slice(), places) else { return Ok(names) };
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if real(here) == real(there) {
        return Err(Error::config(format!("--compare: both are {}", here.display())).hint("name two models"));
    }
    if first == second { Ok(places.iter().map(|dir| dir.display().to_string()).collect()) } else { Ok(names) }
}

/// The held-out rows that `--split` names, or the first that exist: validation, then test.
///
/// # Errors
/// [`crate::Kind::Config`]: there are none.
pub(super) fn choose<'a>(name: Option<&str>, dataset: &'a Dataset) -> Result<(RowPart, &'a Split)> {
    let validation = (RowPart::Validation, dataset.validation.as_ref());
    let test = (RowPart::Test, dataset.test.as_ref());
    let candidates = match name {
        None => vec![validation, test],
        Some("val" | "validation") => vec![validation],
        Some("test") => vec![test],
        Some(other) => return Err(Error::config(format!("--split {other}: expected val or test"))),
    };
    candidates
        .into_iter()
        .find_map(|(part, split)| Some((part, split?)))
        .filter(|(_, split)| !split.is_empty())
        .ok_or_else(|| {
            let (rows, key) = match name {
                Some("test") => ("test rows", "data.test_path is not set"),
                Some(_) => ("validation rows", "neither data.val_path nor data.split is set"),
                None => ("held-out rows", "none of data.val_path, data.test_path and data.split is set"),
            };
            let there = dataset.validation.iter().chain(&dataset.test).next().is_some();
            let other = match name {
                Some("test") if there => "; --split val asks the validation rows",
                Some(_) if there => "; --split test asks the test rows",
                _ => "",
            };
            Error::config(format!("there are no {rows}: {key}"))
                .hint(format!("set data.val_path, data.test_path or data.split{other}"))
        })
}

/// The folder of a model to evaluate.
pub(super) fn place(which: &Which, config: &Config, base: &Path) -> Result<PathBuf> {
    let dir = match which {
        Which::Base => return Ok(base.to_owned()),
        Which::Tuned => {
            let output = &config.train.output_dir;
            let found =
                [output::ADAPTER, output::MODEL].map(|name| output.join(name)).into_iter().find(|dir| dir.is_dir());
            found.ok_or_else(|| {
                Error::checkpoint(format!("{}: neither adapter/ nor model/", output.display()))
                    .hint("train first, or name a checkpoint (--checkpoint DIR), or ask the base alone (--base)")
            })?
        }
        Which::Dir(dir) => dir.clone(),
    };
    if ["adapter_config.json", "config.json"].iter().any(|file| dir.join(file).is_file()) {
        return Ok(dir);
    }
    Err(Error::checkpoint(format!("{}: neither adapter_config.json nor config.json", dir.display()))
        .hint("name a checkpoint, an adapter or a model folder"))
}

//! `tunesmith eval`: measures a model on held-out rows, next to its base or another model.
mod answers;
mod candidates;
mod evaluation;
mod labels;
mod options;
mod results;
mod worst;

use std::sync::Arc;

use super::data::Bar;
use super::download::Downloads;
use super::provenance;
use super::terminal::print_note;
use crate::config::Labels;
use crate::config::arch::Arch;
use crate::data::process::Part;
use crate::data::{self, Dataset, Split};
use crate::error::{Error, Result};
use crate::eval::EvalSplit;
use crate::files;
use crate::hub;
use crate::train::vision::{Seer, Sight};
use answers::Answers;
use candidates::{candidates, choices, shared_head};
use evaluation::{Job, Outputs, evaluate};
use labels::Predictions;
pub use options::Args;

/// Runs the subcommand.
///
/// # Errors
/// Those of reading the configuration, the data and the models; [`crate::Kind::Config`]: there are no held-out rows, or a base
/// model has no classification head.
pub fn run(args: &Args) -> Result<()> {
    provenance::check_allowed(&args.allow)?;
    let resolved = args.config.load(&[])?;
    let choices = choices(args, &resolved.config)?;
    let downloads = Downloads::default();
    let base = hub::model_dir(&resolved.config.model, hub::Part::Whole, &downloads)?.dir;
    let mut arch = Arch::from_dir(&base)?;
    let (mut config, note) = resolved.for_model(&arch)?;
    if let Some(note) = note {
        print_note(&note);
    }
    hub::fetch_paths(&mut config.data, &downloads)?;
    let candidates = candidates(choices, &config, &base)?;
    let head = shared_head(&candidates, &config)?;
    if let Some(head) = &head {
        config.data.labels = Labels(head.labels.clone());
    }
    data::add_new_tokens(&mut arch, &base, &config.tuning.new_tokens)?;
    let seer = Seer { dir: &base, tokenizer: &base, hidden_size: arch.hidden_size };
    let sight = Sight::of_rows(&config, seer, hub::Part::Whole, &downloads)?;
    arch.vision = sight.as_ref().map(|sight| Arc::clone(&sight.arch));
    let pictures = sight.as_ref().map(Sight::pictures);
    let dataset = data::load(&config, &base, arch.text_ids(), &Bar::with_warnings(), pictures.as_ref())?;
    let (part, split) = held_out_split(args.split.as_deref(), &dataset)?;
    let rows = args.rows.map_or(usize::MAX, |rows| rows as usize).min(split.len());
    let eval_split = EvalSplit { config: &config, dataset: &dataset, split, rows };
    let dir = args.output.clone().unwrap_or_else(|| config.train.output_dir.join("eval"));
    let reads = candidates.iter().map(|candidate| candidate.dir.as_path()).chain([base.as_path()]);
    if let Some(read) = reads.into_iter().find(|read| files::is_same(read, &dir)) {
        return Err(Error::config(format!("--output {}: {} is read from", dir.display(), read.display()))
            .hint("name a folder of its own for the results"));
    }
    let outputs = Outputs::claim(dir.clone(), args.overwrite, &data::named_inputs(&config))?;
    let split_name = part.name();
    let job = Job { eval_split, split_name, candidates: &candidates, base: &base, arch: &arch, allow: &args.allow };
    match head {
        Some(head) => evaluate(&job, &Predictions { eval_split, split_name, head }, outputs),
        None => evaluate(&job, &Answers::new(eval_split, part, &arch.eos_token_ids, &dir)?, outputs),
    }
}

/// The split that `--split` names, or the first that has rows: validation, then test.
///
/// # Errors
/// [`crate::Kind::Config`]: there are no such rows.
fn held_out_split<'a>(name: Option<&str>, dataset: &'a Dataset) -> Result<(Part, &'a Split)> {
    let validation = (Part::Validation, dataset.validation.as_ref());
    let test = (Part::Test, dataset.test.as_ref());
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
            let set = match name {
                Some("test") => "data.test_path",
                Some(_) => "data.val_path or data.split",
                None => "data.val_path, data.test_path or data.split",
            };
            let there = dataset.validation.iter().chain(&dataset.test).next().is_some();
            let other = match name {
                Some("test") if there => "; --split val uses the validation rows",
                Some(_) if there => "; --split test uses the test rows",
                _ => "",
            };
            Error::config(format!("there are no {rows}: {key}")).hint(format!("set {set}{other}"))
        })
}

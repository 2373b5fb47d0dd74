//! `tunesmith export`: writes a trained model for other programs: as GGUF, for Transformers, or for PEFT.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::args::ConfigArgs;
use super::card_usage;
use super::download::Downloads;
use super::export_gguf::{self, GgufRequest};
use super::merge::{MAX_DIFFERENCE, check_merge, claim, output_dir, parse_difference, parse_dtype};
use super::parts_args::{Opened, PartsArgs};
use super::terminal::print;
use crate::checkpoint::loaded_adapter::LoadedAdapter;
use crate::checkpoint::publish::publish_output;
use crate::checkpoint::{MANIFEST, Manifest, folder as companions, peft};
use crate::config::arch::Arch;
use crate::config::{self, Config, ConfigValue as _, schema};
use crate::error::{Error, Result};
use crate::export::card::ModelCard;
use crate::export::folder::{self, FolderSettings};
use crate::export::gguf::GgufFormat;
use crate::export::merge::Parts;
use crate::files;
use crate::files::disk::RealDisk;
use crate::hub::{Hub, Pushed};
use crate::model::weights::Stacking;
use crate::plan::{grouped, human_bytes};
use crate::telemetry::metrics::{self, MetricsLine};
use crate::train::output;
use crate::words::count;

/// Write a model or an adapter for where it will serve.
#[derive(Debug, Clone, clap::Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    parts: PartsArgs,
    /// Write a GGUF file for llama.cpp, with matrices of this type
    #[arg(long, value_name = "f16|q8_0|q4_0|f32", conflicts_with_all = ["hf", "peft"])]
    gguf: Option<String>,
    /// Write a folder for Transformers, with a model card
    #[arg(long, conflicts_with = "peft")]
    hf: bool,
    /// Write the adapter as a folder for PEFT, with a model card
    #[arg(long)]
    peft: bool,
    /// With --gguf, write image encoder and connector (llama.cpp's mmproj file) with matrices of this type, or leave them out; `auto` takes
    /// the type of --gguf, and leaves them out where llama.cpp has no such file
    #[arg(long, value_name = "auto|none|f16|q8_0|f32", default_value = "auto", requires = "gguf", conflicts_with_all = ["adapter_only", "hf", "peft"])]
    mmproj: String,
    /// With --gguf, write only the adapter, for llama.cpp's --lora
    #[arg(long, requires = "gguf")]
    adapter_only: bool,
    /// Write to this folder or file (default: in the run's output folder). A GGUF file's name gets the ending `.gguf`
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// With --hf, write weights in this dtype; `auto` keeps the base's
    #[arg(long, value_name = "auto|float32|bfloat16|float16", default_value = "auto", requires = "hf", conflicts_with_all = ["gguf", "peft"])]
    dtype: String,
    /// With --gguf, name the tokenizer's way of splitting text as llama.cpp does, if it is not recognised
    #[arg(long, value_name = "NAME", requires = "gguf", conflicts_with_all = ["adapter_only", "hf", "peft"])]
    pre_tokenizer: Option<String>,
    /// Accept a merged model whose logits differ by at most this, relative to the largest logit
    #[arg(long, value_name = "X", default_value_t = MAX_DIFFERENCE, value_parser = parse_difference, conflicts_with_all = ["peft", "adapter_only"])]
    max_difference: f32,
    /// Replace an existing output
    #[arg(long)]
    overwrite: bool,
    /// Upload the result to this repository on the hub in one commit; a missing repository is created
    #[arg(long, value_name = "OWNER/NAME")]
    push: Option<String>,
    /// With --push, show what would be uploaded, and upload nothing
    #[arg(long, requires = "push")]
    dry_run: bool,
    /// With --push, create the repository as private
    #[arg(long, requires = "push")]
    private: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// Everything that reading and writing can fail with.
pub fn run(args: &Args) -> Result<()> {
    if args.gguf.is_none() && !args.hf && !args.peft {
        return Err(Error::config("no format is named")
            .hint("--gguf f16 (llama.cpp), --hf (Transformers), or --peft (the adapter)"));
    }
    let format = args.gguf.as_deref().map(GgufFormat::parse).transpose()?;
    if args.adapter_only && !matches!(format, Some(GgufFormat::F16 | GgufFormat::F32)) {
        let word = args.gguf.as_deref().unwrap_or_default();
        return Err(Error::config(format!("--gguf {word} --adapter-only: an adapter is written in f16 or f32"))
            .hint("set --gguf f16, or leave out --adapter-only"));
    }
    let dtype = parse_dtype(&args.dtype)?;
    let downloads = Downloads::default();
    let hub = args.push.as_ref().filter(|_| !args.dry_run).map(|_| Hub::from_env(&downloads)).transpose()?;
    if let (Some(hub), Some(repository)) = (&hub, &args.push) {
        // A failing upload is reported before all the work.
        hub.push(repository, &[], args.private, "")?;
    }
    let opened = args.parts.open(&args.config, true)?;
    let name = opened.name();
    let (card, note) = if format.is_some() { (String::new(), String::new()) } else { card(&opened, args.peft)? };
    if format.is_some() && opened.parts.arch.score.is_some() {
        return Err(Error::config("--gguf: llama.cpp has no classification head for these models")
            .hint("export for Transformers (--hf), or the adapter (--peft)"));
    }
    if let Some(format) = format {
        let request = GgufRequest {
            format,
            mmproj: &args.mmproj,
            adapter_only: args.adapter_only,
            output: args.output.as_deref(),
            pre_tokenizer: args.pre_tokenizer.as_deref(),
            max_difference: args.max_difference,
            overwrite: args.overwrite,
        };
        let (text, files) = export_gguf::write(&request, opened, &name)?;
        print(&text)?;
        return push(args, hub.as_ref(), &files);
    }
    let grown = has_new_tokens(&opened);
    let Opened { parts, top, tokenizer, template, config, reads, .. } = opened;
    let mut text = note;
    let form_name = if args.peft { "peft" } else { "hf" };
    let target = output_dir(args.output.as_deref(), config.as_ref(), &format!("export-{form_name}"))?;
    let use_it = card_usage::line(&parts.arch, args.peft, &target.display().to_string(), grown);
    claim(&target, args.overwrite, &reads)?;
    if args.peft {
        let top = top.ok_or_else(export_gguf::no_adapter)?;
        write_peft(&target, args.overwrite, &parts, &top, &tokenizer, template.as_deref(), &card)?;
    } else {
        let model = match top {
            Some(top) => {
                let (checked, model) = check_merge(parts, top, args.max_difference)?;
                text += &checked;
                model.model
            }
            None => parts.merged(None)?,
        };
        let form = FolderSettings {
            dtype,
            shard_bytes: 5_000_000_000,
            tokenizer: &tokenizer,
            template: template.as_deref(),
            card: Some(&card),
            requantization: None,
            overwrite: args.overwrite,
        };
        folder::write(&target, &model, &form)?;
    }
    let _ = writeln!(text, "folder          {}", target.display());
    let _ = writeln!(text, "use it          {use_it}");
    print(&text)?;
    push(args, hub.as_ref(), &files_of(&target)?)
}

fn write_peft(
    target: &Path,
    overwrite: bool,
    parts: &Parts,
    top: &LoadedAdapter,
    tokenizer: &Path,
    template: Option<&str>,
    card: &str,
) -> Result<()> {
    let tensors: Vec<_> =
        top.tensors.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..])).collect();
    let scored = Some(&parts.arch).filter(|arch| arch.score.is_some());
    let stacking = Stacking::NONE;
    let source =
        companions::SourceModel { dir: tokenizer, grown: None, template, own_head: scored, wrapping: None, stacking };
    // The labels are in the model's `config.json`.
    let described = companions::SourceModel { dir: &parts.base, ..source };
    publish_output(&RealDisk, target, overwrite, |staging| {
        peft::stage(staging, &top.config, &tensors)?;
        companions::stage_companions(staging, source)?;
        if scored.is_some() {
            companions::stage_config(staging, described)?;
        }
        staging.write("README.md", |writer| writer.write_all(card.as_bytes()))
    })?;
    Ok(())
}

/// The files of a folder to upload, sorted by name.
fn files_of(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|source| Error::io("read", folder, &source))? {
        let entry = entry.map_err(|source| Error::io("read", folder, &source))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // The manifest is of use only on this machine.
        if name != MANIFEST {
            files.push((name, entry.path()));
        }
    }
    files.sort();
    Ok(files)
}

/// Uploads `files` to the repository of `--push`; with `--dry-run` only lists them.
fn push(args: &Args, hub: Option<&Hub<'_>>, files: &[(String, PathBuf)]) -> Result<()> {
    let Some(repository) = &args.push else { return Ok(()) };
    if let Some(hub) = hub {
        let pushed = hub.push(repository, files, args.private, "Upload by tunesmith")?;
        let Pushed { commit, address, sent } = pushed;
        return print(&format!("pushed          {} to {address}, commit {commit}\n", count(sent, "file")));
    }
    if !crate::config::is_hub_name(repository) {
        return Err(Error::config(format!("--push {repository}: expected owner/name")));
    }
    let mut text = format!("would upload to {repository} (--dry-run: nothing was sent)\n");
    for (name, file) in files {
        let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        let _ = writeln!(text, "  {name}  {}", human_bytes(bytes));
    }
    print(&text)
}

/// Whether the embeddings have rows that the base does not have.
fn has_new_tokens(opened: &Opened) -> bool {
    let rows = opened.parts.arch.vocab_size;
    Arch::from_dir(&opened.parts.base).is_ok_and(|base| base.vocab_size < rows)
}

/// Renders the model card, and what to say about it. Settings are those that the run used, even if the configuration has changed since.
fn card(opened: &Opened, adapter: bool) -> Result<(String, String)> {
    let recorded = opened.top.as_ref().and_then(|top| top.config.base_model_name_or_path.clone());
    let base = recorded.unwrap_or_else(|| opened.parts.base.display().to_string());
    let ran = match &opened.config {
        Some(config) => Some(as_run(config)?.unwrap_or_else(|| config.clone())),
        None => None,
    };
    let usage = card_usage::code(&opened.parts.arch, adapter, &base, has_new_tokens(opened));
    let (results, note) = opened.config.as_ref().map(results).unwrap_or_default();
    let card = ModelCard {
        name: opened.name(),
        base,
        adapter: opened.top.as_ref().filter(|_| adapter).map(|top| top.config.tuning.mode.as_str()),
        task: card_usage::task(&opened.parts.arch),
        data: ran.as_ref().map(data).unwrap_or_default(),
        settings: ran.as_ref().map(settings).unwrap_or_default(),
        results,
        usage,
    };
    Ok((card.render(), note))
}

/// The configuration as the run in its output folder used it, if there was one.
fn as_run(config: &Config) -> Result<Option<Config>> {
    let path = config.train.output_dir.join(output::CONFIG);
    if !files::is_there(&path) {
        return Ok(None);
    }
    Ok(Some(config::load_partial(&path, &[], &[], &[])?.config))
}

fn data(config: &Config) -> Vec<(String, String)> {
    let data = &config.data;
    let list = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    let mut rows = Vec::new();
    for (label, text) in [
        ("training rows", list(&data.train_path)),
        ("validation rows", list(&data.val_path)),
        ("test rows", list(&data.test_path)),
    ] {
        if !text.is_empty() {
            rows.push((label.to_owned(), text));
        }
    }
    if !data.datasets.is_empty() {
        rows.push(("training rows".to_owned(), data.datasets.to_json().to_string()));
    }
    rows
}

/// The settings that are not defaults, without paths of this machine.
fn settings(config: &Config) -> Vec<(String, String)> {
    let default = Config::default();
    let shown = |path: &str| ["model.", "tuning.", "train."].iter().any(|section| path.starts_with(section));
    schema::options()
        .filter(|option| shown(&option.path()) && (option.get)(config) != (option.get)(&default))
        .filter(|option| !["train.output_dir", "model.local_dir", "model.name"].contains(&option.path().as_str()))
        .map(|option| (option.path(), (option.get)(config).to_string()))
        .collect()
}

/// The run's last losses, and the scores of the last `tunesmith eval` if they are of the weights that the run has now; otherwise a note.
fn results(config: &Config) -> (Vec<(String, String)>, String) {
    let dir = &config.train.output_dir;
    let lines = metrics::read(&dir.join(output::METRICS)).unwrap_or_default();
    let mut rows = Vec::new();
    let mut steps = lines.iter().filter_map(|line| if let MetricsLine::Step(step) = line { Some(step) } else { None });
    if let Some(step) = steps.next_back() {
        rows.push(("steps".to_owned(), step.step.to_string()));
        rows.extend(step.loss.map(|loss| ("training loss of the last step".to_owned(), format!("{loss:.4}"))));
    }
    let mut evaluations =
        lines.iter().filter_map(|line| if let MetricsLine::Eval(line) = line { Some(line) } else { None });
    if let Some(line) = evaluations.next_back()
        && let Some(loss) = line.eval_loss
    {
        rows.push((format!("last validation loss ({})", count(line.eval_rows, "row")), format!("{loss:.4}")));
    }
    let scores = files::read_own_text(&dir.join("eval").join("metrics.json"), files::SMALL).unwrap_or_default();
    let scores: serde_json::Value = serde_json::from_str(&scores).unwrap_or_default();
    let tuned = &scores["models"]["tuned"];
    let now = [output::ADAPTER, output::MODEL].iter().find_map(|name| Manifest::fingerprint(&dir.join(name)));
    let mut note = String::new();
    if tuned.is_null() || tuned["manifest"].as_str() == now.as_deref() {
        rows.extend(evaluated(&scores));
    } else {
        let path = dir.join("eval").join("metrics.json");
        note = format!(
            "note: {} is of other weights: the model card has none of its scores. Run `tunesmith eval` again\n",
            path.display()
        );
    }
    (rows, note)
}

/// The scores in a `metrics.json` of `tunesmith eval`, each with the rows that it was measured on.
fn evaluated(metrics: &serde_json::Value) -> Vec<(String, String)> {
    let split = metrics["split"].as_str().unwrap_or("held-out");
    let on = match metrics["rows"].as_u64() {
        Some(rows) => count(grouped(rows), &format!("{split} row")),
        None => format!("{split} rows"),
    };
    let scores = metrics["models"]["tuned"]["scores"].as_object().into_iter().flatten();
    scores
        .filter_map(|(name, score)| Some((format!("{name} ({on})"), format!("{:.4}", score["value"].as_f64()?))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_of_a_card_say_on_how_many_rows_they_were_measured() {
        let mut metrics = serde_json::json!({
            "split": "validation", "rows": 1200, "models": {"tuned": {"scores": {"rouge1": {"value": 0.25}}}}
        });
        let row = |label: &str| vec![(label.to_owned(), "0.2500".to_owned())];
        assert_eq!(evaluated(&metrics), row("rouge1 (1,200 validation rows)"));
        metrics["rows"] = 1.into();
        assert_eq!(evaluated(&metrics), row("rouge1 (1 validation row)"));
        assert_eq!(evaluated(&serde_json::Value::Null), []);
    }
}

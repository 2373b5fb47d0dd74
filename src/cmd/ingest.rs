//! `tunesmith ingest`: converts documents to training rows in JSON Lines, with a report.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Value, json};

use super::args::ConfigArgs;
use super::atomic_lines::{self, AtomicLines};
use super::data::Bar;
use super::download::Downloads;
use super::terminal;
use crate::config::{Config, Dedupe};
use crate::data::documents::{self, DocumentFormat, FoundDocuments};
use crate::data::threads;
use crate::data::{Progress as _, Tokenizer, process};
use crate::error::{Error, Result};
use crate::files::output::check_output_file;
use crate::hub::{self, Part};
use crate::plan::grouped;
use crate::words::count;

/// Documents that are read in parallel and held in memory.
const AT_ONCE: usize = 16;
/// Files of a kind that the printed report names; FILE.report.json names all.
const NAMED: usize = 5;

/// Turn documents into rows: text, Markdown, HTML and DOCX files, and those in folders.
///
/// Each document becomes a row {"text": …, "source": …} with its headings, lists and tables as Markdown. Beside FILE.jsonl comes
/// FILE.report.json. Of the settings `data.dedupe`, `data.dedupe_threshold` and `data.num_proc` are read, and `model.name`, whose
/// tokenizer counts the tokens.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Read these documents and folders; also CONFIG=FILE and KEY=VALUE overrides
    #[arg(value_name = "PATH|KEY=VALUE", required = true)]
    words: Vec<String>,
    /// Write the rows to this file
    #[arg(long, value_name = "FILE.jsonl")]
    out: PathBuf,
    /// Skip broken documents and name them in the report (default: stop at the first)
    #[arg(long)]
    skip_broken: bool,
    /// Replace these files even if `ingest` did not write them, or they were changed since
    #[arg(long)]
    overwrite: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// The text of a document and its counts.
struct Document {
    source: String,
    kind: DocumentFormat,
    characters: u64,
    tokens: u64,
}

/// How many files were skipped, by reason.
#[derive(Default)]
struct LeftOut {
    empty: Vec<String>,
    broken: Vec<(String, String)>,
    repeated: Vec<String>,
}

/// Runs the subcommand.
///
/// # Errors
/// Documents that cannot be read, unless they are left out; the settings; the disk.
pub fn run(args: &Args) -> Result<()> {
    if args.out.extension().is_none_or(|extension| extension != "jsonl") {
        return Err(Error::config(format!("--out {}: expected a name that ends in .jsonl", args.out.display())));
    }
    let (settings, paths): (Vec<String>, Vec<String>) =
        args.words.iter().cloned().partition(|word| word.contains('=') && !Path::new(word).exists());
    if paths.is_empty() {
        return Err(Error::config("no documents are named").hint("tunesmith ingest papers/ --out papers.jsonl"));
    }
    let (resolved, _) = ConfigArgs { words: settings }.load_optional(&[])?;
    let config = resolved.config;
    let existing = atomic_lines::existing(args.overwrite);
    let report_file = args.out.with_extension("report.json");
    check_output_file(&report_file, existing, &[])?;
    let found = documents::find(&paths.iter().map(PathBuf::from).collect::<Vec<_>>())?;
    let inputs: Vec<PathBuf> = found.documents.iter().map(|(path, _)| path.clone()).collect();
    // An unwritable output is reported before all the work.
    let mut staged = AtomicLines::create(&args.out, existing, &inputs)?;
    if found.documents.is_empty() {
        return Err(Error::data(format!("{}: found no documents", paths.join(", ")))
            .hint("expected files that end in .txt, .md, .html or .docx"));
    }
    let tokenizer = tokenizer(&config)?;
    let mut left_out = LeftOut::default();
    let threads = threads(&config)?;
    let mut documents =
        threads.install(|| read(&found, tokenizer.as_ref(), &mut staged, args.skip_broken, &mut left_out))?;
    staged.finish()?;
    if config.data.dedupe != Dedupe::None {
        staged = deduplicate(
            &staged,
            AtomicLines::create(&args.out, existing, &inputs)?,
            &mut documents,
            &config,
            &mut left_out,
        )?;
    }
    if documents.is_empty() {
        return Err(Error::data(format!("none of the {} has any text", count(found.documents.len(), "document"))));
    }
    let mut report = report(&args.out, &found, &documents, tokenizer.is_some(), &left_out);
    atomic_lines::publish_reported(vec![staged], &report_file, &mut report, &[], existing)?;
    if args.json { terminal::print_exact(&format!("{report:#}\n")) } else { terminal::print(&readable(&report)) }
}

/// The tokenizer of `model.name`, if set.
fn tokenizer(config: &Config) -> Result<Option<Tokenizer>> {
    if config.model.name.is_none() && config.model.local_dir.is_none() {
        return Ok(None);
    }
    let dir = hub::model_dir(&config.model, Part::Description, &Downloads::default())?.dir;
    Tokenizer::load_with(&dir, &config.tuning.new_tokens).map(Some)
}

/// Reads the documents in parallel and writes their rows in order.
fn read(
    found: &FoundDocuments,
    tokenizer: Option<&Tokenizer>,
    staged: &mut AtomicLines,
    skip_broken: bool,
    left_out: &mut LeftOut,
) -> Result<Vec<Document>> {
    let size = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
    let bar = Bar::default();
    bar.begin("reading documents", found.documents.iter().map(|(path, _)| size(path)).sum());
    let mut documents = Vec::new();
    for chunk in found.documents.chunks(AT_ONCE) {
        let texts: Vec<Result<(String, u64)>> = chunk
            .par_iter()
            .map(|(path, kind)| {
                let text = documents::read(path, *kind)?;
                // A text is trained with its end token.
                let tokens = match tokenizer.filter(|_| !text.is_empty()) {
                    Some(tokenizer) => {
                        tokenizer.ids(&text).map_err(|error| error.context(path.display()))?.0.len() as u64 + 1
                    }
                    None => 0,
                };
                Ok((text, tokens))
            })
            .collect();
        for ((path, kind), text) in chunk.iter().zip(texts) {
            bar.advance(size(path));
            let source = path.display().to_string();
            match text {
                Ok((text, _)) if text.is_empty() => left_out.empty.push(source),
                Ok((text, tokens)) => {
                    staged.push(&json!({ "text": text, "source": source }).to_string())?;
                    documents.push(Document { source, kind: *kind, characters: text.chars().count() as u64, tokens });
                }
                Err(error) if skip_broken => left_out.broken.push((source, error.message().to_owned())),
                Err(error) => return Err(error),
            }
        }
    }
    bar.end();
    Ok(documents)
}

/// Copies the rows, without duplicates in the sense of `data.dedupe`.
fn deduplicate(
    staged: &AtomicLines,
    mut copy: AtomicLines,
    documents: &mut Vec<Document>,
    config: &Config,
    left_out: &mut LeftOut,
) -> Result<AtomicLines> {
    let rows = u32::try_from(documents.len()).map_err(|_| Error::data("more than 4 billion documents"))?;
    let (stays, _) = process::distinct(staged.path(), rows, config, &Bar::default())?;
    for (line, _) in staged.read()?.zip(&stays).filter(|(_, stays)| **stays) {
        copy.push(&line?)?;
    }
    copy.finish()?;
    let mut stays = stays.into_iter();
    documents.retain(|document| {
        let stays = stays.next() == Some(true);
        if !stays {
            left_out.repeated.push(document.source.clone());
        }
        stays
    });
    Ok(copy)
}

fn report(out: &Path, found: &FoundDocuments, documents: &[Document], counted: bool, left_out: &LeftOut) -> Value {
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    for document in documents {
        *kinds.entry(document.kind.name()).or_default() += 1;
    }
    let sum = |of: fn(&Document) -> u64| documents.iter().map(of).sum::<u64>();
    let broken: Vec<Value> =
        left_out.broken.iter().map(|(source, why)| json!({ "source": source, "why": why })).collect();
    let paths = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
    json!({
        "file": out.display().to_string(),
        "documents": documents.len(),
        "kinds": kinds,
        "characters": sum(|document| document.characters),
        "tokens": counted.then(|| sum(|document| document.tokens)),
        "left_out": {
            "empty": left_out.empty,
            "broken": broken,
            "repeated": left_out.repeated,
            "links_outside": paths(&found.outside),
            "too_deep": paths(&found.too_deep),
            "other_files": found.others,
        },
    })
}

fn readable(report: &Value) -> String {
    let number = |value: &Value| grouped(value.as_u64().unwrap_or_default());
    let mut text = String::new();
    let mut line = |label: &str, value: &str| {
        let _ = writeln!(text, "{label:<16}{value}"); // a String never fails
    };
    let kinds: Vec<String> = report["kinds"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(kind, count)| format!("{} {kind}", number(count)))
        .collect();
    line("documents", &format!("{} ({})", number(&report["documents"]), kinds.join(", ")));
    line("characters", &number(&report["characters"]));
    let tokens = &report["tokens"];
    line(
        "tokens",
        &if tokens.is_null() { "not counted: model.name=… names a tokenizer".to_owned() } else { number(tokens) },
    );
    let left_out = &report["left_out"];
    for (name, label) in [
        ("empty", "without text"),
        ("repeated", "repetitions"),
        ("broken", "broken"),
        ("links_outside", "links elsewhere"),
        ("too_deep", "too deep"),
    ] {
        let Some(files) = left_out[name].as_array().filter(|files| !files.is_empty()) else { continue };
        let named: Vec<String> = files
            .iter()
            .take(NAMED)
            .map(|file| {
                file.as_str().map_or_else(|| file["why"].as_str().unwrap_or_default().to_owned(), str::to_owned)
            })
            .collect();
        let more = if files.len() > NAMED { ", …" } else { "" };
        line(label, &format!("{} left out: {}{more}", files.len(), named.join(", ")));
    }
    if let Some(others) = left_out["other_files"].as_object().filter(|others| !others.is_empty()) {
        let of = |(end, count): (&String, &Value)| {
            format!("{count} {}", if end.is_empty() { "without extension" } else { end })
        };
        let others: Vec<String> = others.iter().map(of).collect();
        line("other files", &format!("{} (not read)", others.join(", ")));
    }
    line("rows", report["file"].as_str().unwrap_or_default());
    text
}

//! `tunesmith process`: writes the rows that a run would train on, in one format, with a report.
use super::args::JobArgs;
use super::atomic_lines::{self, AtomicLines};
use super::data::{Bar, numbers, overview, rendered};
use super::download::Downloads;
use super::terminal;
use crate::config::Config;
use crate::config::arch::Arch;
use crate::data::process::{Part as RowPart, rows};
use crate::data::{self, Counts, Dataset};
use crate::error::{Error, Result};
use crate::files::output::{Existing, check_output_file};
use crate::hub::{self, Part};
use crate::train::vision::{Seer, Sight};
use crate::words::count;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Write the rows that a run would train on: read, cleared, mixed, in one form.
///
/// Beside FILE.jsonl (training rows) come FILE.validation.jsonl and FILE.test.jsonl where there are such rows, and the
/// data report as FILE.report.json and FILE.report.md.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Write the training rows to this file
    #[arg(long, value_name = "FILE.jsonl")]
    out: PathBuf,
    /// Begin every chat's system message with this text
    #[arg(long, value_name = "TEXT")]
    style: Option<String>,
    /// Write each row as the model sees it: `{text, input_ids, labels}`, or `{text, input_ids, label}` for classification and
    /// regression
    #[arg(long, conflicts_with = "style")]
    render: bool,
    /// Replace these files even if `process` did not write them, or they were changed since
    #[arg(long)]
    overwrite: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of `JobArgs::load` and [`data::load`]; [`crate::Kind::Io`] when a file cannot be written.
pub fn run(args: &Args) -> Result<()> {
    if args.out.extension().is_none_or(|extension| extension != "jsonl") {
        return Err(Error::config(format!("--out {}: expected a name that ends in .jsonl", args.out.display())));
    }
    let resolved = args.job.load(&[])?;
    let (inputs, existing) = (data::named_inputs(&resolved.config), atomic_lines::existing(args.overwrite));
    let [json_report, text_report] = ["report.json", "report.md"].map(|end| args.out.with_extension(end));
    for target in RowPart::ALL.map(|part| target(&args.out, part)).iter().chain([&json_report, &text_report]) {
        check_output_file(target, existing, &inputs)?;
    }
    // This also checks that it can be written.
    drop(AtomicLines::create(&args.out, existing, &inputs)?);
    let downloads = Downloads::default();
    let model_dir = hub::model_dir(&resolved.config.model, Part::Description, &downloads)?.dir;
    let mut arch = Arch::from_dir(&model_dir)?;
    let (mut config, note) = resolved.for_model(&arch)?;
    if let Some(note) = note {
        terminal::print_note(&note);
    }
    hub::fetch_paths(&mut config.data, &downloads)?;
    data::add_new_tokens(&mut arch, &model_dir, &config.tuning.new_tokens)?;
    let seer = Seer { dir: &model_dir, tokenizer: &model_dir, hidden_size: arch.hidden_size };
    let sight = Sight::of_rows(&config, seer, Part::Description, &downloads)?;
    let pictures = sight.as_ref().map(Sight::pictures);
    let bar = Bar::default();
    let data = data::load(&config, &model_dir, arch.text_ids(), &bar, pictures.as_ref())?;
    let mut written = Vec::new();
    for part in RowPart::ALL {
        written.extend(write(&data, &config, part, args, existing, &inputs, &bar)?);
    }
    let files: serde_json::Map<String, Value> =
        written.iter().map(|written| (written.target().display().to_string(), written.len().into())).collect();
    let mut report = numbers(&data);
    report["written"] = files.clone().into();
    if let Some(style) = &args.style {
        report["style"] = style.as_str().into();
    }
    // Names of images are written as the rows have them.
    if data.train.has_pictures() && config.data.image_dir.is_none() {
        terminal::print_note(
            "names of images stay relative to the folder of the first training file: set data.image_dir to it for the rows written here",
        );
    }
    let readable = readable(&data, &files, args.style.as_deref());
    atomic_lines::publish_reported(written, &json_report, &mut report, &[(&text_report, &readable)], existing)?;
    if args.json { terminal::print_exact(&format!("{report:#}\n")) } else { terminal::print(&readable) }
}

/// The file of a part's rows.
fn target(out: &Path, part: RowPart) -> PathBuf {
    if part == RowPart::Train { out.to_owned() } else { out.with_extension(format!("{}.jsonl", part.name())) }
}

/// Writes the rows of a part to a temporary file; `None` if the data set has no such part.
fn write(
    data: &Dataset,
    config: &Config,
    part: RowPart,
    args: &Args,
    existing: Existing,
    inputs: &[PathBuf],
    bar: &Bar,
) -> Result<Option<AtomicLines>> {
    let split = match part {
        RowPart::Train => Some(&data.train),
        RowPart::Validation => data.validation.as_ref(),
        RowPart::Test => data.test.as_ref(),
    };
    let Some(split) = split else { return Ok(None) };
    let mut written = AtomicLines::create(&target(&args.out, part), existing, inputs)?;
    match &args.style {
        _ if args.render => {
            for index in 0..split.len() {
                for row in rendered(data, split, index)? {
                    written.push(&row.to_string())?;
                }
            }
        }
        Some(style) => {
            rows(data, config, part, bar, &mut |row| written.push(&styled(row, style)?))?;
        }
        None => {
            rows(data, config, part, bar, &mut |row| written.push(row))?;
        }
    }
    written.finish()?;
    Ok(Some(written))
}

/// A row with `style` at the beginning of its system message, or as its system message.
fn styled(row: &str, style: &str) -> Result<String> {
    let mut row: Value = serde_json::from_str(row).map_err(|error| Error::data(error.to_string()).caused_by(error))?;
    let form: Vec<&str> = row.as_object().into_iter().flat_map(|row| row.keys().map(String::as_str)).collect();
    let refused = || Error::config(format!("--style: rows of {{{}}} have no system message", form.join(", ")));
    if !row["messages"].is_array() {
        return Err(refused().hint("it needs rows with messages; leave it out, or convert the rows to messages"));
    }
    let Some(messages) = row["messages"].as_array_mut() else { return Ok(row.to_string()) };
    match messages.first_mut().filter(|first| first["role"] == "system") {
        None => messages.insert(0, json!({ "role": "system", "content": style })),
        Some(system) => match &mut system["content"] {
            Value::Array(parts) => parts.insert(0, json!({ "type": "text", "text": format!("{style}\n\n") })),
            Value::String(text) if !text.trim().is_empty() => *text = format!("{style}\n\n{text}"),
            content => *content = style.into(),
        },
    }
    Ok(row.to_string())
}

/// The counts in the report's table.
type Count = fn(&Counts) -> u64;

/// The report for people, in Markdown.
fn readable(data: &Dataset, files: &serde_json::Map<String, serde_json::Value>, style: Option<&str>) -> String {
    let mut text = String::from("# Data report\n\n");
    for (file, rows) in files {
        let _ = writeln!(text, "- `{file}`: {}", count(rows, "row"));
    }
    if let Some(style) = style {
        let _ = writeln!(text, "- every system message begins with: {}", json!(style));
    }
    let _ = writeln!(text, "\n```\n{}```\n", overview(data, false));
    let report = &data.report;
    let is_split = [(&data.validation, &report.validation), (&data.test, &report.test)]
        .iter()
        .any(|(rows, counts)| rows.is_some() && counts.is_none());
    let train = if is_split { "train, before the split" } else { "train" };
    let sets =
        [(train, Some(&report.train)), ("validation", report.validation.as_ref()), ("test", report.test.as_ref())];
    text.push_str("| rows | ");
    let sets: Vec<(&str, &Counts)> = sets.into_iter().filter_map(|(name, counts)| Some((name, counts?))).collect();
    let _ = writeln!(text, "{} |", sets.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" | "));
    let _ = writeln!(text, "|---|{}", "---|".repeat(sets.len()));
    let lines: [(&str, Count); 10] = [
        ("read", |counts| counts.rows),
        ("with tokens and labels", |counts| counts.kept),
        ("cut to the longest length", |counts| counts.truncated),
        ("left out: too long", |counts| counts.too_long),
        ("left out: below data.min_length", |counts| counts.below_min_length),
        ("left out: above data.max_length", |counts| counts.above_max_length),
        ("left out: no label", |counts| counts.unlabeled),
        ("left out: repeats an earlier row", |counts| counts.duplicates.rows),
        ("left out: nearly repeats an earlier row", |counts| counts.near_duplicates.rows),
        ("also in the evaluation rows", |counts| counts.contaminated.rows),
    ];
    for (what, of) in lines {
        let cells: Vec<String> = sets.iter().map(|(_, counts)| of(counts).to_string()).collect();
        let _ = writeln!(text, "| {what} | {} |", cells.join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_style_begins_the_system_message() {
        let system = |row: &str| {
            let row: Value = serde_json::from_str(&styled(row, "Be brief.").unwrap()).unwrap();
            assert_eq!(row["messages"][0]["role"], "system");
            (row["messages"][0]["content"].clone(), row["messages"].as_array().unwrap().len())
        };
        let user = r#"{"role": "user", "content": "hi"}"#;
        assert_eq!(system(&format!(r#"{{"messages": [{user}]}}"#)), ("Be brief.".into(), 2));
        let with = |content: &str| format!(r#"{{"messages": [{{"role": "system", "content": {content}}}, {user}]}}"#);
        assert_eq!(system(&with(r#""You book.""#)), ("Be brief.\n\nYou book.".into(), 2));
        assert_eq!(system(&with(r#""""#)), ("Be brief.".into(), 2));
        assert_eq!(system(&with(r#"[{"type": "text", "text": "x"}]"#)).0[0]["text"], "Be brief.\n\n");
        let error = styled(r#"{"text": "x"}"#, "y").unwrap_err();
        assert!(error.message().contains("rows of {text} have no system message"), "{error}");
    }
}

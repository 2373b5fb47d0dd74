//! `tunesmith config`: shows each effective setting with its source, the JSON schema, or the documentation of all settings.
use super::args::JobArgs;
use super::terminal::{self, Style};
use crate::config::foreign::{self, CHANGED, Foreign, KeyOutcome, NOT_NEEDED, NotNeeded, Outcome};
use crate::config::{Resolved, Setting, Source, docs};
use crate::error::{Error, Result};
use std::fmt::Write;

/// Show every setting of a run and where it comes from
#[derive(Debug, clap::Args)]
#[allow(clippy::struct_excessive_bools)] // flags
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Print a JSON list of {key, value, source}
    #[arg(long, conflicts_with_all = ["schema", "docs"])]
    json: bool,
    /// Print the JSON Schema of configuration files, for editors
    #[arg(long, conflicts_with_all = ["words", "docs"])]
    schema: bool,
    /// Print the reference of all keys as Markdown
    #[arg(long, conflicts_with = "words")]
    docs: bool,
    /// Print the reference of all commands and flags as Markdown
    #[arg(long, conflicts_with_all = ["words", "docs", "schema"])]
    commands: bool,
    /// Print how keys of DeepSpeed, Accelerate and FSDP are read, as Markdown
    #[arg(long, conflicts_with_all = ["words", "docs", "schema", "commands"])]
    foreign: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of `JobArgs::load_partial`.
pub fn run(args: &Args) -> Result<()> {
    if args.schema {
        return terminal::print_reference(&docs::schema());
    }
    if args.docs {
        return terminal::print_reference(&docs::markdown());
    }
    if args.commands {
        return terminal::print_reference(&super::reference());
    }
    if args.foreign {
        return terminal::print_reference(&foreign::docs::markdown());
    }
    let resolved = args.job.load_partial(&[])?;
    // The table lists these keys.
    let shown = |note: &&String| args.json || ![NOT_NEEDED, CHANGED].iter().any(|start| note.starts_with(start));
    resolved.notes.iter().filter(shown).for_each(|note| terminal::print_note(note));
    if let Some(number) = args.job.config.num_gpus().filter(|number| number != "1") {
        terminal::print_note(&format!("NUM_GPUS={number}: `tunesmith launch -- train CONFIG` starts as many ranks"));
    }
    if args.json {
        terminal::print_exact(&json(&resolved)?)?;
    } else {
        terminal::print(&table(&resolved, terminal::stdout_colour()))?;
    }
    if let Err(missing) = resolved.check_runnable() {
        terminal::print_note(&format!("this configuration cannot be run: {}", missing.message()));
    }
    Ok(())
}

/// Settings, then the keys that are not needed.
fn json(resolved: &Resolved) -> Result<String> {
    let value = |one: serde_json::Result<serde_json::Value>| {
        one.map_err(|error| Error::config("cannot be written as JSON").caused_by(error))
    };
    let settings = resolved.settings.iter().map(|setting| value(serde_json::to_value(setting)));
    let others = resolved.not_needed.iter().map(|one| value(serde_json::to_value(one)));
    let all: Vec<serde_json::Value> = settings.chain(others).collect::<Result<_>>()?;
    Ok(format!("{:#}\n", serde_json::json!(all)))
}

/// The settings by section, aligned; values that are not defaults stand out.
fn table(resolved: &Resolved, colour: bool) -> String {
    let value = |setting: &Setting| match &setting.value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let width = |text: fn(&Setting) -> usize| resolved.settings.iter().map(text).max().unwrap_or(0);
    let keys = width(|setting| setting.key.len());
    let values = resolved.settings.iter().map(|setting| value(setting).chars().count()).max().unwrap_or(0).min(24);
    let mut out = String::new();
    let mut section = "";
    for setting in &resolved.settings {
        let (this, _) = setting.key.rsplit_once('.').unwrap_or(("", ""));
        if this != section && !section.is_empty() {
            out.push('\n');
        }
        section = this;
        let default = setting.source == Source::Default;
        let key = format!("{:keys$}", setting.key);
        let shown = format!("{:values$}", value(setting));
        let source = setting.source.to_string();
        let line = if default {
            Style::Dim.paint(&format!("{key}  {shown}  {source}"), colour)
        } else {
            format!("{key}  {}  {}", Style::Bold.paint(&shown, colour), Style::Green.paint(&source, colour))
        };
        let _ = writeln!(out, "{line}");
    }
    out + &not_needed(&resolved.not_needed, keys, values, colour) + &outcomes(&resolved.foreign, colour)
}

/// Keys of other toolkits that have no meaning here, in columns `keys` and `values` characters wide.
fn not_needed(list: &[NotNeeded], keys: usize, values: usize, colour: bool) -> String {
    let mut out = String::new();
    for one in list {
        if out.is_empty() {
            out.push('\n');
        }
        let value = match &one.value {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let line = format!("{:keys$}  {value:values$}  {}  {NOT_NEEDED}{}", one.key, one.source, one.note);
        let _ = writeln!(out, "{}", Style::Dim.paint(&line, colour));
    }
    out
}

/// The outcome of each key of foreign files, if there are any.
fn outcomes(foreign: &Foreign, colour: bool) -> String {
    let width = |text: &dyn Fn(&KeyOutcome) -> String| {
        foreign.outcomes.iter().map(|one| text(one).chars().count()).max().unwrap_or(0)
    };
    let (names, values) = (width(&|one| one.source.to_string()), width(&|one| one.value.clone()).min(30));
    let words = width(&|one| one.outcome.name().to_owned());
    let mut out = String::new();
    for one in &foreign.outcomes {
        if out.is_empty() {
            out.push('\n');
        }
        let (name, value) = (one.source.to_string(), &one.value);
        let word = format!("{:words$}", one.outcome.name());
        let word = match one.outcome {
            Outcome::Taken | Outcome::Changed | Outcome::Default | Outcome::Auto => Style::Green.paint(&word, colour),
            Outcome::Same => Style::Dim.paint(&word, colour),
            Outcome::NotNeeded | Outcome::Overridden | Outcome::Unsupported => Style::Bold.paint(&word, colour),
        };
        let _ = writeln!(out, "{name:names$}  {value:values$}  {word}  {}", one.text());
    }
    out
}

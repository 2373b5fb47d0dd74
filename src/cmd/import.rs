//! `tunesmith import`: converts another toolkit's configuration, and reports the outcome of each key.
use super::atomic_lines;
use super::terminal;
use crate::error::{Error, Result};
use crate::files::output::Existing;
use crate::import::{self, Imported, Outcome, Toolkit};
use clap::ValueEnum;
use std::fmt::Write as _;
use std::path::PathBuf;

/// The toolkits, as words of the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum From {
    /// Axolotl
    Axolotl,
    /// LLaMA-Factory
    LlamaFactory,
    /// ms-swift
    MsSwift,
    /// SFT-Play
    SftPlay,
    /// TRL
    Trl,
}

impl From {
    const fn toolkit(self) -> Toolkit {
        match self {
            Self::Axolotl => Toolkit::Axolotl,
            Self::LlamaFactory => Toolkit::LlamaFactory,
            Self::MsSwift => Toolkit::MsSwift,
            Self::SftPlay => Toolkit::SftPlay,
            Self::Trl => Toolkit::Trl,
        }
    }
}

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Convert this YAML file
    file: PathBuf,
    /// Name the toolkit (default: recognised by the file's keys)
    #[arg(long)]
    from: Option<From>,
    /// Write the configuration to this file (default: standard output)
    #[arg(long)]
    out: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long, requires = "out")]
    force: bool,
}

/// Runs the command.
///
/// # Errors
/// [`crate::Kind::Config`]: what [`import::read`] refuses; or the file was written, and this version refuses settings in it.
pub fn run(args: &Args) -> Result<()> {
    let made = import::read(&args.file, args.from.map(From::toolkit))?;
    let report = report(&made);
    if let Some(path) = &args.out {
        let there = path.exists() && !args.force;
        let written = atomic_lines::write(path, Existing::unless("--force", args.force), &made.yaml);
        written.map_err(|error| if there { error.with_kind(crate::Kind::Io) } else { error })?;
        terminal::print(&report)?;
        terminal::print(&format!("\nwritten: {}\n", path.display()))?;
    } else {
        terminal::print_exact(&made.yaml)?;
        terminal::print_text(&report);
    }
    if made.refused.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = made.refused.iter().map(|one| one.setting.as_str()).collect();
    let error = Error::config(format!("this version refuses what the file says: {}", names.join("; ")));
    Err(error.hint("the file is written; it loads once these lines are changed or removed"))
}

/// Reports the outcome of each key.
fn report(made: &Imported) -> String {
    let mut out = format!("a configuration of {}\n", made.toolkit.title());
    let parts = [
        (Outcome::Taken, "mapped"),
        (Outcome::Changed, "changed"),
        (Outcome::Default, "written out, because its default is not ours"),
        (Outcome::NotNeeded, "not needed"),
        (Outcome::Unsupported, "could not"),
    ];
    for (outcome, title) in parts {
        let keys: Vec<_> = made.outcomes.iter().filter(|one| one.outcome == outcome).collect();
        if keys.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n{title} ({})", keys.len());
        for one in keys {
            let (given, setting) = (one.given(), &one.setting);
            let arrow = if given.is_empty() || setting.is_empty() { "" } else { "  ->  " };
            let why = if one.why.is_empty() { String::new() } else { format!("   ({})", one.why) };
            let _ = writeln!(out, "  {given}{arrow}{setting}{why}");
        }
    }
    if !made.refused.is_empty() {
        let _ = writeln!(out, "\nwritten, but this version refuses it ({})", made.refused.len());
        for one in &made.refused {
            let _ = writeln!(out, "  {}   ({})", one.setting, one.why);
        }
    }
    out
}

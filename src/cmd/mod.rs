//! The subcommands, one file each. Only this layer prints.
//!
//! A subcommand is a module with `struct Args` ([`clap::Args`]) and `fn run(args: &Args) -> Result<()>`, a variant of
//! `Command` and a line in `Command::run`.
mod args;
mod atomic_lines;
mod bar;
pub mod bench;
pub mod chat;
mod chat_input;
mod classify;
mod columns;
pub mod config;
pub mod data;
pub mod devices;
pub mod doctor;
pub mod download;
pub mod eval;
pub mod export;
pub mod failure;
mod generation_flags;
mod generations;
pub mod gpu_info;
mod guard;
pub mod import;
pub mod infer;
pub mod ingest;
mod interrupt;
pub mod launch;
mod locate;
pub mod memory_check;
pub mod merge;
mod model_session;
pub mod models;
mod parts_args;
mod paste;
pub mod plan;
mod plan_report;
pub mod process;
pub mod provenance;
mod rank_processes;
mod reference;
mod scaling;
pub mod setup_accelerate;
mod shell_quote;
mod streams;
pub mod terminal;
pub mod train;
mod train_console;
mod trained;

use crate::error::{Error, Result};
use clap::{CommandFactory as _, Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;

/// Fine-tuning of large language models: one program, one YAML file, one command.
#[derive(Debug, Parser)]
#[command(name = "tunesmith", version, max_term_width = 100, arg_required_else_help = true, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0 done, 2 configuration, 3 data, 4 model, 5 checkpoint, 6 files, 7 peer, 8 NaN or infinity,
  9 memory, 75 stopped by a signal after saving: run again with --resume";

/// What the program can do.
#[derive(Debug, Subcommand)]
enum Command {
    /// Show each effective setting and where it comes from
    Config(config::Args),
    /// Fine-tune a model
    Train(train::Args),
    /// Train with several ranks: start them on this machine, show their output, end them together
    Launch(launch::Args),
    /// Show what the data becomes: counts, lengths, and rows as the model sees them
    Data(data::Args),
    /// Fetch a model or a data set of the hub into the cache, or into a folder
    Download(download::Args),
    /// Turn a configuration of Axolotl, LLaMA-Factory or SFT-Play into one of ours
    Import(import::Args),
    /// Measure what a model answers, beside what its base answers
    Eval(eval::Args),
    /// Write a model or an adapter for where it will serve: GGUF, Hugging Face, PEFT, with a model card
    Export(export::Args),
    /// Merge an adapter into its base, or several adapters into one
    Merge(merge::Args),
    /// List the model families that are supported, or describe a model folder
    Models(models::Args),
    /// Turn documents into rows: text, Markdown, HTML and DOCX files
    Ingest(ingest::Args),
    /// Write the rows that a run would train on, in one form, with a report
    Process(process::Args),
    /// Show the memory that a run needs on each rank, by strategy, what fits, and how long it takes
    Plan(plan::Args),
    /// Answer a prompt, or a file of them
    Infer(infer::Args),
    /// Talk with a model
    Chat(chat::Args),
    /// Measure training speed and memory of a model shape on this machine
    Bench(bench::Args),
    /// Say what this machine has and lacks for training
    Doctor(doctor::Args),
    /// Show GPUs, driver and links, and the processor's cores, memory and measured rates
    GpuInfo(gpu_info::Args),
    /// Write a configuration of Accelerate for this machine
    SetupAccelerate(setup_accelerate::Args),
    /// Show memory in use on each device, and with a configuration what its largest pass holds
    MemoryCheck(memory_check::Args),
}

impl Command {
    fn run(&self) -> Result<()> {
        match self {
            Self::Config(args) => config::run(args),
            Self::Train(args) => train::run(args),
            Self::Launch(args) => launch::run(args),
            Self::Data(args) => data::run(args),
            Self::Process(args) => process::run(args),
            Self::Download(args) => download::run(args),
            Self::Import(args) => import::run(args),
            Self::Eval(args) => eval::run(args),
            Self::Export(args) => export::run(args),
            Self::Merge(args) => merge::run(args),
            Self::Models(args) => models::run(args),
            Self::Plan(args) => plan::run(args),
            Self::Ingest(args) => ingest::run(args),
            Self::Infer(args) => infer::run(args),
            Self::Chat(args) => chat::run(args),
            Self::Bench(args) => bench::run(args),
            Self::Doctor(args) => doctor::run(args),
            Self::GpuInfo(args) => gpu_info::run(args),
            Self::SetupAccelerate(args) => setup_accelerate::run(args),
            Self::MemoryCheck(args) => memory_check::run(args),
        }
    }
}

/// `docs/commands.md`.
pub fn reference() -> String {
    reference::markdown(&Cli::command())
}

/// Runs the program on its arguments (the first is the program's name).
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    terminal::clean_panics();
    let mut args: Vec<OsString> = args.into_iter().collect();
    // `help` takes names of subcommands only, and `help --help` is a question for the same.
    if args.get(1).is_some_and(|word| word == "help") {
        args.retain(|word| word != "--help" && word != "-h");
    }
    guard::guarded(move || finish(command(args)))
}

/// Reads the arguments, and does what they say.
fn command(args: Vec<OsString>) -> Result<ExitCode> {
    let usage = match Cli::try_parse_from(args) {
        Ok(cli) => return cli.command.run().map(|()| ExitCode::SUCCESS),
        Err(usage) => usage,
    };
    // Help and version are asked for and go to stdout; a usage error, which repeats what was typed, goes to stderr.
    if usage.use_stderr() {
        terminal::print_text(&usage.render().to_string());
        return Ok(ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(2)));
    }
    match usage.print() {
        Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("write", "standard output", &source))
        }
        // Nothing is left to print: this tells whether there was anything to print to.
        _ => terminal::print("").map(|()| ExitCode::SUCCESS),
    }
}

fn finish(done: Result<ExitCode>) -> ExitCode {
    match done {
        Ok(code) => code,
        Err(error) => {
            if !failure::report(&error) {
                terminal::print_error(&error);
            }
            ExitCode::from(error.kind().exit_code())
        }
    }
}

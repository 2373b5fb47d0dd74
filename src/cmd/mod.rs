//! The subcommands, one file each. Only this layer prints.
//!
//! A subcommand is a module with `struct Args` ([`clap::Args`]) and `fn run(args: &Args) -> Result<()>`, a variant of
//! `Command` and a line in `Command::run`.
mod args;
mod atomic_lines;
mod bar;
mod bench;
mod card_usage;
mod chat;
mod chat_input;
mod classify;
mod columns;
mod config;
mod data;
pub mod devices;
mod doctor;
mod download;
mod encode;
mod eval;
mod export;
mod export_gguf;
mod failure;
mod generation_flags;
mod generations;
mod gpu_info;
mod guard;
mod import;
mod infer;
mod ingest;
mod interrupt;
mod launch;
mod locate;
mod memory_check;
mod merge;
mod model_session;
pub mod models;
mod models_adapters;
mod models_memory;
mod numbers;
mod parts_args;
mod paste;
mod plan;
mod plan_report;
mod process;
mod provenance;
mod rank_processes;
mod reference;
mod run_plan;
mod scaling;
mod setting_flag;
mod setup_accelerate;
mod shell_quote;
mod streams;
mod terminal;
mod train;
mod train_console;
mod trained;

use crate::device;
use crate::error::{Error, Result};
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;

/// Fine-tune large language models: one program, one YAML file, one command.
#[derive(Debug, Parser)]
#[command(name = "tunesmith", version, max_term_width = 100, arg_required_else_help = true, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0 done, 2 configuration, 3 data, 4 model, 5 checkpoint, 6 files, 7 peer, 8 NaN or infinity,
  9 memory, 10 GPU, 75 stopped by a signal after saving: run again with --resume";

#[derive(Debug, Subcommand)]
enum Command {
    /// Show every setting of a run and where it comes from
    Config(config::Args),
    /// Fine-tune a model
    Train(train::Args),
    /// Fine-tune a model with several ranks on this machine
    Launch(launch::Args),
    /// Run a frozen image encoder over the images of a run, ahead of training
    Encode(encode::Args),
    /// Show the training data: counts, lengths, and rows as the model sees them
    Data(data::Args),
    /// Download a model or a data set from the Hugging Face Hub
    Download(download::Args),
    /// Convert a configuration of Axolotl, LLaMA-Factory, ms-swift, SFT-Play or TRL
    Import(import::Args),
    /// Measure a model on held-out rows, next to its base
    Eval(eval::Args),
    /// Export a model to GGUF, Transformers or PEFT
    Export(export::Args),
    /// Merge an adapter into its base model, or blend adapters into one
    Merge(merge::Args),
    /// List the supported model families, or describe a model folder
    Models(models::Args),
    /// Convert text, Markdown, HTML and DOCX files to rows
    Ingest(ingest::Args),
    /// Write the rows that a run would train on, with a report
    Process(process::Args),
    /// Predict the memory and time of a run
    Plan(plan::Args),
    /// Answer a prompt or a file of prompts
    Infer(infer::Args),
    /// Chat with a model in the terminal
    Chat(chat::Args),
    /// Measure training speed and memory on this machine
    Bench(bench::Args),
    /// Check this machine for training
    Doctor(doctor::Args),
    /// Show GPUs and their links, and the processor's cores, memory and speed
    GpuInfo(gpu_info::Args),
    /// Write an Accelerate configuration for this machine
    SetupAccelerate(setup_accelerate::Args),
    /// Show memory in use, or measure the largest pass of a configuration
    MemoryCheck(memory_check::Args),
}

impl Command {
    fn run(&self) -> Result<()> {
        match self {
            Self::Config(args) => config::run(args),
            Self::Train(args) => train::run(args),
            Self::Launch(args) => launch::run(args),
            Self::Encode(args) => encode::run(args),
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

/// The text of `docs/commands.md`, in Markdown.
pub fn reference() -> String {
    reference::markdown(&Cli::command())
}

/// Runs the program on its arguments (the first is the program's name).
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    crate::memory::share_arena_under_limit();
    crate::memory::return_large_blocks();
    terminal::clean_panics();
    let mut args: Vec<OsString> = args.into_iter().collect();
    // `help` takes names of subcommands only, and `help --help` is a question for the same.
    if args.get(1).is_some_and(|word| word == "help") {
        args.retain(|word| word != "--help" && word != "-h");
    }
    // A GPU may fail anywhere: see `device::memory::guarded`.
    guard::guarded(move || finish(device::memory::guarded(|| command(args))))
}

/// Reads the arguments.
fn parse(args: Vec<OsString>) -> std::result::Result<Cli, clap::Error> {
    let mut command = numbers::taking_negative(Cli::command());
    let matches = command.try_get_matches_from_mut(args)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Reads the arguments, and does what they say.
fn command(args: Vec<OsString>) -> Result<ExitCode> {
    let mut usage = match parse(args) {
        Ok(cli) => {
            crate::threads::check_environment()?;
            return cli.command.run().map(|()| ExitCode::SUCCESS);
        }
        Err(usage) => usage,
    };
    // Help and version are asked for and go to stdout; a usage error, which repeats what was typed, goes to stderr.
    if usage.use_stderr() {
        let hint = setting_flag::hint(&mut usage).unwrap_or_default();
        terminal::print_text(&(usage.render().to_string() + &hint));
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

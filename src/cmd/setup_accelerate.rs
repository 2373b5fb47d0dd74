//! `tunesmith setup-accelerate`: writes a configuration of Accelerate for this machine; asks only in a terminal.
use std::fmt::Write as _;
use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use super::numbers::whole;
use super::{atomic_lines, devices, terminal};
use crate::config::{Range, foreign};
use crate::error::{Error, Result};
use crate::files::output::{Existing, check_output_file};
use crate::plan::platform::{self, Host};
use crate::telemetry::machine;
use crate::words::count;

/// Write an Accelerate configuration for this machine
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write to this file
    #[arg(long, default_value = "configs/accelerate/default.yaml", value_name = "FILE")]
    out: PathBuf,
    /// Use the defaults without asking
    #[arg(long)]
    yes: bool,
    /// Replace an existing file
    #[arg(long)]
    overwrite: bool,
    /// Start this many ranks on this machine (default: by its cores)
    #[arg(long, value_parser = whole::<u64>(Range::within(1.0, 4096.0)))]
    num_processes: Option<u64>,
    /// Share the model among ranks in this way (default: `ddp`)
    #[arg(long, value_parser = STRATEGIES)]
    strategy: Option<String>,
    /// Compute in this precision (default: `no`)
    #[arg(long, value_parser = PRECISIONS)]
    mixed_precision: Option<String>,
}

const STRATEGIES: [&str; 5] = ["ddp", "zero1", "zero2", "zero3", "fsdp"];
const PRECISIONS: [&str; 3] = ["no", "bf16", "fp16"];

struct Answers {
    processes: u64,
    strategy: String,
    precision: String,
}

/// Runs the subcommand.
///
/// # Errors
/// [`crate::Kind::Config`]: the file is there already; [`crate::Kind::Io`].
pub fn run(args: &Args) -> Result<()> {
    let existing = Existing::unless("--overwrite", args.overwrite);
    check_output_file(&args.out, existing, &[])?;
    let host = machine::host();
    let asks = !args.yes && std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    let question = |text: &str, fallback: String, fits: &dyn Fn(&str) -> bool| {
        if asks { ask(text, &fallback, fits) } else { Ok(fallback) }
    };
    let found = devices::several(host.cores) as u64;
    let possible = |text: &str| text.parse().is_ok_and(|count: u64| (1..=4096).contains(&count));
    let processes = if let Some(processes) = args.num_processes {
        processes
    } else {
        let text = question("How many ranks on this machine?", found.to_string(), &possible)?;
        text.parse().unwrap_or(found)
    };
    let strategy = match &args.strategy {
        Some(strategy) => strategy.clone(),
        None if processes == 1 => "ddp".to_owned(),
        None => question("How do they share the model? (ddp, zero1, zero2, zero3, fsdp)", "ddp".into(), &|text| {
            STRATEGIES.contains(&text)
        })?,
    };
    let precision = match &args.mixed_precision {
        Some(precision) => precision.clone(),
        None => question("Which precision do they compute in? (no, bf16, fp16)", "no".into(), &|text| {
            PRECISIONS.contains(&text)
        })?,
    };
    let answers = Answers { processes, strategy, precision };
    let text = file(&host, &answers);
    foreign::check(foreign::Format::Accelerate, Path::new("what is written"), &text)?;
    atomic_lines::write(&args.out, existing, &text)?;
    let ranks = processes as usize;
    terminal::print(&format!(
        "wrote {}: {} on this machine, {}\n{}\nuse it with ACCELERATE_CONFIG_FILE={}\n",
        args.out.display(),
        count(processes, "rank"),
        answers.strategy,
        platform::summary(
            &host,
            if host.cards.is_empty() { "the CPU" } else { "what model.device says" },
            platform::threads(host.cores, ranks)
        ),
        args.out.display()
    ))
}

/// Asks until an answer fits. An empty answer or the end of the input gives `fallback`.
fn ask(text: &str, fallback: &str, fits: &dyn Fn(&str) -> bool) -> Result<String> {
    loop {
        let mut out = std::io::stderr().lock();
        let shown = write!(out, "{text} [{fallback}] ").and_then(|()| out.flush());
        shown.map_err(|error| Error::io("write to", "the terminal", &error))?;
        let mut line = String::new();
        let read = std::io::stdin().lock().read_line(&mut line);
        let read = read.map_err(|error| Error::io("read from", "the terminal", &error))?;
        match line.trim() {
            "" => return Ok(fallback.to_owned()),
            answer if fits(answer) => return Ok(answer.to_owned()),
            _ if read == 0 => return Ok(fallback.to_owned()),
            answer => terminal::print_note(&format!("{answer:?} is not one of the answers")),
        }
    }
}

fn file(host: &Host, answers: &Answers) -> String {
    let Answers { processes, strategy, precision } = answers;
    let cards: Vec<&str> = host.cards.iter().map(|card| card.name.as_str()).collect();
    let cards = if cards.is_empty() { "no GPU".to_owned() } else { cards.join(", ") };
    let kind = match strategy.as_str() {
        _ if *processes == 1 => "\"NO\"",
        "ddp" if host.cards.is_empty() => "MULTI_CPU",
        "ddp" => "MULTI_GPU",
        "fsdp" => "FSDP",
        _ => "DEEPSPEED",
    };
    let mut text = format!(
        "# Accelerate, written by `tunesmith setup-accelerate` for {}, {}, {cards}.\n\
         compute_environment: LOCAL_MACHINE\n\
         distributed_type: {kind}\n\
         num_machines: 1\n\
         num_processes: {processes}\n\
         machine_rank: 0\n\
         mixed_precision: \"{precision}\"\n\
         use_cpu: {}\n",
        host.system.name(),
        count(host.cores, "core"),
        if host.cards.is_empty() { "true" } else { "false # model.device says where: cpu (the default), cuda or auto" },
    );
    if kind == "FSDP" {
        text += "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n";
    }
    if kind == "DEEPSPEED" {
        let _ = writeln!(text, "deepspeed_config:\n  zero_stage: {}", strategy.trim_start_matches("zero"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Node;
    use crate::plan::platform::{Card, System};

    #[test]
    fn what_is_written_is_read() {
        let card = Card { name: "RTX 4090".to_owned(), capability: Some((8, 9)) };
        for cards in [Vec::new(), vec![card.clone(), card]] {
            let host = Host { system: System::Linux, cards, cores: 8 };
            for strategy in STRATEGIES {
                for (processes, precision) in [(1, "no"), (2, "bf16"), (4, "fp16")] {
                    let answers = Answers { processes, strategy: strategy.to_owned(), precision: precision.to_owned() };
                    let text = file(&host, &answers);
                    let read = foreign::check(foreign::Format::Accelerate, Path::new("x.yaml"), &text);
                    let expected = if processes == 1 { "single" } else { strategy };
                    let found = read.unwrap_or_else(|error| panic!("{error}\n{text}"));
                    assert!(
                        found.contains(&("train.strategy".to_owned(), Node::Str(expected.to_owned()))),
                        "{found:?}: {text}"
                    );
                }
            }
        }
    }
}

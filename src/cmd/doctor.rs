//! `tunesmith doctor`: checks what this machine has and lacks for training, with advice. It leaves no files behind.
use super::locate;
use super::terminal::{self, Style};
use crate::comm::gloo;
use crate::device::cuda::Context;
use crate::device::cuda::library::{self, LibraryReport};
use crate::device::gpu as device_gpu;
use crate::error::{Error, Result};
use crate::files::{temporary, user_cache};
use crate::hub::HubSettings;
use crate::memory::limits;
use crate::ops::simd::{self, Level};
use crate::telemetry::machine::{MachineInfo, free_disk};
use crate::words::count;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Check this machine for training
#[derive(Debug, clap::Args)]
pub struct Args {}

/// What a finding means for training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Training works well with this.
    Good,
    /// Of no effect on training.
    Neutral,
    /// Missing or too small; the finding has advice.
    Lacking,
}

/// One line of the report.
#[derive(Debug)]
struct Finding {
    subject: &'static str,
    verdict: Verdict,
    text: String,
    hint: Option<String>,
}

impl Finding {
    fn new(subject: &'static str, verdict: Verdict, text: impl Into<String>) -> Self {
        Self { subject, verdict, text: text.into(), hint: None }
    }

    fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

/// Runs the subcommand.
///
/// # Errors
/// [`crate::Kind::Io`] when standard output cannot be written.
pub fn run(_args: &Args) -> Result<()> {
    let machine = MachineInfo::detect();
    let mut findings = vec![
        processor(&machine),
        vectors(simd::detect(), simd::pair_level().is_some()),
        memory(machine.memory, limits::available(), limits::group().map(|group| group.limit)),
        disk("disk here", Path::new(".")),
        disk("disk for cache", &user_cache().unwrap_or_else(|| PathBuf::from("."))),
        writable(),
        hub(HubSettings::from_env()),
        just(),
        program(
            "tensorboard",
            "shows the event files of runs",
            "run `python3 -m pip install tensorboard`; training writes its event files without it",
        ),
        gloo(gloo::probe()),
        gpu(),
    ];
    #[cfg(feature = "cuda")]
    findings.extend(nccl());
    findings.push(Finding::new("python", Verdict::Neutral, "not needed"));
    terminal::print(&report(&findings, terminal::stdout_colour()))
}

fn report(findings: &[Finding], colour: bool) -> String {
    let mut out = format!("tunesmith {}\n\n", env!("CARGO_PKG_VERSION"));
    let width = findings.iter().map(|finding| finding.subject.len()).max().unwrap_or(0);
    for Finding { subject, verdict, text, hint } in findings {
        let (word, style) = match verdict {
            Verdict::Good => ("ok  ", Style::Green),
            Verdict::Neutral => ("-   ", Style::Dim),
            Verdict::Lacking => ("LACK", Style::Yellow),
        };
        let _ = writeln!(out, "{}  {subject:width$}  {text}", style.paint(word, colour));
        if let Some(hint) = hint {
            let _ = writeln!(out, "      {:width$}  {} {hint}", "", Style::Bold.paint("hint:", colour));
        }
    }
    out
}

/// Where the hub's files are kept, and whether there is a token; never the token itself.
fn hub(settings: Result<HubSettings>) -> Finding {
    if !cfg!(feature = "hub") {
        return Finding::new("hub", Verdict::Neutral, "not in this build (feature `hub`): local folders only");
    }
    match settings {
        Err(error) => {
            let finding = Finding::new("hub", Verdict::Lacking, error.message());
            error.hint_text().map(str::to_owned).into_iter().fold(finding, Finding::hint)
        }
        Ok(settings) => {
            let token =
                settings.token.as_ref().map_or("no token".to_owned(), |token| format!("a token from {}", token.source));
            let offline = if settings.offline { ", offline" } else { "" };
            let place = format!("{}, cache {}", settings.shown_endpoint(), settings.cache.display());
            let finding = Finding::new("hub", Verdict::Neutral, format!("{place}, {token}{offline}"));
            if settings.token.is_some() { finding } else { finding.hint("for gated or private models set HF_TOKEN") }
        }
    }
}

/// The library for communication between processes (Gloo).
fn gloo(found: Result<PathBuf>) -> Finding {
    match found {
        Ok(path) => {
            Finding::new("gloo", Verdict::Good, format!("several processes can train together: {}", path.display()))
        }
        Err(error) => {
            let finding = Finding::new("gloo", Verdict::Neutral, error.message());
            error.hint_text().map(str::to_owned).into_iter().fold(finding, Finding::hint)
        }
    }
}

fn just() -> Finding {
    if locate::program("just").is_none() && Path::new(".tools/bin/just").exists() {
        return Finding::new("just", Verdict::Neutral, "not on PATH; scripts/just runs the one in .tools/bin");
    }
    program("just", "recipes run with `just`", how_to_get_just(Path::new("scripts/just").exists()))
}

/// The command that helps without `just`; `script` says whether the repository's script is here.
const fn how_to_get_just(script: bool) -> &'static str {
    if script {
        "run `scripts/just`, which installs it once into .tools, and takes the same words"
    } else {
        "run `cargo install just --locked`"
    }
}

fn processor(machine: &MachineInfo) -> Finding {
    let cores = machine.threads;
    let text = format!("{cores} usable core{}, {}", if cores == 1 { "" } else { "s" }, machine.processor);
    Finding::new("processor", Verdict::Good, text)
}

/// The finding about vector instructions. `pairs` tells whether the processor has an instruction for products of bfloat16
/// numbers.
fn vectors(level: Level, pairs: bool) -> Finding {
    match level {
        Level::Amx => Finding::new(
            "vectors",
            Verdict::Good,
            "AVX-512 with AMX: train.bf16, and matrices stored in bfloat16, are multiplied in tiles",
        ),
        Level::Avx512 if pairs => {
            Finding::new("vectors", Verdict::Good, "AVX-512 with AVX512_BF16: train.bf16 multiplies in bfloat16")
        }
        Level::Avx512 => Finding::new("vectors", Verdict::Good, "AVX-512"),
        Level::Avx2 => Finding::new("vectors", Verdict::Good, "AVX2 with FMA"),
        Level::Neon => Finding::new("vectors", Verdict::Good, "NEON"),
        Level::Portable => {
            Finding::new("vectors", Verdict::Lacking, "no AVX2: the portable kernels are used, several times slower")
                .hint("use a machine with AVX2 for larger models")
        }
    }
}

fn memory(total: u64, available: Option<u64>, limit: Option<u64>) -> Finding {
    let usable = limit.unwrap_or(u64::MAX).min(available.unwrap_or(total));
    let mut text = format!("{} in all", bytes(total));
    if let Some(available) = available {
        let _ = write!(text, ", {} free", bytes(available));
    }
    if let Some(limit) = limit.filter(|&limit| limit < total) {
        let _ = write!(text, ", {} allowed by the cgroup", bytes(limit));
    }
    if usable >= 2 << 30 {
        return Finding::new("memory", Verdict::Good, text);
    }
    Finding::new("memory", Verdict::Lacking, text)
        .hint("set train.gradient_checkpointing: auto and train.batch_size: auto (docs/auto-batch.md); weights take 4 bytes a parameter")
}

fn disk(subject: &'static str, wanted: &Path) -> Finding {
    // A missing folder will be created on the file system of its nearest existing parent.
    let full = std::path::absolute(wanted).unwrap_or_else(|_| wanted.to_owned());
    let Some(existing) = full.ancestors().find(|folder| folder.exists()) else {
        return Finding::new(subject, Verdict::Neutral, format!("{}: unknown", full.display()));
    };
    match free_disk(existing) {
        None => Finding::new(subject, Verdict::Neutral, format!("{}: unknown", full.display())),
        Some(free) => {
            let text = format!("{} free in {}", bytes(free), full.display());
            if free >= 1 << 30 {
                Finding::new(subject, Verdict::Good, text)
            } else {
                Finding::new(subject, Verdict::Lacking, text).hint(match subject {
                    "disk here" => "free some space, or set train.output_dir to a folder elsewhere",
                    _ => "free some space, or set data.cache_dir to a folder elsewhere",
                })
            }
        }
    }
}

fn writable() -> Finding {
    // Permissions alone do not tell (root, read-only mounts): only making a file does; it is removed at once.
    match temporary::unnamed(Path::new(".tunesmith-doctor")) {
        Ok(_) => Finding::new("output", Verdict::Good, "the current folder is writable"),
        Err(source) => {
            Finding::new("output", Verdict::Lacking, format!("the current folder is not writable: {source}"))
                .hint("set train.output_dir to a folder of yours")
        }
    }
}

fn program(name: &'static str, purpose: &str, how: &str) -> Finding {
    match locate::program(name) {
        Some(path) => Finding::new(name, Verdict::Good, path.display().to_string()),
        None => Finding::new(name, Verdict::Lacking, format!("not on PATH ({purpose})")).hint(how),
    }
}

/// GPUs, and the libraries that they need.
fn gpu() -> Finding {
    if !library::driver_is_installed() {
        return Finding::new("gpu", Verdict::Neutral, "no CUDA driver: runs compute on the CPU");
    }
    let mut found = Vec::new();
    for LibraryReport { name, found: library } in library::report() {
        match library {
            Ok((version, path)) => found.push(format!("{name} {version} ({})", path.display())),
            Err(error) => return lacking("gpu", &error),
        }
    }
    match Context::count().and_then(|gpus| device_gpu::open(0).map(|()| gpus)) {
        Ok(gpus) => Finding::new(
            "gpu",
            Verdict::Good,
            format!("{}, {}: model.device: cuda computes there", count(gpus as usize, "GPU"), found.join(", ")),
        ),
        Err(error) => lacking("gpu", &error),
    }
}

/// The finding about NCCL, with which ranks on several GPUs exchange gradients; `None` with fewer than two GPUs.
#[cfg(feature = "cuda")]
fn nccl() -> Option<Finding> {
    if !library::driver_is_installed() || Context::count().is_ok_and(|count| count < 2) {
        return None;
    }
    Some(match crate::comm::nccl::probe() {
        Ok(version) => {
            Finding::new("nccl", Verdict::Good, format!("NCCL {version}: ranks on GPUs of their own use it"))
        }
        Err(error) => lacking("nccl", &error),
    })
}

/// A finding about something that does not work, with the error's hint.
fn lacking(subject: &'static str, error: &Error) -> Finding {
    let finding = Finding::new(subject, Verdict::Lacking, error.message());
    match error.hint_text() {
        Some(hint) => finding.hint(hint),
        None => finding,
    }
}

fn bytes(count: u64) -> String {
    if count >= 1 << 30 {
        format!("{:.1} GiB", count as f64 / (1_u64 << 30) as f64)
    } else {
        format!("{:.0} MiB", count as f64 / (1_u64 << 20) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_cgroup_on_a_large_machine_is_lacking_memory() {
        let finding = memory(64 << 30, Some(60 << 30), Some(1 << 30));
        assert_eq!(finding.verdict, Verdict::Lacking);
        assert!(finding.text.contains("1.0 GiB allowed by the cgroup"), "{}", finding.text);
        assert_eq!(memory(64 << 30, Some(60 << 30), None).verdict, Verdict::Good);
    }

    #[test]
    fn every_lack_says_what_to_do() {
        let findings =
            [vectors(Level::Portable, false), memory(1 << 29, None, None), program("no-such-program", "x", "get it")];
        for finding in &findings {
            assert!(finding.verdict == Verdict::Lacking && finding.hint.is_some(), "{finding:?}");
        }
        let text = report(&findings, false);
        assert_eq!(text.matches("hint:").count(), 3, "{text}");
        assert!(!text.contains('\x1b'));
    }

    #[test]
    fn a_missing_just_is_helped_by_one_command() {
        for (script, command) in [(true, "`scripts/just`"), (false, "`cargo install just --locked`")] {
            let hint = how_to_get_just(script);
            assert!(hint.contains(command) && hint.matches('`').count() == 2, "{hint}");
        }
    }

    #[test]
    fn a_missing_folder_is_measured_where_it_would_be_made() {
        let finding = disk("disk here", Path::new("/no/such/folder"));
        assert!(finding.text.ends_with("free in /no/such/folder"), "{}", finding.text);
    }
}

//! `tunesmith gpu-info`: shows GPUs, driver, CUDA, NCCL and links, and the processor with measured rates.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{locate, terminal};
use crate::bench::training;
use crate::config::DeviceChoice;
use crate::device::Device;
use crate::device::cuda::Context;
use crate::device::cuda::library::{self, LibraryReport};
use crate::error::Result;
use crate::memory::{human_bytes, limits};
use crate::model::device;
use crate::ops::{peak, simd};
use crate::plan::platform::{self, Card, Engine, Layout};
use crate::plan::table;
use crate::telemetry::machine::{self, MachineInfo};
use crate::telemetry::nvidia::{LINKS, Nvidia};

/// Show GPUs and their links, and the processor's cores, memory and speed
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Skip measuring the processor's speed, which takes two seconds
    #[arg(long)]
    no_measure: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// [`crate::Kind::Io`] when standard output cannot be written.
pub fn run(args: &Args) -> Result<()> {
    terminal::print(&format!("{}{}{}", gpus(), processor(!args.no_measure), used()))
}

/// The defaults of a run on this machine with `model.device: auto`.
fn used() -> String {
    let engine = if device::device(DeviceChoice::Auto).is_ok_and(|device| device != Device::Cpu) {
        Engine::Cuda
    } else {
        Engine::Cpu
    };
    let mut host = machine::host();
    if host.cards.is_empty() {
        host.cards = cards();
    }
    let ranks = platform::ranks(&host, engine);
    let layout = Layout { ranks, local: ranks, in_process: false };
    let choices = platform::choose(&host, layout, engine);
    let row = |choice: platform::Choice| {
        (choice.what.to_owned(), format!("{} ({}; change it with {})", choice.value, choice.why, choice.key))
    };
    format!(
        "defaults of a run on this machine with model.device: auto\n{}",
        table(&choices.into_iter().map(row).collect::<Vec<_>>())
    )
}

/// The GPUs that the driver's library shows.
///
/// # Errors
/// [`crate::Kind::Device`]: there is no driver that can be used.
pub(super) fn contexts() -> Result<Vec<Arc<Context>>> {
    (0..Context::count()?).map(Context::new).collect()
}

fn cards() -> Vec<Card> {
    let card = |gpu: Arc<Context>| Card { name: gpu.name().to_owned(), capability: Some(gpu.capability()) };
    contexts().unwrap_or_default().into_iter().map(card).collect()
}

/// GPUs as the driver's library reports them, if there is no `nvidia-smi`; `why` says why not.
fn by_driver(why: &str) -> String {
    let found = match contexts() {
        Ok(found) if found.is_empty() => return format!("GPUs: none ({why}; the driver shows none)\n"),
        Ok(found) => found,
        Err(error) => return format!("GPUs: none ({why}; {})\n", error.message()),
    };
    let row = |gpu: &Arc<Context>| {
        let memory = gpu.memory().map_or("memory unknown".to_owned(), |(free, total)| memory(total, Some(free)));
        let (major, minor) = gpu.capability();
        (format!("GPU {}", gpu.ordinal()), format!("{}, {memory}, compute capability {major}.{minor}", gpu.name()))
    };
    let mut rows = vec![("NCCL".to_owned(), nccl())];
    rows.extend(found.iter().map(row));
    format!("GPUs: {} (asked of the driver: {why})\n{}{}", found.len(), table(&rows), libraries())
}

/// The report of `nvidia-smi`, or else of the driver's library.
fn gpus() -> String {
    let found = match locate::program("nvidia-smi").map(|program| Nvidia::ask(&program)) {
        None => return by_driver("no nvidia-smi on PATH"),
        Some(Err(error)) => return by_driver(error.message()),
        Some(Ok(found)) if found.gpus.is_empty() => return by_driver("nvidia-smi has found no device"),
        Some(Ok(found)) => found,
    };
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let mut rows = vec![
        ("driver".to_owned(), or_unknown(&found.driver)),
        ("CUDA".to_owned(), format!("{} (the newest that the driver runs)", or_unknown(&found.cuda))),
        ("NCCL".to_owned(), nccl()),
    ];
    for gpu in &found.gpus {
        let free = |total: u64| gpu.used.map(|used| total.saturating_sub(used));
        let memory = gpu.total.map_or("memory unknown".to_owned(), |total| memory(total, free(total)));
        let capability = or_unknown(&gpu.compute_capability);
        rows.push((format!("GPU {}", gpu.index), format!("{}, {memory}, compute capability {capability}", gpu.name)));
    }
    let mut text = format!("GPUs: {}\n{}", found.gpus.len(), table(&rows));
    if found.gpus.len() > 1 && !found.links.is_empty() {
        let width = found.links.iter().flatten().map(String::len).max().unwrap_or(0).max(5);
        let _ = writeln!(text, "  links ({LINKS})");
        let row = |words: &mut dyn Iterator<Item = String>| {
            words.fold(String::new(), |mut line, word| {
                let _ = write!(line, " {word:>width$}");
                line
            })
        };
        let head = row(&mut (0..found.links.len()).map(|index| format!("GPU{index}")));
        let _ = writeln!(text, "  {:>width$}{head}", "");
        for (index, links) in found.links.iter().enumerate() {
            let _ = writeln!(text, "  {:>width$}{}", format!("GPU{index}"), row(&mut links.iter().cloned()));
        }
    }
    text + &libraries()
}

/// The libraries that these GPUs need, and where they were found.
fn libraries() -> String {
    let row = |report: LibraryReport| {
        let what = match report.found {
            Ok((version, path)) => format!("{version} ({})", path.display()),
            Err(error) => {
                let hint = error.hint_text().map_or_else(String::new, |hint| format!("; {hint}"));
                format!("{}{hint}", error.message())
            }
        };
        (report.name.to_owned(), what)
    };
    format!(
        "to compute there (model.device: cuda)\n{}",
        table(&library::report().into_iter().map(row).collect::<Vec<_>>())
    )
}

/// A GPU's memory in words, with what a run may hold by itself: 90 % of what is free.
fn memory(total: u64, free: Option<u64>) -> String {
    let free = free.map(|free| {
        format!(" ({} free, a run may hold {})", human_bytes(free), human_bytes(device::share_of_free(free)))
    });
    human_bytes(total) + &free.unwrap_or_default()
}

/// NCCL's version and file, where ranks find it: that of its variable, that of the system, or one beside CUDA's libraries.
fn nccl() -> String {
    let file = "libnccl.so.2";
    let named = std::env::var_os("TUNESMITH_NCCL").filter(|named| !named.is_empty()).map(PathBuf::from);
    let beside = || library::candidates(&[file]).into_iter().find(|path| path.is_absolute() && path.exists());
    let found = named.or_else(|| locate::library(file)).or_else(beside);
    found.map_or_else(|| format!("not found ({file})"), |path| nccl_version(&path))
}

/// The version of a library, from the file name that its link points to.
fn nccl_version(path: &Path) -> String {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = real.file_name().unwrap_or_default().to_string_lossy();
    match name.strip_prefix("libnccl.so.").filter(|version| version.contains('.')) {
        Some(version) => format!("{version} ({})", real.display()),
        None => real.display().to_string(),
    }
}

fn processor(measure: bool) -> String {
    let machine = MachineInfo::detect();
    let total = limits::total().map_or("unknown".to_owned(), human_bytes);
    let free = limits::available().map_or_else(String::new, |bytes| format!(", {} free", human_bytes(bytes)));
    let group = limits::group().map_or("no limit".to_owned(), |group| {
        format!("{}, {} of it used", human_bytes(group.limit), human_bytes(group.used))
    });
    let pairs = if simd::pair_level().is_some() { ", bfloat16 products" } else { "" };
    let mut rows = vec![
        ("name".to_owned(), machine.processor),
        ("cores".to_owned(), format!("{} usable", machine.threads)),
        ("vectors".to_owned(), format!("{}{pairs}", simd::level().name())),
        ("memory".to_owned(), format!("{total}{free}")),
        ("control group".to_owned(), group),
        ("budget by itself".to_owned(), limits::usable().map_or("unknown".to_owned(), human_bytes)),
    ];
    if measure {
        let giga = |rate: f64| rate / 1e9;
        rows.push(("multiply-adds".to_owned(), format!("{:.1} GFLOP/s, all in registers", giga(peak::flops(0.3)))));
        rows.push((
            "matrix products".to_owned(),
            format!(
                "{:.1} GFLOP/s (f32, 1024 x 2048 x 2048)",
                giga(training::gemm_peak(Device::Cpu, training::Operands::Float32))
            ),
        ));
        if !pairs.is_empty() {
            let rate = giga(training::gemm_peak(Device::Cpu, training::Operands::Bfloat16));
            rows.push(("with train.bf16".to_owned(), format!("{rate:.1} GFLOP/s (the same in bfloat16)")));
        }
        rows.push(("copying".to_owned(), format!("{:.1} GB/s read and as much written", giga(peak::copy_rate(0.5)))));
    }
    format!("processor\n{}", table(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_nccl_is_in_its_files_name() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("libnccl.so.2.27.5"), "").unwrap();
        let link = root.path().join("libnccl.so.2");
        std::os::unix::fs::symlink("libnccl.so.2.27.5", &link).unwrap();
        assert!(nccl_version(&link).starts_with("2.27.5 ("), "{}", nccl_version(&link));
        assert!(nccl_version(Path::new("/no/libnccl.so.2")).ends_with("libnccl.so.2"));
    }

    #[test]
    fn the_processor_is_described_and_measured() {
        let text = processor(true);
        for label in ["cores", "control group", "matrix products", "copying"] {
            assert!(text.contains(label), "{text}");
        }
        assert!(!text.contains(" 0.0 G"), "{text}");
    }
}

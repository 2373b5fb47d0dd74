//! `tunesmith memory-check`: shows the memory in use on each device and by which process, and the memory that a
//! configuration needs.
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use super::args::JobArgs;
use super::{gpu_info, locate, terminal};
use crate::data;
use crate::device::cuda::{Context, library};
use crate::error::Result;
use crate::files;
use crate::memory::{human_bytes, limits};
use crate::model::device;
use crate::plan::memory::PROGRAM;
use crate::plan::{grouped, table};
use crate::telemetry::machine::MachineInfo;
use crate::telemetry::nvidia::{Gpu, Nvidia, Process};
use crate::telemetry::progress::{Event, Observer};
use crate::train::memory_check::{self, LargestStep, StepMemory};
use crate::words::count;

/// Show memory in use on each device, and with a configuration what its largest step holds, predicted and measured.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
}

/// A row of the table of devices.
struct Device {
    index: String,
    name: String,
    used: Option<u64>,
    total: Option<u64>,
    utilization: Option<u32>,
    processes: Vec<Process>,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of the configuration, if there is one; [`crate::Kind::Memory`] where its largest pass does not fit.
pub fn run(args: &Args) -> Result<()> {
    let mut text = devices();
    let named = !args.job.config.words.is_empty()
        || args.job.model.is_some()
        || std::env::var_os("CONFIG").is_some_and(|path| !path.is_empty());
    if !named {
        return terminal::print(&text);
    }
    let resolved = args.job.load(&[])?;
    text += "\n";
    terminal::print(&text)?;
    let largest = memory_check::largest_step(&resolved, &Quiet)?;
    terminal::print(&measured(&largest, device::device(resolved.config.model.device)?))
}

/// Shows notices and warnings, but no progress: the command is too short for a bar.
struct Quiet;

impl data::Progress for Quiet {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}

    fn warn(&self, text: &str) {
        terminal::print_warning(text);
    }
}

impl Observer for Quiet {
    fn event(&self, event: &Event<'_>) {
        if let Event::Notice(text) = event {
            terminal::print_note(text);
        }
    }
}

/// The table of devices: the processor's memory first, then GPUs.
fn devices() -> String {
    let (total, available) = (limits::total(), limits::available());
    let mut devices = vec![Device {
        index: "cpu".to_owned(),
        name: MachineInfo::detect().processor,
        used: total.zip(available).map(|(total, available)| total.saturating_sub(available)),
        total,
        utilization: cpu_utilization(),
        processes: own_processes(Path::new("/proc")),
    }];
    let remark = match gpus() {
        Ok(found) => {
            let room = |gpu: &Device| Some(format!("{} on GPU {}", human_bytes(gpu.room()?), gpu.index));
            let rooms: Vec<String> = found.iter().filter_map(room).collect();
            devices.extend(found);
            if rooms.is_empty() { String::new() } else { format!("a run may hold {} now\n", rooms.join(", ")) }
        }
        Err(why) => format!("no GPU: {why}\n"),
    };
    let group = limits::group().map_or_else(String::new, |group| {
        format!("the control group allows {}, {} of it used; ", human_bytes(group.limit), human_bytes(group.used))
    });
    let usable =
        limits::usable().map_or_else(String::new, |bytes| format!("a run may hold {} now\n", human_bytes(bytes)));
    let mut text = show(&devices) + &group + &usable;
    text.push_str(&remark);
    text
}

impl Device {
    /// Bytes that a run may hold on this GPU.
    fn room(&self) -> Option<u64> {
        Some(device::share_of_free(self.total?.saturating_sub(self.used?)))
    }
}

/// GPUs as `nvidia-smi` reports them, or else the driver, which knows no processes; else why there are none.
fn gpus() -> Result<Vec<Device>, String> {
    let why = match locate::program("nvidia-smi").map(|program| Nvidia::ask(&program)) {
        None => "no nvidia-smi on PATH".to_owned(),
        Some(Err(error)) => error.message().to_owned(),
        Some(Ok(found)) => {
            let device = |gpu: Gpu| Device {
                index: gpu.index.to_string(),
                name: gpu.name,
                used: gpu.used,
                total: gpu.total,
                utilization: gpu.utilization,
                processes: gpu.processes,
            };
            return Ok(found.gpus.into_iter().map(device).collect());
        }
    };
    if !library::driver_is_installed() {
        return Err(why);
    }
    let found = gpu_info::contexts().map_err(|error| format!("{why}; {}", error.message()))?;
    let device = |gpu: &Arc<Context>| {
        let memory = gpu.memory().ok();
        Device {
            index: gpu.ordinal().to_string(),
            name: gpu.name().to_owned(),
            used: memory.map(|(free, total)| total.saturating_sub(free)),
            total: memory.map(|(_, total)| total),
            utilization: None,
            processes: Vec::new(),
        }
    };
    Ok(found.iter().map(device).collect())
}

fn show(devices: &[Device]) -> String {
    let bytes = |count: Option<u64>| count.map_or("?".to_owned(), human_bytes);
    let width = devices.iter().map(|device| device.name.chars().count()).max().unwrap_or(0).max(4);
    let mut text = format!("device  {:width$}  {:>9}  {:>9}  {:>5}  processes\n", "name", "used", "total", "busy");
    for device in devices {
        let busy = device.utilization.map_or("?".to_owned(), |share| format!("{share} %"));
        let (used, total) = (bytes(device.used), bytes(device.total));
        let _ = write!(text, "{:6}  {:width$}  {used:>9}  {total:>9}  {busy:>5}", device.index, device.name);
        let process = |process: &Process| {
            let held = process.bytes.map_or_else(String::new, |held| format!(" {}", human_bytes(held)));
            format!("{} {}{held}", process.pid, process.name)
        };
        let processes: Vec<String> = device.processes.iter().map(process).collect();
        let _ = writeln!(text, "  {}", if processes.is_empty() { "-".to_owned() } else { processes.join("; ") });
    }
    text
}

/// The processors' utilization, measured over a tenth of a second.
fn cpu_utilization() -> Option<u32> {
    let ticks = || -> Option<(u64, u64)> {
        let text = files::system("/proc/stat")?;
        let numbers: Vec<u64> =
            text.lines().next()?.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
        Some((numbers.iter().sum(), numbers.get(3)? + numbers.get(4)?))
    };
    let (before, idle_before) = ticks()?;
    std::thread::sleep(std::time::Duration::from_millis(100));
    let (after, idle_after) = ticks()?;
    let (all, idle) = (after.saturating_sub(before).max(1), idle_after.saturating_sub(idle_before));
    Some((100 * all.saturating_sub(idle) / all) as u32)
}

/// This user's other tunesmith processes, with their resident memory in bytes.
fn own_processes(proc: &Path) -> Vec<Process> {
    let me = fs::metadata(proc.join("self")).map(|meta| meta.uid()).ok();
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut found: Vec<Process> = entries
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let mine = me == entry.metadata().ok().map(|meta| meta.uid()) && pid != std::process::id();
            let folder = entry.path();
            let ours = mine && files::system(folder.join("comm"))?.trim() == "tunesmith";
            if !ours {
                return None;
            }
            let line = files::read_own(&folder.join("cmdline"), files::SMALL).ok()?;
            let words: Vec<String> =
                line.split(|&byte| byte == 0).take(3).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
            let name = words.join(" ");
            let status = files::system(folder.join("status"))?;
            let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix("kB")?;
            let bytes = resident.trim().parse::<u64>().ok().map(|kib| kib * 1024);
            Some(Process { pid, name: name.trim().chars().take(60).collect(), bytes })
        })
        .collect();
    found.sort_by_key(|process| process.pid);
    found
}

/// A row of the table of a step's memory: its name, and the part of [`StepMemory`] that it shows.
type Part = (&'static str, fn(&StepMemory) -> u64);

/// The predicted and the measured memory of a step on the largest pass.
fn measured(largest: &LargestStep, device: crate::device::Device) -> String {
    let LargestStep { tokens, predicted, measured, line, budget } = largest;
    let tokens = count(grouped(*tokens as u64), "token");
    let mut text = format!("one step of this configuration; its largest pass has {tokens}, all with a label\n");
    let _ = writeln!(text, "  {:24}  {:>10}  {:>10}", "", "predicted", "measured");
    let parts: [Part; 5] = [
        ("model, gradients, data", |held| held.loaded),
        ("activations", |held| held.activations),
        ("optimizer, copy to save", |held| held.optimizer),
        ("for a moment", |held| held.moment),
        ("at most", StepMemory::total),
    ];
    for (name, part) in parts {
        let found = measured.as_ref().map_or("-".to_owned(), |held| human_bytes(part(held)));
        let _ = write!(text, "  {name:24}  {:>10}  {found:>10}", human_bytes(part(predicted)));
        if let ("at most", Some(held)) = (name, measured) {
            let off = 100.0 * (predicted.total() as f64 / held.total().max(1) as f64 - 1.0);
            let _ = write!(text, "  ({off:+.1} %)");
        }
        text.push('\n');
    }
    let mut rows = Vec::new();
    if let Some(line) = line {
        rows.push(("each further token costs".to_owned(), human_bytes(line.per_token as u64)));
    }
    if device == crate::device::Device::Cpu {
        rows.push((
            "the program itself".to_owned(),
            format!("about {}, not counted by the allocator", human_bytes(PROGRAM)),
        ));
    } else {
        rows.push((
            "device".to_owned(),
            format!("{}; the driver's own memory is not counted", device::describe(device)),
        ));
    }
    rows.push(("memory budget".to_owned(), budget.map_or("no limit".to_owned(), human_bytes)));
    text += &table(&rows);
    if measured.is_none() {
        text.push_str("it does not fit: a run would cut it into smaller passes, or say what helps\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_is_not_known() {
        let process = Process { pid: 7, name: "tunesmith train a.yaml".into(), bytes: Some(3 << 30) };
        let device = |index: &str, used, processes| Device {
            index: index.into(),
            name: "A name".into(),
            used,
            total: Some(16 << 30),
            utilization: None,
            processes,
        };
        let text = show(&[device("cpu", Some(5 << 30), vec![process]), device("0", None, Vec::new())]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].ends_with("5.00 GiB   16.0 GiB      ?  7 tunesmith train a.yaml 3.00 GiB"), "{text}");
        assert!(lines[2].ends_with("?   16.0 GiB      ?  -"), "{text}");
    }

    #[test]
    fn only_this_users_tunesmith_processes_are_listed() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("self")).unwrap();
        for (pid, comm) in [("11", "tunesmith"), ("12", "bash"), ("x", "tunesmith")] {
            let folder = root.path().join(pid);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("comm"), format!("{comm}\n")).unwrap();
            fs::write(folder.join("cmdline"), "tunesmith\0train\0a.yaml\0--resume\0").unwrap();
            fs::write(folder.join("status"), "Name:\ttunesmith\nVmRSS:\t    2048 kB\n").unwrap();
        }
        let expected = Process { pid: 11, name: "tunesmith train a.yaml".into(), bytes: Some(2 << 20) };
        assert_eq!(own_processes(root.path()), [expected]);
    }
}

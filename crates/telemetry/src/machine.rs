//! The run's machine and the memory of the process, from `/proc`.
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use super::nvidia::{Gpu, Nvidia};
use tunesmith_base::files::{disk, system};
use tunesmith_base::memory::{self, limits};
use tunesmith_device::Device;
use tunesmith_plan::platform;

/// Peak memory, the only such figure that is shown: the most bytes held at once on the model's device so far. On a GPU
/// it counts this process's arrays and activations. On the CPU it is the peak resident memory of the process (`VmHWM`)
/// or, if the system does not report that, the allocator's peak.
pub fn peak_bytes(device: Device) -> u64 {
    match device {
        Device::Cuda(_) => tunesmith_device::memory::peak(device),
        // The kernel sums up a counter of each processor, not always exactly: what it reports may fall by some pages.
        Device::Cpu | Device::Meta => {
            static MOST: AtomicU64 = AtomicU64::new(0);
            let now = status_kib("VmHWM:").map_or_else(memory::highest, |kib| kib * 1024);
            MOST.fetch_max(now, Ordering::Relaxed).max(now)
        }
    }
}

fn status_kib(key: &str) -> Option<u64> {
    let status = system("/proc/self/status")?;
    status.lines().find_map(|line| line.strip_prefix(key))?.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Bytes that an unprivileged process may still write below `path`; none if the system does not tell.
pub fn free_disk(path: &Path) -> Option<u64> {
    disk::free_space(path).ok().map(|free| free.bytes)
}

/// The memory that this process may use: the machine's, or the limit of its control group.
pub fn usable_memory() -> u64 {
    let limit = limits::group().map_or(u64::MAX, |group| group.limit);
    limits::total().unwrap_or(0).min(limit)
}

/// The machine's properties for the report.
#[derive(Debug, Clone, Serialize)]
pub struct MachineInfo {
    /// The processor's model name, from `/proc/cpuinfo`.
    pub processor: String,
    /// Logical processors that this process may use.
    pub threads: usize,
    /// Total memory of the machine in bytes.
    pub memory: u64,
    /// Operating system and architecture, such as `linux x86_64`.
    pub system: String,
}

impl MachineInfo {
    /// Reads this machine's properties from `/proc`.
    pub fn detect() -> Self {
        let field = |file: &str, key: &str| {
            let text = system(file).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim_start_matches([' ', '\t', ':']).trim().to_owned())
        };
        let memory = field("/proc/meminfo", "MemTotal").and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok());
        let kernel = system("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            processor: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned()),
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory: memory.unwrap_or(0) * 1024,
            system: format!("{} {} {}", std::env::consts::OS, kernel.trim(), std::env::consts::ARCH),
        }
    }
}

/// This machine's properties for [`platform`]. GPUs are only queried if there is a driver.
pub fn host() -> platform::Host {
    let driver = Path::new("/proc/driver/nvidia/gpus").exists();
    let found = if driver { Nvidia::ask(Path::new("nvidia-smi")).unwrap_or_default() } else { Nvidia::default() };
    let capability = |text: &str| {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let card = |gpu: Gpu| platform::Card {
        capability: gpu.compute_capability.as_deref().and_then(capability),
        name: gpu.name,
    };
    platform::Host {
        system: platform::System::current(),
        cards: found.gpus.into_iter().map(card).collect(),
        cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_this_machine() {
        let block = vec![1u8; 32 << 20];
        assert!(peak_bytes(Device::Cpu) > std::hint::black_box(block).len() as u64);
        let machine = MachineInfo::detect();
        assert!(machine.threads > 0 && machine.memory > 0, "{machine:?}");
    }
}

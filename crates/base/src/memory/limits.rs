//! How much memory the machine has and allows, in bytes: `/proc/meminfo`, the process's control groups (versions 1 and
//! 2), and the limit of its address space.
use std::path::{Path, PathBuf};

use super::live;
use crate::files::system;

/// From this value on, a control group's limit means no limit: version 1 writes a number near 2^63.
const UNLIMITED: u64 = 1 << 60;
/// The divisor of the free memory that gives the share left for page tables, fragmentation and other programs.
const SHARE_LEFT: u64 = 10;
/// The fewest bytes that are left, but never more than half of the free memory.
const LEAST_LEFT: u64 = 256 << 20;

/// A line of `/proc/meminfo`, such as `MemTotal`, in bytes. The file says kB and means KiB.
fn meminfo(key: &str) -> Option<u64> {
    let text = system("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Bytes of memory that the machine has (`MemTotal`).
pub fn total() -> Option<u64> {
    meminfo("MemTotal")
}

/// Bytes that programs could take without swapping, as the system estimates it (`MemAvailable`).
pub fn available() -> Option<u64> {
    meminfo("MemAvailable")
}

/// A control group's limit and what counts against it, both in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cgroup {
    /// The most bytes that the group may hold.
    pub limit: u64,
    /// The usage, without cached files that the system would drop first (`inactive_file`).
    pub used: u64,
}

/// The control group that leaves this process the least, among all from its own up to the root, of versions 1 and 2.
pub fn group() -> Option<Cgroup> {
    let groups = system("/proc/self/cgroup")?;
    let ours = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("");
    let modern = Path::new("/sys/fs/cgroup").join(ours);
    let modern = modern.ancestors().take_while(|folder| folder.starts_with("/sys/fs/cgroup")).map(|folder| {
        read(folder.join("memory.max"), folder.join("memory.current"), folder.join("memory.stat"), "inactive_file")
    });
    let old = Path::new("/sys/fs/cgroup/memory");
    let old = read(
        old.join("memory.limit_in_bytes"),
        old.join("memory.usage_in_bytes"),
        old.join("memory.stat"),
        "total_inactive_file",
    );
    modern.chain([old]).flatten().min_by_key(|group| group.limit.saturating_sub(group.used))
}

fn read(limit: PathBuf, used: PathBuf, stat: PathBuf, droppable: &str) -> Option<Cgroup> {
    let number = |file: PathBuf| system(file)?.trim().parse::<u64>().ok();
    let limit = number(limit).filter(|&bytes| bytes < UNLIMITED)?;
    let stat = system(stat).unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix(droppable)?.trim().parse::<u64>().ok());
    Some(Cgroup { limit, used: number(used).unwrap_or(0).saturating_sub(cached.unwrap_or(0)) })
}

/// Bytes that are left of the limit of this process's address space (`ulimit -v`); `None` without a limit.
fn address_space() -> Option<u64> {
    let limits = system("/proc/self/limits")?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?.split_whitespace().next()?;
    let status = system("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix("kB"))?.trim();
    Some(limit.parse::<u64>().ok()?.saturating_sub(size.parse::<u64>().ok()? * 1024))
}

/// The default budget in bytes: what this process already holds, plus the free memory, minus a tenth of that or 256
/// MiB, whichever is more. `None` if the system does not tell.
pub fn usable() -> Option<u64> {
    let within = group().map(|group| group.limit.saturating_sub(group.used));
    let free = [available(), within, address_space()].into_iter().flatten().min()?;
    Some(live() + free.saturating_sub((free / SHARE_LEFT).max(LEAST_LEFT.min(free / 2))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_tells() {
        let (total, available) = (total().unwrap(), available().unwrap());
        assert!(available > 0 && available <= total);
        assert!(usable().unwrap() < live() + available, "something is left alone");
    }

    #[test]
    fn a_group_counts_without_the_cache_it_would_drop() {
        let root = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            std::fs::write(root.path().join(name), text).unwrap();
            root.path().join(name)
        };
        let (used, stat) = (file("current", "900\n"), file("stat", "anon 500\ninactive_file 300\n"));
        let group = read(file("max", "1000\n"), used.clone(), stat.clone(), "inactive_file");
        assert_eq!(group, Some(Cgroup { limit: 1000, used: 600 }));
        assert_eq!(read(file("none", "max\n"), used, stat, "inactive_file"), None);
    }
}

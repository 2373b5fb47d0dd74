//! Power loss: a run's operations on files are journaled, and a test builds what a disk could hold after a loss of power at each
//! of them. What was not synced may be there or not, in any combination: the bytes of a file since its last `fsync`, and the
//! entries of a folder (made, renamed, removed) since the folder's. In each such state a whole checkpoint must be found, at
//! least as new as the newest whose rename was made durable.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tunesmith::checkpoint::newest_complete;

use super::crash::{Case, QLORA, Random, SHARED, shim, short};
use super::fixture::said;

/// An operation as `shim.c` journals it.
struct Operation {
    what: String,
    offset: usize,
    path: PathBuf,
    target: PathBuf,
    data: Vec<u8>,
}

fn operations(journal: &[u8]) -> Vec<Operation> {
    let (mut found, mut rest) = (Vec::new(), journal);
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        let line = std::str::from_utf8(&rest[..end]).unwrap();
        let [what, offset, count, path, target]: [&str; 5] =
            line.split('\t').collect::<Vec<_>>().try_into().expect("five fields");
        let (data, next) = rest[end + 1..].split_at(count.parse().unwrap());
        found.push(Operation {
            what: what.into(),
            offset: offset.parse().unwrap(),
            path: path.into(),
            target: target.into(),
            data: data.to_vec(),
        });
        rest = next;
    }
    found
}

/// A file's bytes as they are, and as they are certain to be after a loss of power.
#[derive(Clone, Default)]
struct Content {
    now: Vec<u8>,
    synced: Vec<u8>,
}

/// A change of a folder's entries.
#[derive(Clone)]
enum Change {
    Add(PathBuf, Node),
    Move(PathBuf, PathBuf),
    Remove(PathBuf),
}

#[derive(Clone, Copy, PartialEq)]
enum Node {
    Folder,
    File(usize),
}

/// Names and what stands under them, each folder's below the folder's.
type Names = BTreeMap<PathBuf, Node>;

/// Applies a change; one whose place is not there has no effect.
fn apply(names: &mut Names, change: &Change) {
    let below = |names: &Names, path: &Path| -> Vec<PathBuf> {
        names.keys().filter(|name| name.starts_with(path)).cloned().collect()
    };
    match change {
        Change::Add(path, node) => {
            names.insert(path.clone(), *node);
        }
        Change::Remove(path) => names.retain(|name, _| !name.starts_with(path)),
        Change::Move(from, to) => {
            for name in below(names, from) {
                let node = names.remove(&name).unwrap();
                let rest = name.strip_prefix(from).unwrap();
                names.insert(if rest.as_os_str().is_empty() { to.clone() } else { to.join(rest) }, node);
            }
        }
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap()
}

/// A disk that remembers what it has not yet made durable.
#[derive(Default)]
struct Disk {
    files: Vec<Content>,
    /// The entries as the program sees them.
    live: Names,
    /// The entries that are certain to be there after a loss of power.
    durable: Names,
    /// Changes since then, in their order.
    pending: Vec<Change>,
}

impl Disk {
    fn change(&mut self, change: Change) {
        apply(&mut self.live, &change);
        self.pending.push(change);
    }

    fn meet(&mut self, operation: &Operation) {
        let Operation { what, offset, path, target, data } = operation;
        let file = match self.live.get(path) {
            Some(Node::File(index)) => Some(*index),
            _ => None,
        };
        match (what.as_str(), file) {
            ("mkdir", _) => self.change(Change::Add(path.clone(), Node::Folder)),
            ("creat", _) => {
                self.files.push(Content::default());
                self.change(Change::Add(path.clone(), Node::File(self.files.len() - 1)));
            }
            ("rename", _) => self.change(Change::Move(path.clone(), target.clone())),
            ("unlink", _) => self.change(Change::Remove(path.clone())),
            ("cut", Some(file)) => self.files[file].now.resize(*offset, 0),
            ("write", Some(file)) => {
                let now = &mut self.files[file].now;
                now.resize(now.len().max(offset + data.len()), 0);
                now[*offset..offset + data.len()].copy_from_slice(data);
            }
            ("fsync", Some(file)) => self.files[file].synced = self.files[file].now.clone(),
            ("fsync", None) => {
                // The folder's own entries become durable, and what they are called, not what lies in folders below.
                let (sure, open): (Vec<_>, Vec<_>) = self.pending.drain(..).partition(|change| match change {
                    Change::Add(entry, _) | Change::Remove(entry) => parent(entry) == path,
                    Change::Move(from, to) => parent(from) == path || parent(to) == path,
                });
                // In the order in which they were made: what was added in a folder goes with it when that is renamed.
                for change in &sure {
                    apply(&mut self.durable, change);
                }
                self.pending = open.into_iter().map(|change| renamed(change, &sure)).collect();
            }
            // A file that was removed while it was open, or one of another folder.
            _ => {}
        }
    }

    /// Writes one of the states that a loss of power may leave.
    fn lose_power(&self, random: &mut Random) {
        let mut names = self.durable.clone();
        let likely = random.below(4);
        for change in &self.pending {
            if random.below(3) < likely {
                apply(&mut names, change);
            }
        }
        for (path, node) in &names {
            match node {
                // A folder whose own entry was lost takes all with it.
                _ if !parent(path).is_dir() => {}
                Node::Folder => std::fs::create_dir(path).unwrap(),
                Node::File(index) => {
                    let Content { now, synced } = &self.files[*index];
                    let bytes = match random.below(4) {
                        _ if now == synced => now.clone(),
                        0 => synced.clone(),
                        1 => now.clone(),
                        2 => [synced.as_slice(), &vec![0; now.len().saturating_sub(synced.len())]].concat(),
                        _ => now[..random.below(now.len() as u64 + 1) as usize].to_vec(),
                    };
                    std::fs::write(path, bytes).unwrap();
                }
            }
        }
    }
}

/// The change under the names that its folders have after `renames`.
fn renamed(change: Change, renames: &[Change]) -> Change {
    let follow = |mut path: PathBuf| {
        for rename in renames {
            if let Change::Move(from, to) = rename
                && let Ok(rest) = path.strip_prefix(from)
                && !rest.as_os_str().is_empty()
            {
                path = to.join(rest);
            }
        }
        path
    };
    match change {
        Change::Add(path, node) => Change::Add(follow(path), node),
        Change::Move(from, to) => Change::Move(follow(from), follow(to)),
        Change::Remove(path) => Change::Remove(follow(path)),
    }
}

/// The step of a checkpoint's folder.
fn step(name: &Path, root: &Path) -> Option<u64> {
    let name = name.strip_prefix(root).ok()?.to_str()?;
    name.strip_prefix("checkpoint-")?.parse().ok()
}

/// Loses power `samples` times after every `every`th operation of a run and looks at what is left. Returns how many
/// states were looked at.
fn lose_power_everywhere(case: &Case, every: usize, samples: usize) -> usize {
    let root = case.path("power");
    std::fs::create_dir(&root).unwrap();
    let (out, journal) = (root.join("run"), case.path("operations"));
    let mut command = case.command(&out);
    command.env("LD_PRELOAD", shim()).env("CRASH_DIR", &root).env("CRASH_HOW", "journal").env("CRASH_LOG", &journal);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let operations = operations(&std::fs::read(&journal).unwrap());
    std::fs::remove_file(journal).unwrap();
    std::fs::remove_dir_all(&out).unwrap();
    assert!(operations.iter().any(|operation| operation.what == "fsync"), "nothing was synced");
    let (mut disk, mut random, mut states) = (Disk::default(), Random(0x0ff), 0);
    for (at, operation) in operations.iter().enumerate() {
        disk.meet(operation);
        if at % every != 0 && at + 1 != operations.len() {
            continue;
        }
        let sure = disk.durable.keys().filter_map(|name| step(name, &out)).max().unwrap_or(0);
        for sample in 0..samples {
            disk.lose_power(&mut random);
            let text = format!("power lost after operation {at} of {}, sample {sample}", operations.len());
            if out.is_dir() {
                let found = newest_complete(&out).unwrap().0;
                let newest = found.map_or(0, |complete| step(&complete.dir, &out).unwrap_or(0));
                assert!(newest >= sure, "{text}: checkpoint {sure} was durable, {newest} was found");
                if states % 97 == 5 {
                    case.finish(&out);
                }
                std::fs::remove_dir_all(&out).unwrap();
            } else {
                assert_eq!(sure, 0, "{text}: the folder itself is gone");
            }
            states += 1;
        }
    }
    states
}

#[test]
fn power_lost_at_some_operations_loses_no_checkpoint() {
    assert!(lose_power_everywhere(&short(&[]), 9, 3) > 30);
}

#[test]
#[ignore = "minutes; just crash-test"]
fn power_lost_at_every_operation() {
    for (name, extra) in [("lora", &[][..]), ("qlora", QLORA), ("full, zero1 on two ranks", SHARED)] {
        println!("{name}: {} states after a loss of power, none lost", lose_power_everywhere(&short(extra), 1, 12));
    }
}

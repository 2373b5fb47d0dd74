//! The checkpoints in an output directory: which is the newest good one, which may go, what dead runs left behind.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::atomic::{Manifest, beside, replace_file, verify};
use super::disk::{Disk, free_bytes};
use crate::error::{Error, Result};

/// The folder of a step's checkpoint.
pub fn checkpoint_dir(root: &Path, step: u64) -> PathBuf {
    root.join(format!("checkpoint-{step:06}"))
}

/// The step in `checkpoint-000200`.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("checkpoint-")?;
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// `NAME.KIND-PID` as its name and kind.
fn moved_aside(name: &str) -> Option<(&str, &str)> {
    let (stem, rest) = name.rsplit_once('.')?;
    let (kind, pid) = rest.split_once('-')?;
    let ours = step_of(stem).is_some() || ["latest", "best", "adapter", "model"].contains(&stem);
    (ours && !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit())).then_some((stem, kind))
}

/// The names in a directory; none if it does not exist.
fn names(root: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("read", root, &error)),
    };
    let name = |entry: std::io::Result<fs::DirEntry>| entry.map(|entry| entry.file_name().into_string().ok());
    let names: std::io::Result<Vec<_>> = entries.map(name).collect();
    Ok(names.map_err(|error| Error::io("read", root, &error))?.into_iter().flatten().collect())
}

/// Checkpoints in place, newest first.
fn in_place(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found: Vec<_> = names(root)?.iter().filter_map(|name| Some((step_of(name)?, root.join(name)))).collect();
    found.sort_by(|a, b| b.cmp(a));
    Ok(found)
}

/// A complete checkpoint, if there is one, and damaged ones with what is wrong with them.
pub type Newest = (Option<PathBuf>, Vec<(PathBuf, Error)>);

/// The newest checkpoint that is complete, and the newer ones that are not, with what is wrong with them.
///
/// # Errors
/// [`crate::Kind::Io`] where the directory cannot be read.
pub fn newest_complete(root: &Path) -> Result<Newest> {
    // One that was being replaced when its run died still counts, after the one in its place.
    let aside = |name: &String| match moved_aside(name) {
        Some((stem, "old")) => Some((step_of(stem)?, false, root.join(name))),
        _ => Some((step_of(name)?, true, root.join(name))),
    };
    let mut candidates: Vec<_> = names(root)?.iter().filter_map(aside).collect();
    candidates.sort_by(|a, b| b.cmp(a));
    let mut damaged = Vec::new();
    for (_, _, dir) in candidates {
        match verify(&dir) {
            Ok(_) => return Ok((Some(dir), damaged)),
            Err(error) => damaged.push((dir, error)),
        }
    }
    Ok((None, damaged))
}

/// Removes older checkpoints: the newest `keep_last` stay, and `best`. As long as none of those that stay passes full
/// verification, nothing is removed. Returns what was removed.
///
/// # Errors
/// [`crate::Kind::Io`].
pub fn prune(disk: &dyn Disk, root: &Path, keep_last: usize, best: Option<&Path>) -> Result<Vec<PathBuf>> {
    let whole = |dir: &Path| Manifest::read(dir).and_then(|manifest| manifest.check_sizes(dir)).is_ok();
    let checkpoints = in_place(root)?;
    let kept: Vec<_> = checkpoints.iter().filter(|(_, dir)| whole(dir)).take(keep_last.max(1)).collect();
    let Some((oldest_kept, _)) = kept.last() else { return Ok(Vec::new()) };
    let best = best.and_then(Path::file_name);
    let goes = |(step, dir): &&(u64, PathBuf)| step < oldest_kept && dir.file_name() != best;
    let going: Vec<_> = checkpoints.iter().filter(goes).map(|(_, dir)| dir.clone()).collect();
    if going.is_empty() || !kept.iter().any(|(_, dir)| verify(dir).is_ok()) {
        return Ok(Vec::new());
    }
    for dir in &going {
        // Under another name first: a folder that is half removed must not look like a checkpoint.
        let aside = beside(dir, "del");
        disk.rename(dir, &aside)
            .and_then(|()| disk.remove(&aside))
            .map_err(|error| Error::io("remove", dir, &error))?;
    }
    Ok(going)
}

/// Removes what runs that died left half-written in `root`, and puts back what they had moved aside. The caller holds
/// the directory's lock: nobody else is writing. Returns what was removed.
///
/// # Errors
/// [`crate::Kind::Io`].
pub fn clean_stale(disk: &dyn Disk, root: &Path) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    let names: BTreeSet<String> = names(root)?.into_iter().collect();
    for name in &names {
        let path = root.join(name);
        match moved_aside(name) {
            Some((stem, "old")) if !names.contains(stem) => {
                disk.rename(&path, &root.join(stem)).map_err(|error| Error::io("rename", &path, &error))?;
            }
            Some((_, "old" | "tmp" | "del")) => {
                disk.remove(&path).map_err(|error| Error::io("remove", &path, &error))?;
                removed.push(path);
            }
            _ => {}
        }
    }
    Ok(removed)
}

/// Lets `root/NAME` (`latest`, `best`) name a checkpoint: a text file of one line. Only a complete one is accepted.
///
/// # Errors
/// [`crate::Kind::Checkpoint`] where it is not complete; [`crate::Kind::Io`].
pub fn point(disk: &dyn Disk, root: &Path, name: &str, dir: &Path) -> Result<()> {
    Manifest::read(dir)?.check_sizes(dir)?;
    let target = dir.file_name().unwrap_or_default().to_string_lossy();
    replace_file(disk, &root.join(name), &format!("{target}\n"))
}

/// The checkpoint that `root/NAME` names, if it is there and complete.
pub fn pointed(root: &Path, name: &str) -> Option<PathBuf> {
    let path = root.join(name);
    if fs::metadata(&path).ok()?.len() > 256 {
        return None;
    }
    let text = fs::read_to_string(path).ok()?;
    let target = text.trim_end();
    step_of(target)?;
    let dir = root.join(target);
    verify(&dir).ok().map(|_| dir)
}

/// Refuses to begin writing `bytes` where they do not fit.
///
/// # Errors
/// [`crate::Kind::Io`], with needed and free bytes.
pub fn preflight(path: &Path, bytes: u64) -> Result<()> {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let free = free_bytes(existing).map_err(|error| Error::io("inspect", existing, &error))?;
    if free >= bytes {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    Err(Error::new(
        crate::Kind::Io,
        format!("{}: a checkpoint needs {} MiB, the disk has {} MiB free", path.display(), mib(bytes), free >> 20),
    )
    .hint("free some space, set another train.output_dir, or lower train.save_total_limit"))
}

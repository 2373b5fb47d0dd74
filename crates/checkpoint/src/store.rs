//! Manages the checkpoints in an output directory: finds the newest complete one, removes old ones, and cleans up after
//! killed runs.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::manifest::{Complete, Manifest, verify};
use super::own_files::{discard, foreign_in, replace_file};
use super::publish::beside;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::{Disk, FreeSpace, free_space};
use tunesmith_base::files::{self, temporary};
use tunesmith_base::words::count;

/// The folder of a step's checkpoint.
pub fn checkpoint_dir(root: &Path, step: u64) -> PathBuf {
    root.join(format!("checkpoint-{step:06}"))
}

/// The step in a folder's name: 200 in `checkpoint-000200`.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("checkpoint-")?;
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// Names in the output directory, besides checkpoints, that a run replaces.
const REPLACED: [&str; 7] =
    ["latest", "best", "adapter", "model", "backend.json", "config.resolved.yaml", "report.html"];

/// Why a file or folder of a run has a temporary name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Aside {
    /// It was being written: `NAME.tmp-PID`, or a file's [temporary name](temporary::target_name).
    Unfinished,
    /// It was being replaced: `NAME.old-PID`.
    Replaced,
    /// It was being removed: `NAME.del-PID`.
    Removed,
}

/// Splits a temporary name into the proper name and the reason. `None` for any other name.
fn moved_aside(name: &str) -> Option<(String, Aside)> {
    let (proper, aside) = if let Some(proper) = temporary::target_name(name) {
        (proper, Aside::Unfinished)
    } else {
        let (proper, rest) = name.rsplit_once('.')?;
        let (kind, pid) = rest.split_once('-')?;
        let aside = match kind {
            "old" => Aside::Replaced,
            "del" => Aside::Removed,
            _ => return None,
        };
        let is_number = !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| (proper.to_owned(), aside))?
    };
    (step_of(&proper).is_some() || REPLACED.contains(&&*proper)).then_some((proper, aside))
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

/// The newest complete checkpoint, if there is one, and the newer damaged ones with their errors.
pub(crate) type Newest = (Option<Complete>, Vec<(PathBuf, Error)>);

/// Finds the newest complete checkpoint. Also returns the newer ones that are damaged, with the reasons; a checkpoint that
/// `latest` names and that is missing counts as damaged.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`]: the directory cannot be read.
pub fn newest_complete(root: &Path) -> Result<Newest> {
    // A checkpoint that was being replaced when its run was killed still counts, after the one in its place.
    let aside = |name: &String| match moved_aside(name) {
        Some((proper, Aside::Replaced)) => Some((step_of(&proper)?, false, root.join(name))),
        _ => Some((step_of(name)?, true, root.join(name))),
    };
    let mut candidates: Vec<_> = names(root)?.iter().filter_map(aside).collect();
    candidates.sort_by(|a, b| b.cmp(a));
    let mut damaged = Vec::new();
    if let Some(latest) = named(root, "latest") {
        let step = latest.file_name().and_then(|name| step_of(name.to_str()?));
        if candidates.first().is_none_or(|(newest, ..)| step > Some(*newest)) {
            let gone = format!("{}: is named by {}, but gone", latest.display(), root.join("latest").display());
            let error = Error::checkpoint(gone).hint("put it back, or remove that file to do without it");
            damaged.push((latest, error));
        }
    }
    for (_, _, dir) in candidates {
        match verify(&dir) {
            Ok(complete) => return Ok((Some(complete), damaged)),
            Err(error) => damaged.push((dir, error)),
        }
    }
    Ok((None, damaged))
}

/// Whether a folder has every file of its manifest in the right size. Does not check hashes.
pub fn is_whole(dir: &Path) -> bool {
    Manifest::read(dir).and_then(|manifest| manifest.check_sizes(dir)).is_ok()
}

/// The newest checkpoint in place that [is whole](is_whole), for messages; `None` if there is none, or the directory cannot be read.
pub fn newest_whole(root: &Path) -> Option<PathBuf> {
    in_place(root).ok()?.into_iter().map(|(_, dir)| dir).find(|dir| is_whole(dir))
}

/// Removes old checkpoints and returns them. The newest `keep_last` stay, and so do `best` and folders with files of
/// someone else.
///
/// Nothing is removed unless one of the remaining ones is known to be good: it is `written`, which this process has
/// just saved, or it passes full verification.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn prune(
    disk: &dyn Disk,
    root: &Path,
    keep_last: usize,
    best: Option<&Path>,
    written: Option<&Path>,
) -> Result<Vec<PathBuf>> {
    let checkpoints = in_place(root)?;
    let kept: Vec<_> = checkpoints.iter().filter(|(_, dir)| is_whole(dir)).take(keep_last.max(1)).collect();
    let Some((oldest_kept, _)) = kept.last() else { return Ok(Vec::new()) };
    let best = best.and_then(Path::file_name);
    let ours = |dir: &Path| foreign_in(dir).is_ok_and(|foreign| foreign.is_none());
    let goes = |(step, dir): &&(u64, PathBuf)| step < oldest_kept && dir.file_name() != best && ours(dir);
    let going: Vec<_> = checkpoints.iter().filter(goes).map(|(_, dir)| dir.clone()).collect();
    let good = |dir: &PathBuf| Some(dir.as_path()) == written || verify(dir).is_ok();
    if going.is_empty() || !kept.iter().any(|(_, dir)| good(dir)) {
        return Ok(Vec::new());
    }
    for dir in &going {
        // Renamed first: a folder that is half removed must not look like a checkpoint.
        let aside = beside(dir, "del");
        disk.rename(dir, &aside)
            .and_then(|()| discard(disk, &aside, dir))
            .map_err(|error| Error::io("remove", dir, &error))?;
    }
    Ok(going)
}

/// Removes half-written files and folders of killed runs from `root`, and returns them. A folder that was moved aside returns to
/// its place, unless a good one is there. The caller holds the directory's lock, so nobody else is writing.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn clean_stale(disk: &dyn Disk, root: &Path) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    let names: BTreeSet<String> = names(root)?.into_iter().collect();
    let rename = |from: &Path, to: &Path| disk.rename(from, to).map_err(|error| Error::io("rename", from, &error));
    for name in &names {
        let Some((proper, aside)) = moved_aside(name) else { continue };
        let (path, place) = (root.join(name), root.join(&proper));
        let stale = if aside == Aside::Replaced && !names.contains(&proper) {
            rename(&path, &place)?;
            continue;
        } else if aside == Aside::Replaced && verify(&place).is_err() && verify(&path).is_ok() {
            let damaged = beside(&place, "del");
            rename(&place, &damaged)?;
            rename(&path, &place)?;
            damaged
        } else {
            path
        };
        let is_file = fs::symlink_metadata(&stale).is_ok_and(|metadata| metadata.is_file());
        let kept = if is_file { disk.remove(&stale).map(|()| None) } else { discard(disk, &stale, &place) };
        if kept.map_err(|error| Error::io("remove", &stale, &error))?.is_none() {
            removed.push(stale);
        }
    }
    Ok(removed)
}

/// Writes the text file `root/NAME` (`latest`, `best`), which names a complete checkpoint. Without a checkpoint,
/// removes the file. Anything but a regular file stays as it is.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: the checkpoint is not complete; [`tunesmith_base::Kind::Io`].
pub fn write_pointer(disk: &dyn Disk, root: &Path, name: &str, dir: Option<&Path>) -> Result<()> {
    let path = root.join(name);
    let Some(dir) = dir else {
        // Something other than a regular file is not the program's, so it is not removed.
        return if path.exists() && files::obstacle(&path).is_none() {
            disk.remove(&path).map_err(|error| Error::io("remove", &path, &error))
        } else {
            Ok(())
        };
    };
    Manifest::read(dir)?.check_sizes(dir)?;
    // Someone put a FIFO, a folder or a link there. The checkpoint itself is complete, and a run that watches its files
    // reports this.
    if files::obstacle(&path).is_some() {
        return Ok(());
    }
    let target = dir.file_name().unwrap_or_default().to_string_lossy();
    replace_file(disk, &path, &format!("{target}\n"))
}

/// The checkpoint that the file `root/NAME` names, even if that folder does not exist.
pub fn named(root: &Path, name: &str) -> Option<PathBuf> {
    let path = root.join(name);
    let text = files::read_own_text(&path, 256).ok()?;
    let target = text.trim_end();
    step_of(target)?;
    Some(root.join(target))
}

/// Resolves a path that the user gives: a folder stays as it is, and a file such as `runs/my-run/best` becomes the
/// folder that it names.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: the file does not name a checkpoint.
pub fn followed(path: &Path) -> Result<PathBuf> {
    if !path.is_file() {
        return Ok(path.to_owned());
    }
    let parent = path.parent().unwrap_or(Path::new(""));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    named(parent, &name).ok_or_else(|| {
        Error::checkpoint(format!("{}: a file that names no checkpoint", path.display()))
            .hint("name a checkpoint-… folder, or a run's file `latest` or `best`")
    })
}

/// Checks that the disk at `path` has room for `bytes` in `files` files and folders.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`], with the needed and the free space.
pub fn preflight(path: &Path, bytes: u64, files: u64) -> Result<()> {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let free = free_space(existing).map_err(|error| Error::io("inspect", existing, &error))?;
    fits(free, path, bytes, files)
}

fn fits(free: FreeSpace, path: &Path, bytes: u64, files: u64) -> Result<()> {
    let hint = "free some space, name another output, or let a run keep fewer checkpoints (train.save_total_limit)";
    let refuse =
        |what: String| Err(Error::new(tunesmith_base::Kind::Io, format!("{}: {what}", path.display())).hint(hint));
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if free.bytes < bytes {
        return refuse(format!("saving needs {} MiB, the disk has {} MiB free", mib(bytes), free.bytes >> 20));
    }
    match free.files {
        Some(left) if left < files => {
            refuse(format!("saving needs {}, the disk has room for {left} (inodes)", count(files, "file")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_counted_in_bytes_and_in_files() {
        let disk = |bytes, files| FreeSpace { bytes, files };
        let asks = |room| fits(room, Path::new("out"), 1 << 20, 9).map_err(|error| error.to_string());
        assert_eq!(asks(disk(1 << 20, None)), Ok(()));
        assert_eq!(asks(disk(1 << 20, Some(9))), Ok(()));
        assert!(asks(disk((1 << 20) - 1, None)).unwrap_err().contains("needs 1 MiB, the disk has 0 MiB free"));
        assert!(asks(disk(1 << 30, Some(8))).unwrap_err().contains("needs 9 files, the disk has room for 8"));
    }
}

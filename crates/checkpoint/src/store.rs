//! The checkpoints in an output directory: which is the newest good one, which may go, what dead runs left behind.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::atomic::{Complete, Manifest, beside, replace_file, verify};
use super::disk::{Disk, Room, room};
use super::ours::{discard, foreign_in};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_base::words::count;

/// The folder of a step's checkpoint.
pub fn checkpoint_dir(root: &Path, step: u64) -> PathBuf {
    root.join(format!("checkpoint-{step:06}"))
}

/// The step in `checkpoint-000200`.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("checkpoint-")?;
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// What a run replaces in its output directory beside checkpoints.
const REPLACED: [&str; 7] =
    ["latest", "best", "adapter", "model", "backend.json", "config.resolved.yaml", "report.html"];

/// `NAME.KIND-PID` as its name and kind.
fn moved_aside(name: &str) -> Option<(&str, &str)> {
    let (stem, rest) = name.rsplit_once('.')?;
    let (kind, pid) = rest.split_once('-')?;
    let ours = step_of(stem).is_some() || REPLACED.contains(&stem);
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
pub type Newest = (Option<Complete>, Vec<(PathBuf, Error)>);

/// The newest checkpoint that is complete, and the newer ones that are not, with what is wrong with them; among those
/// also the one that `latest` names, if it has gone.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`] where the directory cannot be read.
pub fn newest_complete(root: &Path) -> Result<Newest> {
    // One that was being replaced when its run died still counts, after the one in its place.
    let aside = |name: &String| match moved_aside(name) {
        Some((stem, "old")) => Some((step_of(stem)?, false, root.join(name))),
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

/// Whether every file of a folder's manifest is there in its size.
pub fn is_whole(dir: &Path) -> bool {
    Manifest::read(dir).and_then(|manifest| manifest.check_sizes(dir)).is_ok()
}

/// Removes older checkpoints: the newest `keep_last` stay, and `best`. As long as none of those that stay is `written`,
/// by this process and just now, or passes full verification, nothing is removed. Folders with files that are not the
/// program's stay. Returns what was removed.
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
        // Under another name first: a folder that is half removed must not look like a checkpoint.
        let aside = beside(dir, "del");
        disk.rename(dir, &aside)
            .and_then(|()| discard(disk, &aside, dir))
            .map_err(|error| Error::io("remove", dir, &error))?;
    }
    Ok(going)
}

/// Removes what runs that died left half-written in `root`, and puts back what they had moved aside, unless what took
/// its place is good. The caller holds the directory's lock: nobody else is writing. Returns what was removed.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn clean_stale(disk: &dyn Disk, root: &Path) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    let names: BTreeSet<String> = names(root)?.into_iter().collect();
    let rename = |from: &Path, to: &Path| disk.rename(from, to).map_err(|error| Error::io("rename", from, &error));
    for name in &names {
        let path = root.join(name);
        let stale = match moved_aside(name) {
            Some((stem, "old")) => {
                let place = root.join(stem);
                if !names.contains(stem) {
                    rename(&path, &place)?;
                    continue;
                }
                if verify(&place).is_err() && verify(&path).is_ok() {
                    let damaged = beside(&place, "del");
                    rename(&place, &damaged)?;
                    rename(&path, &place)?;
                    damaged
                } else {
                    path
                }
            }
            Some((_, "tmp" | "del")) => path,
            _ => continue,
        };
        let place = root.join(moved_aside(name).map_or(name.as_str(), |(stem, _)| stem));
        let is_file = fs::symlink_metadata(&stale).is_ok_and(|metadata| metadata.is_file());
        let kept = if is_file { disk.remove(&stale).map(|()| None) } else { discard(disk, &stale, &place) };
        if kept.map_err(|error| Error::io("remove", &stale, &error))?.is_none() {
            removed.push(stale);
        }
    }
    Ok(removed)
}

/// Lets `root/NAME` (`latest`, `best`) name a checkpoint: a text file of one line. Only a complete one is accepted;
/// for none the file is removed. What is no regular file stays as it is.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`] where it is not complete; [`tunesmith_base::Kind::Io`].
pub fn point(disk: &dyn Disk, root: &Path, name: &str, dir: Option<&Path>) -> Result<()> {
    let path = root.join(name);
    let Some(dir) = dir else {
        // What is no regular file is not the program's to remove.
        return if path.exists() && files::obstacle(&path).is_none() {
            disk.remove(&path).map_err(|error| Error::io("remove", &path, &error))
        } else {
            Ok(())
        };
    };
    Manifest::read(dir)?.check_sizes(dir)?;
    // Somebody put a FIFO, a folder or a link there. The checkpoint is whole all the same, and a run that watches its
    // files reports it.
    if files::obstacle(&path).is_some() {
        return Ok(());
    }
    let target = dir.file_name().unwrap_or_default().to_string_lossy();
    replace_file(disk, &path, &format!("{target}\n"))
}

/// The checkpoint that the file `root/NAME` names, whether or not it is there.
pub fn named(root: &Path, name: &str) -> Option<PathBuf> {
    let path = root.join(name);
    let text = files::read_own_text(&path, 256).ok()?;
    let target = text.trim_end();
    step_of(target)?;
    Some(root.join(target))
}

/// The folder that a user means by `path`: itself, or what it names if it is a file such as `runs/my-run/best`.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: a file that names no checkpoint.
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

/// Refuses to begin writing `bytes` in so many files and folders where they do not fit.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`], with what is needed and what is free.
pub fn preflight(path: &Path, bytes: u64, files: u64) -> Result<()> {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let room = room(existing).map_err(|error| Error::io("inspect", existing, &error))?;
    fits(room, path, bytes, files)
}

fn fits(room: Room, path: &Path, bytes: u64, files: u64) -> Result<()> {
    let hint = "free some space, set another train.output_dir, or lower train.save_total_limit";
    let refuse =
        |what: String| Err(Error::new(tunesmith_base::Kind::Io, format!("{}: {what}", path.display())).hint(hint));
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if room.bytes < bytes {
        return refuse(format!("saving needs {} MiB, the disk has {} MiB free", mib(bytes), room.bytes >> 20));
    }
    match room.files {
        Some(free) if free < files => {
            refuse(format!("saving needs {}, the disk has room for {free} (inodes)", count(files, "file")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_counted_in_bytes_and_in_files() {
        let disk = |bytes, files| Room { bytes, files };
        let asks = |room| fits(room, Path::new("out"), 1 << 20, 9).map_err(|error| error.to_string());
        assert_eq!(asks(disk(1 << 20, None)), Ok(()));
        assert_eq!(asks(disk(1 << 20, Some(9))), Ok(()));
        assert!(asks(disk((1 << 20) - 1, None)).unwrap_err().contains("needs 1 MiB, the disk has 0 MiB free"));
        assert!(asks(disk(1 << 30, Some(8))).unwrap_err().contains("needs 9 files, the disk has room for 8"));
    }
}

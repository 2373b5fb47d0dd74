//! Writes a folder completely or not at all. The files go into a folder with a temporary name; each is synced and hashed.
//! The manifest comes last. A rename puts the folder in place.
//!
//! ```text
//! checkpoint-000200.tmp-PID/   every file: write, fsync
//!   manifest.json              size and BLAKE3 of each, written last, fsync; then fsync of the folder
//! rename -> checkpoint-000200; fsync of the parent; only then is anything older removed
//! ```
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::layout::MANIFEST;
use super::manifest::{FileSum, Manifest, write_json};
use super::own_files::{discard, foreign_in, kept_name};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::{Disk, DiskFile};
use tunesmith_base::files::temporary::{self, TemporaryFolder, without_signals};
use tunesmith_base::files::{self, atomic, parent};

/// A folder with a temporary name beside its final place, open for writing.
pub struct StagedFolder<'d> {
    disk: &'d dyn Disk,
    dir: PathBuf,
    files: BTreeMap<String, FileSum>,
    /// The names of all files that were begun, whole or not.
    begun: BTreeSet<String>,
    hashing: Duration,
}

impl StagedFolder<'_> {
    /// Writes the file `name` with what `fill` streams, syncs it, and adds its size and hash to the manifest.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`].
    pub fn write(&mut self, name: &str, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let path = self.dir.join(name);
        self.begun.insert(name.to_owned());
        let sum = self.write_summed(&path, fill).map_err(|error| Error::io("write", &path, &error))?;
        self.files.insert(name.to_owned(), sum);
        Ok(())
    }

    /// Writes `value` as indented JSON.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`].
    pub fn write_json(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        self.write(name, |writer| write_json(writer, value))
    }

    /// Copies a file in.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`].
    pub fn copy(&mut self, name: &str, from: &Path) -> Result<()> {
        let mut source = files::open_member(from).map_err(|error| Error::io("open", from, &error))?;
        self.write(name, |writer| io::copy(&mut source, writer).map(drop))
    }

    fn write_summed(
        &mut self,
        path: &Path,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<FileSum> {
        let (file, hasher) = (self.disk.create(path)?, blake3::Hasher::new());
        let mut file = Summing { file, hasher, bytes: 0, hashing: Duration::ZERO };
        fill(&mut file)?;
        file.file.sync()?;
        self.hashing += file.hashing;
        Ok(FileSum { bytes: file.bytes, blake3: file.hasher.finalize().to_hex().to_string() })
    }

    /// Writes the manifest and makes the folder's entries durable.
    fn seal(&mut self) -> Result<()> {
        let path = self.dir.join(MANIFEST);
        self.begun.insert(MANIFEST.to_owned());
        let manifest = Manifest::of(self.files.clone());
        let sealed = self.write_summed(&path, |writer| write_json(writer, &manifest));
        sealed.and_then(|_| self.disk.sync_dir(&self.dir)).map_err(|error| Error::io("write", &path, &error))
    }

    /// Removes the folder after an error. Whatever the names of its files are, those that were written here go; with any
    /// other in it, the folder is set aside.
    fn remove(&self, target: &Path) {
        let is_ours = |entry: io::Result<fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.file_name().to_str().is_some_and(|name| self.begun.contains(name)))
        };
        // The first error is the one to report. What cannot be removed now is removed at the next start.
        if fs::read_dir(&self.dir).is_ok_and(|mut entries| entries.all(is_ours)) {
            let _ = self.disk.remove(&self.dir);
        } else if self.dir.exists() {
            let _ = discard(self.disk, &self.dir, target);
        }
    }
}

/// Hashes and counts the bytes on their way to a file.
struct Summing {
    file: Box<dyn DiskFile>,
    hasher: blake3::Hasher,
    bytes: u64,
    hashing: Duration,
}

impl Write for Summing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        let began = Instant::now();
        self.hasher.update(&bytes[..written]);
        self.hashing += began.elapsed();
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// What [`publish_folder`] did besides writing the folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Published {
    /// Time spent on the hashes of the manifest.
    pub hashing: Duration,
    /// The new name of an older folder or file in the same place that has files of someone else; such files are never
    /// removed.
    pub kept: Option<PathBuf>,
}

/// What may stand at the place of a new folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Older {
    /// Anything: the place belongs to a run that holds the lock of its folder.
    Any,
    /// A folder that tunesmith wrote as a whole: the user asked for its replacement.
    Ours,
    /// Nothing, or an empty folder.
    None,
}

/// Makes the folder `target` from what `fill` writes, and adds a manifest. An older folder at `target` is moved aside,
/// and removed as soon as the new one is durable. If the older one is a file or a link, or has files of someone else,
/// it keeps its new name. After an error the older folder is back in its place, and nothing new is left.
///
/// # Errors
/// The errors of `fill`; [`tunesmith_base::Kind::Io`].
pub fn publish_folder(
    disk: &dyn Disk,
    target: &Path,
    fill: impl FnOnce(&mut StagedFolder<'_>) -> Result<()>,
) -> Result<Published> {
    publish(disk, target, Older::Any, fill)
}

/// As [`publish_folder`], for a folder that the user has named. What has appeared there while `fill` wrote stays: with
/// `overwrite`, only a folder is replaced in which every file is tunesmith's, and without it nothing.
///
/// # Errors
/// As [`publish_folder`]; [`tunesmith_base::Kind::Config`]: something is there that stays.
pub fn publish_output(
    disk: &dyn Disk,
    target: &Path,
    overwrite: bool,
    fill: impl FnOnce(&mut StagedFolder<'_>) -> Result<()>,
) -> Result<Published> {
    publish(disk, target, if overwrite { Older::Ours } else { Older::None }, fill)
}

fn publish(
    disk: &dyn Disk,
    target: &Path,
    older: Older,
    fill: impl FnOnce(&mut StagedFolder<'_>) -> Result<()>,
) -> Result<Published> {
    let dir = beside(target, "tmp");
    if dir.exists() {
        // Left by an earlier process with the same number. A living one would hold the lock of the output directory.
        discard(disk, &dir, target).map_err(|error| Error::io("remove", &dir, &error))?;
    }
    let _temporary = TemporaryFolder::create(disk, &dir).map_err(|error| Error::io("create", &dir, &error))?;
    let (files, begun) = (BTreeMap::new(), BTreeSet::new());
    let mut staging = StagedFolder { disk, dir: dir.clone(), files, begun, hashing: Duration::ZERO };
    let done = fill(&mut staging)
        .and_then(|()| staging.seal())
        .and_then(|()| without_signals(|| put_in_place(disk, &dir, target, older)));
    if done.is_err() {
        staging.remove(target);
    }
    done.map(|kept| Published { hashing: staging.hashing, kept })
}

/// The error where something has appeared at `target` that is not replaced.
fn is_there(target: &Path, older: Older) -> Error {
    let error = Error::config(format!("{} is there already: it was written while this command ran", target.display()));
    error.hint(match older {
        Older::None => "name another folder with --output, or replace it with --overwrite",
        _ => "it is not replaced, since tunesmith did not write all of it: name another folder with --output",
    })
}

/// Renames `staged` to `target`. If an older `target` has files of someone else, returns the other name under which it
/// stays.
fn put_in_place(disk: &dyn Disk, staged: &Path, target: &Path, older: Older) -> Result<Option<PathBuf>> {
    let failed = |path: &Path, error: &io::Error| Error::io("rename", path, error);
    let sync = || atomic::sync_parent(disk, target).map_err(|error| Error::io("sync", parent(target), &error));
    if older == Older::None {
        // The system renames a folder to the name of an empty folder, and of nothing else.
        return match disk.rename(staged, target) {
            Ok(()) => sync().map(|()| None),
            Err(_) if fs::symlink_metadata(target).is_ok() => Err(is_there(target, older)),
            Err(error) => Err(failed(staged, &error)),
        };
    }
    let found = fs::symlink_metadata(target).is_ok();
    let is_foreign = |path: &Path| match foreign_in(path) {
        Ok(file) => Ok(file.is_some()),
        Err(error) => Err(Error::io("look into", path, &error)),
    };
    let foreign = is_foreign(target)?;
    if foreign && older == Older::Ours {
        return Err(is_there(target, older));
    }
    let kept = foreign.then(|| kept_name(target));
    let aside = kept.clone().or_else(|| found.then(|| beside(target, "old")));
    if let Some(aside) = &aside {
        disk.rename(target, aside).map_err(|error| failed(target, &error))?;
    }
    // What came into the folder since it was looked at is not replaced either.
    let late = older == Older::Ours && aside.as_deref().is_some_and(|aside| is_foreign(aside).unwrap_or(true));
    let put = if late {
        Err(is_there(target, older))
    } else {
        disk.rename(staged, target).map_err(|error| failed(staged, &error))
    };
    if let Err(error) = put {
        if let Some(aside) = &aside {
            let _ = disk.rename(aside, target); // if this fails too, the next start does it
        }
        return Err(error);
    }
    sync()?;
    match aside {
        Some(old) if kept.is_none() => discard(disk, &old, target).map_err(|error| Error::io("remove", &old, &error)),
        _ => Ok(kept),
    }
}

/// Cleans up after killed processes that were writing the folder `target`. A half-written folder is removed. A folder
/// that was moved aside returns to its place if that is free, and is removed otherwise. Folders of living processes
/// stay.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn recover_folder(disk: &dyn Disk, target: &Path) -> Result<()> {
    temporary::sweep(target);
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for entry in fs::read_dir(parent(target)).into_iter().flatten().flatten() {
        let found = entry.file_name().to_string_lossy().into_owned();
        if !temporary::is_replaced(&found, &name) {
            continue;
        }
        let old = entry.path();
        let written_now = || {
            let staged = entry.path().with_file_name(found.replace(".old-", ".tmp-"));
            staged.exists() && temporary::abandoned(&staged).is_none()
        };
        if !target.exists() && !written_now() {
            disk.rename(&old, target).map_err(|error| Error::io("rename", &old, &error))?;
        } else if target.exists()
            && let Some(_held) = temporary::abandoned(target)
        {
            discard(disk, &old, target).map_err(|error| Error::io("remove", &old, &error))?;
        }
    }
    Ok(())
}

/// `target` with `.KIND-PID` after its name.
pub(super) fn beside(target: &Path, kind: &str) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{kind}-{}", std::process::id()));
    target.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_base::Kind;
    use tunesmith_base::files::disk::RealDisk;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn broken(staging: &mut StagedFolder<'_>, names: &[&str]) -> Result<()> {
        for name in names {
            staging.write(name, |writer| writer.write_all(b"half"))?;
        }
        staging.write("of any name", |writer| {
            writer.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        })
    }

    #[test]
    fn a_folder_that_fails_leaves_nothing_whatever_its_files_are_called() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        for _ in 0..2 {
            let fill = |staging: &mut StagedFolder<'_>| broken(staging, &["README.md", "notes", "state.json"]);
            publish_folder(&RealDisk, &target, fill).unwrap_err();
            assert!(names(root.path()).is_empty(), "{:?}", names(root.path()));
        }
        // A file that someone else has put there stays.
        let mine = |staging: &mut StagedFolder<'_>| {
            fs::write(staging.dir.join("mine"), "mine").unwrap();
            broken(staging, &["README.md"])
        };
        publish_folder(&RealDisk, &target, mine).unwrap_err();
        assert_eq!(names(root.path()), ["out.kept-1"]);
        assert_eq!(fs::read_to_string(root.path().join("out.kept-1/mine")).unwrap(), "mine");
    }

    #[test]
    fn an_output_that_appeared_meanwhile_stays() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("out");
        let write = |overwrite: bool, number: i32, meanwhile: &dyn Fn()| {
            publish_output(&RealDisk, &target, overwrite, |staging| {
                meanwhile();
                staging.write_json("state.json", &number)
            })
        };
        let found = || fs::read_to_string(target.join("state.json")).unwrap().trim().to_owned();
        let refused = |overwrite: bool, meanwhile: &dyn Fn()| {
            let error = write(overwrite, 9, meanwhile).unwrap_err();
            assert!(error.kind() == Kind::Config && error.message().contains("is there already"), "{error}");
            assert_eq!(names(root.path()), ["out"], "nothing else is left");
        };
        // An empty folder is no output yet.
        fs::create_dir(&target).unwrap();
        write(false, 1, &|| {}).unwrap();
        assert_eq!(found(), "1");
        refused(false, &|| {});
        write(true, 2, &|| {}).unwrap();
        assert_eq!(found(), "2");
        fs::remove_dir_all(&target).unwrap();
        // As another process, whose temporary folder has another name.
        refused(false, &|| {
            let other = root.path().join("other");
            publish_output(&RealDisk, &other, false, |staging| staging.write_json("state.json", &3)).unwrap();
            fs::rename(&other, &target).unwrap();
        });
        assert_eq!(found(), "3");
        // A run that begins there, and a file, are no folders that this program wrote as a whole.
        for overwrite in [false, true] {
            fs::remove_dir_all(&target).unwrap();
            refused(overwrite, &|| {
                fs::create_dir(&target).unwrap();
                fs::write(target.join("config.resolved.yaml"), "").unwrap();
            });
            fs::remove_dir_all(&target).unwrap();
            refused(overwrite, &|| fs::write(&target, "mine").unwrap());
            fs::remove_file(&target).unwrap();
            fs::create_dir(&target).unwrap();
        }
    }
}

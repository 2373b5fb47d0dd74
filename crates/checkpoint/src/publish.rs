//! Writes a folder completely or not at all. The files go into a folder with a temporary name; each is synced and hashed.
//! The manifest comes last. A rename puts the folder in place.
//!
//! ```text
//! checkpoint-000200.tmp-PID/   every file: write, fsync
//!   manifest.json              size and BLAKE3 of each, written last, fsync; then fsync of the folder
//! rename -> checkpoint-000200; fsync of the parent; only then is anything older removed
//! ```
use std::collections::BTreeMap;
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
    hashing: Duration,
}

impl StagedFolder<'_> {
    /// Writes the file `name` with what `fill` streams, syncs it, and adds its size and hash to the manifest.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`].
    pub fn write(&mut self, name: &str, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let path = self.dir.join(name);
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
        let manifest = Manifest::of(self.files.clone());
        let sealed = self.write_summed(&path, |writer| write_json(writer, &manifest));
        sealed.and_then(|_| self.disk.sync_dir(&self.dir)).map_err(|error| Error::io("write", &path, &error))
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
    let staged = beside(target, "tmp");
    if staged.exists() {
        // Left by an earlier process with the same number. A living one would hold the lock of the output directory.
        discard(disk, &staged, target).map_err(|error| Error::io("remove", &staged, &error))?;
    }
    let _temporary = TemporaryFolder::create(disk, &staged).map_err(|error| Error::io("create", &staged, &error))?;
    let mut staging = StagedFolder { disk, dir: staged.clone(), files: BTreeMap::new(), hashing: Duration::ZERO };
    let done = fill(&mut staging)
        .and_then(|()| staging.seal())
        .and_then(|()| without_signals(|| put_in_place(disk, &staged, target)));
    if done.is_err() && staged.exists() {
        // The first error is the one to report. What cannot be removed now is removed at the next start.
        let _ = discard(disk, &staged, target);
    }
    done.map(|kept| Published { hashing: staging.hashing, kept })
}

/// Renames `staged` to `target`. If an older `target` has files of someone else, returns the other name under which it
/// stays.
fn put_in_place(disk: &dyn Disk, staged: &Path, target: &Path) -> Result<Option<PathBuf>> {
    let is_there = fs::symlink_metadata(target).is_ok();
    let foreign = foreign_in(target).map_err(|error| Error::io("look into", target, &error))?.is_some();
    let kept = foreign.then(|| kept_name(target));
    let aside = kept.clone().or_else(|| is_there.then(|| beside(target, "old")));
    if let Some(aside) = &aside {
        disk.rename(target, aside).map_err(|error| Error::io("rename", target, &error))?;
    }
    if let Err(error) = disk.rename(staged, target) {
        if let Some(aside) = &aside {
            let _ = disk.rename(aside, target); // if this fails too, the next start does it
        }
        return Err(Error::io("rename", staged, &error));
    }
    atomic::sync_parent(disk, target).map_err(|error| Error::io("sync", parent(target), &error))?;
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

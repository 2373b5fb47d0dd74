//! Replaces a file in one step: writes a temporary file in the same folder, syncs it (`fsync`), renames it over the old
//! one, and syncs the folder. After a crash or a loss of power the file is the old one or the new one, never a part.
//!
//! [`write()`] does this for bytes, [`AtomicFile`] for streamed content. For an output that the user has named, use
//! [`OutputFile`](super::output::OutputFile).
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::disk::{Disk, DiskFile, RealDisk};
use super::parent;
use super::temporary::Temporary;

/// A file that is being written under a temporary name. Dropping it removes the file unless it was committed.
pub struct AtomicFile<'d> {
    file: BufWriter<Box<dyn DiskFile>>,
    disk: &'d dyn Disk,
    temporary: Temporary<'d>,
    target: PathBuf,
    created: CreatedFolders,
}

/// Folders that were created for the file, innermost first. Dropping this removes those that are empty.
struct CreatedFolders(Vec<PathBuf>);

impl Drop for CreatedFolders {
    fn drop(&mut self) {
        for folder in &self.0 {
            // Not empty, or gone: then it is not ours to remove.
            let _ = fs::remove_dir(folder);
        }
    }
}

impl AtomicFile<'static> {
    /// Starts the new file `target`, which replaces an existing one when it is committed. Creates its folder.
    ///
    /// # Errors
    /// The system's.
    pub fn create(target: &Path) -> io::Result<Self> {
        Self::create_on(&RealDisk, target)
    }
}

impl<'d> AtomicFile<'d> {
    /// As [`AtomicFile::create`], on another disk: that of a test.
    ///
    /// # Errors
    /// The disk's.
    fn create_on(disk: &'d dyn Disk, target: &Path) -> io::Result<Self> {
        let folder = parent(target);
        let named = folder.ancestors().filter(|path| !path.as_os_str().is_empty());
        let created = CreatedFolders(named.take_while(|path| !path.exists()).map(Path::to_owned).collect());
        fs::create_dir_all(folder)?;
        let (temporary, file) = Temporary::file(disk, target)?;
        let file = BufWriter::with_capacity(1 << 16, file);
        Ok(Self { file, disk, temporary, target: target.to_owned(), created })
    }

    /// The temporary path, where a reader finds what is [synced](Self::sync).
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// The open file. Do not mix direct writes with writes through this type.
    pub fn file(&self) -> &File {
        self.file.get_ref().file()
    }

    /// Waits until everything written is on the device (`fsync`).
    ///
    /// # Errors
    /// The disk's.
    pub fn sync(&mut self) -> io::Result<()> {
        self.file.flush()?;
        self.file.get_mut().sync()
    }

    /// Moves the file to its target: syncs it, renames it, syncs the folder.
    ///
    /// # Errors
    /// The disk's. The old file may then be replaced or not; it is whole in both cases.
    pub fn commit(self) -> io::Result<()> {
        let target = self.target.clone();
        self.commit_as(&target, true)
    }

    /// As [`Self::commit`], to another path on the same file system. Without `replaces`, it fails where something is
    /// there ([`io::ErrorKind::AlreadyExists`]).
    pub(super) fn commit_as(mut self, target: &Path, replaces: bool) -> io::Result<()> {
        self.sync()?;
        let Self { disk, temporary, mut created, .. } = self;
        if replaces {
            temporary.move_to(target)?;
        } else {
            temporary.move_to_free(target)?;
        }
        let created = std::mem::take(&mut created.0);
        sync_parent(disk, target)?;
        created.iter().try_for_each(|folder| sync_parent(disk, folder))
    }

    /// Moves the file to its target without a sync. This is for a cache whose readers detect damage by a hash: a loss
    /// of power may leave any bytes in it.
    ///
    /// # Errors
    /// The disk's.
    pub fn commit_without_sync(mut self) -> io::Result<()> {
        self.file.flush()?;
        let Self { temporary, target, mut created, .. } = self;
        temporary.move_to(&target)?;
        created.0.clear();
        Ok(())
    }
}

impl Write for AtomicFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Makes `bytes` the content of the file `target`; creates its folder.
///
/// # Errors
/// The system's; the old file is then still there.
pub fn write(target: &Path, bytes: &[u8]) -> io::Result<()> {
    write_on(&RealDisk, target, bytes)
}

/// As [`write()`], on another disk: that of a test.
///
/// # Errors
/// The disk's; the old file is then still there.
pub fn write_on(disk: &dyn Disk, target: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = AtomicFile::create_on(disk, target)?;
    file.write_all(bytes)?;
    file.commit()
}

/// Renames a synced file, or a folder whose files are synced, and makes its new name durable.
///
/// # Errors
/// The disk's.
pub fn rename(disk: &dyn Disk, from: &Path, to: &Path) -> io::Result<()> {
    disk.rename(from, to)?;
    sync_parent(disk, to)
}

/// Syncs the folder of `path`, so that a new name in it survives a loss of power.
///
/// # Errors
/// The disk's.
pub fn sync_parent(disk: &dyn Disk, path: &Path) -> io::Result<()> {
    disk.sync_dir(parent(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_or_not_there_and_its_folders_with_it() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("deep/er/rows.jsonl");
        let begin = || AtomicFile::create(&target).unwrap();
        drop(begin());
        assert!(!root.path().join("deep").exists());
        let (mut first, mut second) = (begin(), begin());
        first.write_all(b"first").unwrap();
        second.write_all(b"second").unwrap();
        assert!(!target.exists() && first.path() != second.path());
        first.commit().unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "first");
        second.commit_without_sync().unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "second");
        assert_eq!(fs::read_dir(target.parent().unwrap()).unwrap().count(), 1);
        write(&target, b"third").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "third");
    }
}

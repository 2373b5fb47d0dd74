//! The lock of the output directory: one live run holds an exclusive system lock on `output_dir/.lock`, which names the
//! process. The system releases the lock when the process dies, so a stale file never blocks a run.
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_base::files::disk::RealDisk;

/// The name of the lock file.
const LOCK: &str = ".lock";

/// The lock of an output directory, held until it is dropped. A drop without [`DirLock::keep`] also removes the directories
/// that [`DirLock::acquire`] created, if they are empty.
#[derive(Debug)]
pub struct DirLock {
    file: File,
    directory: PathBuf,
    /// The canonical path of the directory when the lock was acquired.
    real: PathBuf,
    /// The directories that did not exist before, innermost first.
    created: Vec<PathBuf>,
    keep: bool,
}

impl DirLock {
    /// Creates `directory` if needed and acquires its lock.
    ///
    /// # Errors
    /// It cannot be created or written to, or a live process holds it ([`tunesmith_base::Kind::Io`], naming the process).
    pub fn acquire(directory: &Path) -> Result<Self> {
        let created = missing_ancestors(directory);
        std::fs::create_dir_all(directory).map_err(|source| {
            Error::io("create", directory, &source).hint("set train.output_dir to a directory that you may write to")
        })?;
        let path = directory.join(LOCK);
        let refuse = |source: std::io::Error| {
            remove_empty(&created);
            Error::io("write to", &path, &source).hint("set train.output_dir to a directory that you may write to")
        };
        let file = loop {
            let mut file = files::open_to_write(&path, false).map_err(refuse)?;
            match file.try_lock() {
                Ok(()) if files::is_at(&file, &path) => break file,
                Ok(()) => {} // a run that just ended removed the file: open a new one
                Err(std::fs::TryLockError::WouldBlock) => return Err(in_use(directory, &mut file)),
                Err(std::fs::TryLockError::Error(source)) => return Err(Error::io("lock", &path, &source)),
            }
        };
        // Makes the directory durable, so that a power loss cannot remove it with its checkpoints.
        created.iter().try_for_each(|made| files::atomic::sync_parent(&RealDisk, made)).map_err(refuse)?;
        let real = directory.canonicalize().map_err(refuse)?;
        let lock = Self { file, directory: directory.to_owned(), real, created, keep: false };
        lock.write_holder().map_err(|source| Error::io("write", &path, &source))?;
        Ok(lock)
    }

    fn write_holder(&self) -> std::io::Result<()> {
        let mut file = &self.file;
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    }

    /// Whether the directory still contains this lock. It does not if it was removed or moved.
    pub fn is_there(&self) -> bool {
        files::is_at(&self.file, &self.directory.join(LOCK))
    }

    /// Refuses to write if the directory was replaced by a link to another place.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`], naming the target of the link.
    pub fn refuse_link(&self) -> Result<()> {
        match self.directory.canonicalize() {
            Ok(now) if now != self.real => {
                let message = format!(
                    "{} is now a link to {}, not the folder in which the run started: nothing is written there",
                    self.directory.display(),
                    now.display()
                );
                Err(Error::new(tunesmith_base::Kind::Io, message)
                    .hint(format!("earlier checkpoints are where you moved {}", self.real.display())))
            }
            _ => Ok(()),
        }
    }

    /// Keeps the directory when the lock is released, because the run starts to write.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// The lock file and the directories that were created for it, which a refused run removes.
    pub fn leftovers(&self) -> Leftovers {
        Leftovers { lock: self.directory.join(LOCK), created: self.created.clone() }
    }
}

/// The lock file and the directories that [`DirLock::acquire`] created.
#[derive(Debug, Clone)]
pub struct Leftovers {
    lock: PathBuf,
    created: Vec<PathBuf>,
}

impl Leftovers {
    /// Removes the lock file and those created directories that are empty.
    pub fn remove(&self) {
        let _ = std::fs::remove_file(&self.lock);
        remove_empty(&self.created);
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        if !self.is_there() {
            // The directory now belongs to someone else.
        } else if self.keep {
            let _ = std::fs::remove_file(self.directory.join(LOCK));
        } else {
            self.leftovers().remove();
        }
    }
}

fn in_use(directory: &Path, file: &mut File) -> Error {
    let mut holder = String::new();
    // The holder is only for the message; the lock is held even if the file cannot be read.
    let _ = file.read_to_string(&mut holder);
    let holder = holder.lines().next().unwrap_or("unknown");
    let found = format!("output directory {} is in use by a live run (process {holder})", directory.display());
    Error::new(tunesmith_base::Kind::Io, found)
        .hint("wait for it, stop it (it saves and exits), or set another train.output_dir")
}

/// The directories that `create_dir_all` would make, innermost first.
fn missing_ancestors(directory: &Path) -> Vec<PathBuf> {
    let named = directory.ancestors().filter(|path| !path.as_os_str().is_empty());
    named.take_while(|path| !path.exists()).map(Path::to_owned).collect()
}

fn remove_empty(directories: &[PathBuf]) {
    for directory in directories {
        // Fails if the directory is not empty or already gone; then it stays as it is.
        let _ = std::fs::remove_dir(directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_place_of_the_directory_is_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir_all(at("mine")).unwrap();
        let lock = DirLock::acquire(&at("out")).unwrap();
        assert!(lock.is_there() && lock.refuse_link().is_ok());
        std::fs::rename(at("out"), at("moved")).unwrap();
        lock.refuse_link().expect("a new one may be made");
        std::os::unix::fs::symlink(at("mine"), at("out")).unwrap();
        let error = lock.refuse_link().unwrap_err();
        assert!(!lock.is_there() && error.kind() == tunesmith_base::Kind::Io, "{error}");
        assert!(error.message().contains("is now a link to"), "{error}");
    }

    #[test]
    fn a_held_directory_is_refused_by_process_and_freed_on_drop() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("runs/first");
        let lock = DirLock::acquire(&directory).unwrap();
        let refused = DirLock::acquire(&directory).unwrap_err();
        assert!(refused.message().contains(&format!("process {}", std::process::id())), "{refused}");
        assert_eq!(refused.kind(), tunesmith_base::Kind::Io);
        drop(lock);
        assert!(!root.path().join("runs").exists(), "a refused run leaves nothing behind");

        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join(LOCK), "1\n").unwrap();
        let mut lock = DirLock::acquire(&directory).expect("a file that no process locks is stale");
        lock.keep();
        drop(lock);
        assert!(directory.exists() && !directory.join(LOCK).exists());
    }
}

//! A disk for tests, on which a process dies, space runs out or the device fails at any chosen operation.
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tunesmith::files::disk::{Disk, DiskFile, RealDisk};

/// What happens at the fatal operation.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    /// The process dies: no further operation has an effect, and files that were not synced are cut in half.
    Death,
    /// The disk is full from here on: nothing grows, but entries can be renamed and removed.
    Full,
    /// The device fails once.
    Broken,
}

/// A disk that works until an operation of the test's choice.
pub struct FaultyDisk {
    fault: Fault,
    pub inner: Mutex<Inner>,
}

/// What has happened so far.
pub struct Inner {
    /// Operations until the fault.
    left: usize,
    /// Whether the device has failed.
    failed: bool,
    unsynced: BTreeSet<PathBuf>,
    /// What was done: operation and file name.
    pub log: Vec<(&'static str, String)>,
}

impl FaultyDisk {
    /// Fails after `left` operations.
    pub fn new(fault: Fault, left: usize) -> Self {
        Self { fault, inner: Mutex::new(Inner { left, failed: false, unsynced: BTreeSet::new(), log: Vec::new() }) }
    }

    /// Counts an operation; an error from the fatal one on.
    fn count(&self, grows: bool) -> io::Result<()> {
        let mut inner = self.inner.lock().unwrap();
        if inner.left > 0 {
            inner.left -= 1;
            return Ok(());
        }
        if self.fault == Fault::Full && !grows {
            return Ok(());
        }
        if self.fault == Fault::Broken {
            let again = std::mem::replace(&mut inner.failed, true);
            return if again { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) };
        }
        if self.fault == Fault::Death {
            for path in std::mem::take(&mut inner.unsynced) {
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.set_len(file.metadata().unwrap().len() / 2).unwrap();
            }
        }
        Err(io::Error::from(io::ErrorKind::StorageFull))
    }

    fn log(&self, operation: &'static str, path: &Path) {
        let name = path.file_name().unwrap().to_string_lossy().split(".tmp-").next().unwrap().to_owned();
        self.inner.lock().unwrap().log.push((operation, name));
    }

    /// Whether the fatal operation was reached.
    pub fn was_hit(&self) -> bool {
        self.inner.lock().unwrap().left == 0
    }
}

/// The trait hands out boxes without a lifetime; a test's disk lives as long as the tests do.
struct FaultyFile(fs::File, PathBuf, &'static FaultyDisk);

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.2.count(true) {
            Ok(()) => self.0.write(bytes),
            Err(error) => {
                if self.2.fault == Fault::Full {
                    self.0.write_all(&bytes[..bytes.len() / 2])?; // what still fitted
                }
                Err(error)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DiskFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        self.2.count(true)?;
        self.2.inner.lock().unwrap().unsynced.remove(&self.1);
        self.2.log("sync", &self.1);
        Ok(())
    }

    fn file(&self) -> &fs::File {
        &self.0
    }
}

impl Disk for &'static FaultyDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.count(true)?;
        RealDisk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.count(true)?;
        let file = fs::File::create_new(path)?;
        self.inner.lock().unwrap().unsynced.insert(path.to_owned());
        Ok(Box::new(FaultyFile(file, path.to_owned(), self)))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.count(false)?;
        self.log("sync_dir", path);
        RealDisk.sync_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.count(false)?;
        self.log("rename", to);
        RealDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.count(false)?;
        self.log("remove", path);
        self.inner.lock().unwrap().unsynced.retain(|unsynced| !unsynced.starts_with(path));
        RealDisk.remove(path)
    }
}

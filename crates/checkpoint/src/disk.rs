//! The operations by which checkpoints change the disk, as a trait, so that tests can make each of them fail; and the free
//! space of a disk.
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// An open file that can be made durable.
pub trait DiskFile: Write {
    /// Returns when everything written is on the device (`fsync`).
    ///
    /// # Errors
    /// The system's.
    fn sync(&mut self) -> io::Result<()>;
}

/// Everything that changes the disk. Errors are the system's.
pub trait Disk: Sync {
    /// Makes one directory, whose parent exists.
    ///
    /// # Errors
    /// The system's.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes a file that did not exist.
    ///
    /// # Errors
    /// The system's.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Makes the entries of a directory durable.
    ///
    /// # Errors
    /// The system's.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames within one file system; a file (not a directory) there is replaced at once.
    ///
    /// # Errors
    /// The system's.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file, or a directory with all in it.
    ///
    /// # Errors
    /// The system's.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The file system itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

impl DiskFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

impl Disk for RealDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
    }
}

/// Free space for a user without privileges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// Free inodes; `None` if the file system has no limit.
    pub files: Option<u64>,
}

/// The free space of the file system that holds `path`.
///
/// # Errors
/// The system's.
pub fn room(path: &Path) -> io::Result<Room> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a C string and `found` has room for the result, aligned; both outlive the call, which keeps
    // neither.
    if unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so that it has filled the structure, whose fields are plain numbers.
    let found = unsafe { found.assume_init() };
    Ok(Room {
        bytes: found.f_bavail.saturating_mul(found.f_frsize),
        files: (found.f_files > 0).then_some(found.f_favail),
    })
}

//! A trait of operations that change the disk, so that tests can make each of them fail; and the free space of a disk.
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// A file open for writing that can be made durable.
pub trait DiskFile: Write + Send + Sync {
    /// Waits until everything written is on the device (`fsync`).
    ///
    /// # Errors
    /// The system's.
    fn sync(&mut self) -> io::Result<()>;
    /// The open file itself, to lock it or to read it back.
    fn file(&self) -> &File;
}

/// Changes of the disk: by the file system ([`RealDisk`]), or by a test's disk that fails at one of them.
pub trait Disk: Sync {
    /// Creates a folder, whose parent must exist.
    ///
    /// # Errors
    /// The system's.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a file that must not exist, open for reading and writing.
    ///
    /// # Errors
    /// The system's.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Makes the entries of a folder durable: its names and what they refer to.
    ///
    /// # Errors
    /// The system's.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames within one file system. A file at `to` is replaced in one step; a folder there is an error.
    ///
    /// # Errors
    /// The system's.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file, or a folder with everything in it.
    ///
    /// # Errors
    /// The system's.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The machine's disk: every operation is a system call.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

impl DiskFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }

    fn file(&self) -> &File {
        self
    }
}

impl Disk for RealDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::options().read(true).write(true).create_new(true).open(path)?))
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

/// The free space of a file system for a user without privileges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeSpace {
    /// Bytes that can be written.
    pub bytes: u64,
    /// Files and folders that can be created (inodes); `None` if the file system has no limit.
    pub files: Option<u64>,
}

/// Measures the free space of the file system that holds `path`.
///
/// # Errors
/// The system's.
pub fn free_space(path: &Path) -> io::Result<FreeSpace> {
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
    Ok(FreeSpace {
        bytes: found.f_bavail.saturating_mul(found.f_frsize),
        files: (found.f_files > 0).then_some(found.f_favail),
    })
}

//! A file of lines that is whole before it stands at its place.
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};

/// Lines beside their place; they are gone when this is, unless they got there.
pub(super) struct Staged {
    path: PathBuf,
    target: PathBuf,
    file: BufWriter<File>,
    lines: u64,
}

impl Staged {
    /// Begins the file that is to become `target`, and its folder.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn create(target: &Path) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if target.is_dir() {
            return Err(Error::new(crate::Kind::Io, format!("cannot write {}: it is a folder", target.display())));
        }
        if let Some(folder) = target.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, &error))?;
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // The end of a name says what the file holds, also while it is read again.
        let end = target.extension().map_or_else(String::new, |end| format!(".{}", end.to_string_lossy()));
        let path = target.with_extension(format!("tmp-{}-{number}{end}", std::process::id()));
        let file = File::create(&path).map_err(|error| Error::io("write", target, &error))?;
        Ok(Self { path, target: target.to_owned(), file: BufWriter::with_capacity(1 << 16, file), lines: 0 })
    }

    /// Where it lies meanwhile.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where it is to stand.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// How many lines it has.
    pub const fn len(&self) -> u64 {
        self.lines
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        Error::io("write", &self.target, error)
    }

    /// Appends a line.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn push(&mut self, line: &str) -> Result<()> {
        self.lines += 1;
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.write_all(b"\n"));
        written.map_err(|error| self.failed(&error))
    }

    /// Lets the lines be read: all are on the disk.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn finish(&mut self) -> Result<()> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        synced.map_err(|error| self.failed(&error))
    }

    /// The lines of a finished file.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn read(&self) -> Result<impl Iterator<Item = Result<String>> + '_> {
        let failed = |error: std::io::Error| Error::io("read", &self.path, &error);
        let lines = BufReader::new(File::open(&self.path).map_err(failed)?).lines();
        Ok(lines.map(move |line| line.map_err(failed)))
    }

    /// Puts the file at its place.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn publish(mut self) -> Result<()> {
        self.finish()?;
        fs::rename(&self.path, &self.target).map_err(|error| self.failed(&error))
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

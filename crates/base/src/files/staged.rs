//! Writes single files so that they are whole or not there: under a temporary name in the same folder, synced to the
//! disk, then renamed.
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::output::{Existing, claim_file};
use super::temporary::{self, Temporary};
use crate::{Error, Result};

/// A file that is being written. Dropping it removes the file, unless it was published.
#[derive(Debug)]
pub struct Staged {
    file: BufWriter<File>,
    temporary: Temporary,
    /// The path that the user gave.
    target: PathBuf,
    /// The file itself, where `target` is a link.
    place: PathBuf,
    existing: Option<Existing>,
    inputs: Vec<PathBuf>,
    made: Made,
}

/// Folders that were created for the file, innermost first. Dropping this removes those that are empty.
#[derive(Debug)]
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        for folder in &self.0 {
            // Not empty, or gone: then it is not ours to remove.
            let _ = fs::remove_dir(folder);
        }
    }
}

impl Staged {
    /// Begins an output that the user has named, and creates its folder. `inputs` are files and folders that will be
    /// read.
    ///
    /// # Errors
    /// Those of [`claim_file`]; [`crate::Kind::Io`]: its folder cannot be written to.
    pub fn output(target: &Path, existing: Existing, inputs: &[PathBuf]) -> Result<Self> {
        let place = claim_file(target, existing, inputs)?;
        temporary::sweep(&place);
        let mut staged = Self::begin(target, &place).map_err(|error| Error::io("write", target, &error))?;
        (staged.existing, staged.inputs) = (Some(existing), inputs.to_vec());
        Ok(staged)
    }

    /// Begins a file in a folder that belongs to tunesmith; it replaces what is there.
    ///
    /// # Errors
    /// The system's.
    pub fn own(target: &Path) -> io::Result<Self> {
        Self::begin(target, target)
    }

    fn begin(target: &Path, place: &Path) -> io::Result<Self> {
        let folder = parent(place);
        let named = folder.ancestors().filter(|path| !path.as_os_str().is_empty());
        let made = Made(named.take_while(|path| !path.exists()).map(Path::to_owned).collect());
        fs::create_dir_all(folder)?;
        let (temporary, file) = Temporary::file(place)?;
        let file = BufWriter::with_capacity(1 << 16, file);
        let (target, place) = (target.to_owned(), place.to_owned());
        Ok(Self { file, temporary, target, place, existing: None, inputs: Vec::new(), made })
    }

    /// The temporary path.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// The path that the user gave.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Writes all bytes to the disk (`fsync`), so that the file at [`Staged::path`] can be read.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn sync(&mut self) -> Result<()> {
        self.synced().map_err(|error| Error::io("write", &self.target, &error))
    }

    fn synced(&mut self) -> io::Result<()> {
        self.file.flush().and_then(|()| self.file.get_ref().sync_all())
    }

    /// Renames the file to its place, after a second look at whether it may be written there.
    ///
    /// # Errors
    /// As [`Staged::output`].
    pub fn publish(mut self) -> Result<()> {
        if let Some(existing) = self.existing {
            // What was read since is known by now, and others may have written meanwhile.
            self.place = claim_file(&self.target, existing, &self.inputs)?;
        }
        let target = self.target.clone();
        self.place().map_err(|error| Error::io("write", &target, &error))
    }

    /// Renames a file of [`Staged::own`] to its place.
    ///
    /// # Errors
    /// The system's.
    pub fn place(mut self) -> io::Result<()> {
        self.synced()?;
        let Self { temporary, place, mut made, .. } = self;
        temporary.place(|path| fs::rename(path, &place))?;
        made.0.clear();
        sync_parent(&place)
    }
}

impl Write for Staged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a file in a folder that belongs to tunesmith: whole, or not at all.
///
/// # Errors
/// The system's.
pub fn replace(target: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut staged = Staged::own(target)?;
    staged.write_all(bytes)?;
    staged.place()
}

/// Syncs the folder of `path`, so that a new name in it survives a power failure.
///
/// # Errors
/// The system's.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    File::open(parent(path))?.sync_all()
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_or_not_there_and_its_folders_with_it() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("deep/er/rows.jsonl");
        let begin = || Staged::output(&target, Existing::Keep("--overwrite"), &[]).unwrap();
        drop(begin());
        assert!(!root.path().join("deep").exists());
        let (mut first, mut second) = (begin(), begin());
        first.write_all(b"first").unwrap();
        second.write_all(b"second").unwrap();
        assert!(!target.exists() && first.path() != second.path());
        first.publish().unwrap();
        assert!(second.publish().unwrap_err().message().contains("is there already"));
        assert_eq!(fs::read_to_string(&target).unwrap(), "first");
        assert_eq!(fs::read_dir(target.parent().unwrap()).unwrap().count(), 1);
        replace(&target, b"third").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "third");
    }
}

//! Output files of lines that appear under their final name only when they are complete.
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;
use crate::files::output::{Existing, OutputFile};

/// A file of lines with a temporary name. Dropping it removes the file, unless it was published.
pub(super) struct AtomicLines {
    file: OutputFile,
    lines: u64,
}

impl AtomicLines {
    /// Creates the temporary file for `target`, and the folder. Refuses a target that is one of the `inputs`.
    ///
    /// # Errors
    /// As [`OutputFile::create`].
    pub fn create(target: &Path, existing: Existing, inputs: &[PathBuf]) -> Result<Self> {
        Ok(Self { file: OutputFile::create(target, existing, inputs)?, lines: 0 })
    }

    pub fn path(&self) -> &Path {
        self.file.path()
    }

    pub fn target(&self) -> &Path {
        self.file.target()
    }

    /// How many lines it has.
    pub const fn len(&self) -> u64 {
        self.lines
    }

    /// Appends a line.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn push(&mut self, line: &str) -> Result<()> {
        self.lines += 1;
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.write_all(b"\n"));
        written.map_err(|error| Error::io("write", self.file.target(), &error))
    }

    /// Flushes all lines to disk, so that they can be read.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn finish(&mut self) -> Result<()> {
        self.file.sync()
    }

    /// The lines of a finished file.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn read(&self) -> Result<impl Iterator<Item = Result<String>> + '_> {
        let failed = |error: std::io::Error| Error::io("read", self.path(), &error);
        let lines = BufReader::new(files::open_own(self.path()).map_err(failed)?).lines();
        Ok(lines.map(move |line| line.map_err(failed)))
    }

    /// The BLAKE3 hash of a finished file, for the report that [`is_as_reported`] reads.
    ///
    /// # Errors
    /// [`crate::Kind::Io`].
    pub fn digest(&self) -> Result<String> {
        digest(self.path()).map_err(|error| Error::io("read", self.path(), &error))
    }

    /// Renames the file to its final path.
    ///
    /// # Errors
    /// As [`AtomicLines::create`].
    pub fn publish(self) -> Result<()> {
        self.file.publish()
    }
}

fn digest(path: &Path) -> std::io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(files::open_own(path)?)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// The rule for existing files: unchanged files of an earlier run are replaced, others only with `overwrite`.
pub(super) const fn existing(overwrite: bool) -> Existing {
    if overwrite { Existing::Replace } else { Existing::Ours(is_as_reported, "--overwrite") }
}

/// Whether a file is unchanged since `process` or `ingest` wrote it, by the hash in the report beside it.
fn is_as_reported(path: &Path) -> bool {
    let report = |path: &Path| -> Option<serde_json::Value> {
        serde_json::from_str(&files::read_own_text(path, files::SMALL).ok()?).ok()
    };
    match path.extension().and_then(|end| end.to_str()) {
        Some("json") => report(path).is_some_and(|report| report["blake3"].is_object()),
        Some("md") => files::read_own_text(path, files::SMALL).is_ok_and(|text| text.starts_with("# Data report")),
        _ => {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // `rows.jsonl` and `rows.validation.jsonl` share the report `rows.report.json`.
            let places = [path.with_extension("report.json"), path.with_extension("").with_extension("report.json")];
            let known = places.iter().find_map(|place| Some(report(place)?["blake3"][&name].as_str()?.to_owned()));
            known.is_some_and(|known| digest(path).is_ok_and(|found| found == known))
        }
    }
}

/// Writes an output file in one step.
///
/// # Errors
/// As [`AtomicLines::create`].
pub(super) fn write(target: &Path, existing: Existing, text: &str) -> Result<()> {
    let mut file = OutputFile::create(target, existing, &[])?;
    file.write_all(text.as_bytes()).map_err(|error| Error::io("write", target, &error))?;
    file.publish()
}

//! Output files of lines that appear under their final name only when they are complete.
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;
use crate::files::output::{Existing, OutputFile};

/// Refuses a name that promises a compressed file where plain text is written.
///
/// # Errors
/// [`crate::Kind::Config`], naming the file.
pub(super) fn check_plain_text(path: &Path) -> Result<()> {
    let end = path.extension().and_then(|end| end.to_str()).unwrap_or_default().to_lowercase();
    if !["gz", "zst", "zstd", "xz", "bz2"].contains(&end.as_str()) {
        return Ok(());
    }
    let error =
        Error::config(format!("cannot write {}: what is written here is plain text, not .{end}", path.display()));
    Err(error.hint("name a .jsonl file, and compress it afterwards"))
}

/// A file of lines with a temporary name. Dropping it removes the file, unless it was published.
pub(super) struct AtomicLines {
    file: OutputFile,
    lines: u64,
}

impl AtomicLines {
    /// Creates the temporary file for `target`, and the folder. Refuses a target that is one of the `inputs`.
    ///
    /// # Errors
    /// As [`OutputFile::create`] and [`check_plain_text`].
    pub fn create(target: &Path, existing: Existing, inputs: &[PathBuf]) -> Result<Self> {
        check_plain_text(target)?;
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
            let known: Vec<String> = (places.iter().filter_map(|place| report(place)))
                .flat_map(|report| ["blake3", REPLACED].map(|of| report[of][&name].as_str().map(str::to_owned)))
                .flatten()
                .collect();
            !known.is_empty() && digest(path).is_ok_and(|found| known.contains(&found))
        }
    }
}

/// The key in a report for the hashes of the files that a run replaces.
const REPLACED: &str = "replaced";

/// Gives finished files and reports about them their final names. All of them are on the disk before the first name
/// changes, so a full disk leaves what was there. The JSON report comes first. It gets the files' hashes, and those of
/// earlier files in their place: if the process dies between two names, [`is_as_reported`] still knows all files.
///
/// # Errors
/// As [`AtomicLines::create`].
pub(super) fn publish_reported(
    files: Vec<AtomicLines>,
    report_file: &Path,
    report: &mut serde_json::Value,
    others: &[(&Path, &str)],
    existing: Existing,
) -> Result<()> {
    let (mut digests, mut replaced) = (serde_json::Map::new(), serde_json::Map::new());
    for file in &files {
        let (name, target) = (file.target().file_name().unwrap_or_default().to_string_lossy(), file.target());
        let now = file.digest()?;
        if let Some(before) = digest(target).ok().filter(|before| *before != now && is_as_reported(target)) {
            replaced.insert(name.clone().into_owned(), before.into());
        }
        digests.insert(name.into_owned(), now.into());
    }
    report["blake3"] = digests.into();
    if !replaced.is_empty() {
        report[REPLACED] = replaced.into();
    }
    let mut staged = vec![stage(report_file, existing, &format!("{report:#}\n"))?];
    for (target, text) in others {
        staged.push(stage(target, existing, text)?);
    }
    let mut staged = staged.into_iter();
    staged.next().map_or(Ok(()), OutputFile::publish)?;
    files.into_iter().try_for_each(AtomicLines::publish)?;
    staged.try_for_each(OutputFile::publish)
}

/// An output file that is on the disk under its temporary name.
fn stage(target: &Path, existing: Existing, text: &str) -> Result<OutputFile> {
    let mut file = OutputFile::create(target, existing, &[])?;
    file.write_all(text.as_bytes()).map_err(|error| Error::io("write", target, &error))?;
    file.sync()?;
    Ok(file)
}

/// Writes an output file in one step.
///
/// # Errors
/// As [`AtomicLines::create`].
pub(super) fn write(target: &Path, existing: Existing, text: &str) -> Result<()> {
    stage(target, existing, text)?.publish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn written(target: &Path, row: &str) -> AtomicLines {
        let mut file = AtomicLines::create(target, existing(false), &[]).unwrap();
        file.push(row).unwrap();
        file.finish().unwrap();
        file
    }

    #[test]
    fn a_run_that_cannot_write_its_report_leaves_files_that_the_next_one_replaces() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let (rows, report, text) = (at("rows.jsonl"), at("rows.report.json"), at("rows.report.md"));
        let run = |row: &str| {
            let files = vec![written(&rows, row)];
            publish_reported(files, &report, &mut json!({}), &[(&text, "# Data report\n")], existing(false))
        };
        let are = |row: &str| fs::read_to_string(&rows).is_ok_and(|found| found == format!("{row}\n"));
        // The last file cannot be written: nothing has changed.
        fs::create_dir(&text).unwrap();
        run("one").unwrap_err();
        assert_eq!(fs::read_dir(&root).unwrap().count(), 1, "only the folder");
        fs::remove_dir(&text).unwrap();
        run("one").unwrap();
        let first = fs::read(&report).unwrap();
        fs::rename(&text, at("aside")).unwrap();
        fs::create_dir(&text).unwrap();
        run("two").unwrap_err();
        assert!(are("one") && fs::read(&report).unwrap() == first);
        fs::remove_dir(&text).unwrap();
        // It died between the names of the report and of the rows.
        run("two").unwrap();
        assert!(are("two"));
        fs::write(&rows, "one\n").unwrap();
        assert!(is_as_reported(&rows));
        run("three").unwrap();
        assert!(are("three"));
        // Changed by somebody else, they stay.
        fs::write(&rows, "mine\n").unwrap();
        assert!(check(&rows).is_err() && are("mine"));
        fs::write(&rows, "two\n").unwrap();
        assert!(check(&rows).is_err(), "what was replaced two runs ago is not known any more");
    }

    fn check(target: &Path) -> Result<()> {
        AtomicLines::create(target, existing(false), &[]).map(drop)
    }
}

//! The configuration that is imported, and the files that it names.
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{self as config, Node};

/// The top-level mapping of a file; a key that is given twice is refused.
pub(super) fn entries(path: &Path) -> Result<Vec<(String, Node)>> {
    let entries = config::read_mapping(path)?;
    let mut names = std::collections::HashSet::new();
    match entries.iter().find(|(key, _)| !names.insert(key)) {
        Some((key, _)) => Err(Error::config(format!("{}: {key:?} is given twice", path.display())).hint("keep one")),
        None => Ok(entries),
    }
}

/// The path of a file that the source names: relative to the current directory, or else to the source's folder. `None` if neither
/// exists.
pub(super) fn beside(source: &Path, name: &str) -> Option<PathBuf> {
    [PathBuf::from(name), source.with_file_name(name)].into_iter().find(|path| path.exists())
}

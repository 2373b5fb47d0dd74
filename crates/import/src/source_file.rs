//! Reads the configuration to import, and finds the files that it names.
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{self as config, Node};

/// The top-level mapping of a file; a key that is given twice is refused, in mappings below it too.
pub(super) fn entries(path: &Path) -> Result<Vec<(String, Node)>> {
    let whole = Node::Map(config::read_mapping(path)?);
    if let Some((place, key)) = whole.given_twice() {
        let place = if place.is_empty() { String::new() } else { format!(" {}:", place.trim_start_matches('.')) };
        return Err(Error::config(format!("{}:{place} {key:?} is given twice", path.display())).hint("keep one"));
    }
    let Node::Map(entries) = whole else { unreachable!("it was made as a mapping") };
    Ok(entries)
}

/// The path of a file that the source names: relative to the current directory, or else to the source's folder. `None` if neither
/// exists.
pub(super) fn beside(source: &Path, name: &str) -> Option<PathBuf> {
    [PathBuf::from(name), source.with_file_name(name)].into_iter().find(|path| path.exists())
}

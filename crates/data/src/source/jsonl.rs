//! Reads rows from JSON Lines files: one object per line.
use std::io::{BufRead, Read as _};
use std::path::Path;
use std::sync::Arc;

use super::text::{begin, unreadable};
use super::{Content, MAX_ROW_BYTES, Place, RawRow, Read, TakeRow};
use tunesmith_base::error::{Error, Result};

pub(super) const READ: Read = Read::Text(read);

fn read(path: &Path, reader: &mut dyn BufRead, take: TakeRow<'_>) -> Result<()> {
    begin(path, reader)?;
    lines(path, reader, take)
}

/// Reads the lines that `reader` has not read yet.
pub(super) fn lines(path: &Path, mut reader: impl BufRead, take: TakeRow<'_>) -> Result<()> {
    let path: Arc<Path> = path.into();
    for line in 1.. {
        let place = Place { path: path.clone(), line, counts_rows: false };
        let mut bytes = Vec::new();
        let read = reader
            .by_ref()
            .take(MAX_ROW_BYTES as u64 + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|error| unreadable(&path, &error))?;
        if read == 0 {
            break;
        }
        if read > MAX_ROW_BYTES {
            return Err(Error::data(format!("{place}: the line is longer than {} MiB", MAX_ROW_BYTES >> 20)));
        }
        if !bytes.trim_ascii().is_empty() && !take(RawRow::new(place, Content::Line(bytes)))? {
            break;
        }
    }
    Ok(())
}

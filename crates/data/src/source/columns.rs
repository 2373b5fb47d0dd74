//! Shared by column formats. Record batches are written as JSON, one line per row. Lists and structs nest, timestamps
//! and decimals become strings, bytes become text, and a null counts as an absent field.
//!
//! The libraries may panic on hostile files, so panics are caught. Sizes that could make them allocate too much memory
//! are checked before.
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_json::LineDelimitedWriter;

use super::bytes::as_text;
use super::{Content, MAX_ROW_BYTES, Place, RawRow, TakeRow};
use crate::catch_panic::isolated;
use tunesmith_base::error::{Error, Result};

/// How many rows are decoded at once.
pub(super) const ROWS: usize = 64;

/// Adds the file and its format to an error of a library.
pub(super) fn library<T, E: std::error::Error + Send + Sync + 'static>(
    path: &Path,
    format: &str,
    outcome: Result<Result<T, E>>,
) -> Result<T> {
    let malformed = format!("{}: malformed {format} file", path.display());
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Error::data(malformed).caused_by(error)),
        Err(panic) => Err(Error::data(format!("{malformed}: {}", panic.message()))),
    }
}

/// Passes on the rows of batches as lines of JSON.
pub(super) struct Rows<'a> {
    path: Arc<Path>,
    take: TakeRow<'a>,
    /// The number of rows so far.
    pub(super) row: u64,
}

impl<'a> Rows<'a> {
    pub(super) fn new(path: &Path, take: TakeRow<'a>) -> Self {
        Self { path: path.into(), take, row: 0 }
    }

    /// Passes on the rows of a batch. Returns false to stop reading.
    pub(super) fn take(&mut self, batch: &RecordBatch) -> Result<bool> {
        let write = || {
            let mut writer = LineDelimitedWriter::new(Capped(Vec::new()));
            writer.write(&as_text(batch)).map(|()| writer.into_inner().0)
        };
        let lines = isolated("writing rows as JSON", write)
            .and_then(|written| written.map_err(|error| Error::data(error.to_string()).caused_by(error)))
            .map_err(|error| error.context(format!("{}: row {} or after it", self.path.display(), self.row + 1)))?;
        for line in lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
            self.row += 1;
            let place = Place { path: self.path.clone(), line: self.row, counts_rows: true };
            if !(self.take)(RawRow { place, content: Content::Line(line.to_vec()) })? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A buffer that fails when it grows beyond its limit.
struct Capped(Vec<u8>);

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > 2 * MAX_ROW_BYTES {
            return Err(std::io::Error::other(format!("{ROWS} rows take more than {} MiB", MAX_ROW_BYTES >> 19)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

//! Reads the rows of column formats (Parquet, Arrow): record batches are written as JSON, one line per row.
//!
//! The libraries may panic on hostile files, so panics are caught. Sizes that could make them allocate too much memory
//! are checked before.
use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;

use super::column_json::object;
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
        let lines = isolated("writing rows as JSON", || lines(batch))
            .and_then(|lines| lines)
            .map_err(|error| error.context(format!("{}: row {} or after it", self.path.display(), self.row + 1)))?;
        for line in lines {
            self.row += 1;
            let place = Place { path: self.path.clone(), line: self.row, counts_rows: true };
            if !(self.take)(RawRow::new(place, Content::Line(line)))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The rows of a batch, each as a line of JSON.
fn lines(batch: &RecordBatch) -> Result<Vec<Vec<u8>>> {
    let encode = object(batch.schema_ref().fields(), batch.columns())?;
    let (mut lines, mut bytes) = (Vec::with_capacity(batch.num_rows()), 0);
    for row in 0..batch.num_rows() {
        let mut line = Vec::new();
        encode(row, &mut line);
        bytes += line.len();
        if bytes > 2 * MAX_ROW_BYTES {
            return Err(Error::data(format!("{ROWS} rows take more than {} MiB", MAX_ROW_BYTES >> 19)));
        }
        lines.push(line);
    }
    Ok(lines)
}

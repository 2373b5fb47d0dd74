//! Reads rows from Parquet files, with any of the format's compression codecs.
use std::cell::Cell;
use std::fs::File;
use std::path::Path;

use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};

use super::columns::{ROWS, Rows, library};
use super::{Read, TakeRow};
use crate::catch_panic::isolated;
use tunesmith_base::error::Result;

pub(super) const READ: Read = Read::Whole(read);

fn read(path: &Path, file: File, bytes: &Cell<u64>, take: TakeRow<'_>) -> Result<()> {
    let size = file.metadata().map_or(0, |metadata| metadata.len());
    // Use Parquet's own schema: the Arrow schema in the metadata could demand any type.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let open = || {
        let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(file, options)?;
        let rows = builder.metadata().file_metadata().num_rows().max(0) as u64;
        Ok::<_, parquet::errors::ParquetError>((builder.with_batch_size(ROWS).build()?, rows))
    };
    let (mut batches, total) = library(path, "Parquet", isolated("reading the file", open))?;
    let mut rows = Rows::new(path, take);
    while let Some(batch) =
        isolated("reading rows", || batches.next()).map_err(|error| error.context(path.display()))?
    {
        let batch = library(path, "Parquet", Ok(batch))?;
        let goes_on = rows.take(&batch)?;
        bytes.set(size.min((u128::from(size) * u128::from(rows.row) / u128::from(total.max(1))) as u64));
        if !goes_on {
            break;
        }
    }
    Ok(())
}

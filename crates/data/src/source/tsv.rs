//! Reads rows from TSV files: cells separated by tabs, with a header line that names the fields.
use super::{Read, csv};

pub(super) const READ: Read = Read::Text(|path, reader, take| csv::cells(path, reader, b'\t', take));

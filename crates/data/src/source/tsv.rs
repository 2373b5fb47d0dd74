//! TSV: cells with tabulators between them, under a header line.
use super::{Read, csv};

pub(super) const READ: Read = Read::Text(|path, reader, take| csv::cells(path, reader, b'\t', take));

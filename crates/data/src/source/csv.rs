//! Reads rows from CSV files: cells separated by commas, with a header line that names the fields.
use std::collections::HashSet;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::text::begin;
use super::{Content, Place, RawRow, Read, TakeRow};
use tunesmith_base::error::{Error, Result};

pub(super) const READ: Read = Read::Text(|path, reader, take| cells(path, reader, b',', take));

/// Reads cells separated by `delimiter`, with a header line.
pub(super) fn cells(path: &Path, reader: &mut dyn BufRead, delimiter: u8, take: TakeRow<'_>) -> Result<()> {
    begin(path, reader)?;
    let path: Arc<Path> = path.into();
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(reader);
    let malformed = |error: csv::Error| {
        let line = error.position().map_or(1, csv::Position::line);
        let what = match error.kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!("found {len} fields, expected {expected_len} as in the first line")
            }
            csv::ErrorKind::Utf8 { err, .. } => format!("invalid UTF-8 in field {}", err.field() + 1),
            _ => error.to_string(),
        };
        Error::data(format!("{}:{line}: malformed CSV: {what}", path.display())).with_source(error)
    };
    let header = reader.headers().map_err(&malformed)?.clone();
    let other = |mark: char| delimiter == b',' && header.len() == 1 && header[0].contains(mark);
    for (mark, name, hint) in [
        (';', "semicolons", "put commas between the cells, as Excel does with \"CSV UTF-8 (comma delimited)\""),
        ('\t', "tabs", "put commas between the cells, or rename the file to .tsv"),
    ] {
        if other(mark) {
            let message = format!("{}:1: {name} separate the cells, expected commas", path.display());
            return Err(Error::data(message).hint(hint));
        }
    }
    let mut seen = HashSet::new();
    if let Some(name) = header.iter().find(|name| !seen.insert(*name)) {
        return Err(Error::data(format!("{}:1: the column {name:?} is there twice", path.display())));
    }
    for record in reader.records() {
        let record = record.map_err(&malformed)?;
        let line = record.position().map_or(0, csv::Position::line);
        let place = Place { path: path.clone(), line, counts_rows: false };
        let row: Map<String, Value> =
            header.iter().map(str::to_owned).zip(record.iter().map(|cell| Value::String(cell.to_owned()))).collect();
        if !take(RawRow::new(place, Content::Value(Value::Object(row))))? {
            break;
        }
    }
    Ok(())
}

//! Rows of text files: JSON Lines, JSON documents (a list, or `{"data": […]}`), CSV and TSV.
use std::fmt;
use std::io::{BufRead, Read};
use std::path::Path;
use std::sync::Arc;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{Content, MAX_ROW_BYTES, Place, RawRow, TakeRow, what};
use crate::error::{Error, Result};

/// JSON Lines.
pub(super) fn lines(path: &Path, reader: &mut dyn BufRead, take: TakeRow<'_>) -> Result<()> {
    begin(path, reader)?;
    read_lines(path, reader, take)
}

/// A JSON document, or lines by another name.
pub(super) fn json(path: &Path, reader: &mut dyn BufRead, take: TakeRow<'_>) -> Result<()> {
    let first = begin(path, reader)?;
    if first == Some(b'[') || holds_data(reader) {
        read_document(path, reader, take)
    } else {
        read_lines(path, reader, take)
    }
}

/// Cells with commas between them.
pub(super) fn csv(path: &Path, reader: &mut dyn BufRead, take: TakeRow<'_>) -> Result<()> {
    begin(path, reader)?;
    read_csv(path, reader, b',', take)
}

/// Cells with tabulators between them.
pub(super) fn tsv(path: &Path, reader: &mut dyn BufRead, take: TakeRow<'_>) -> Result<()> {
    begin(path, reader)?;
    read_csv(path, reader, b'\t', take)
}

/// Skips a mark of byte order; the first byte that is no white space, if it is near.
fn begin(path: &Path, reader: &mut dyn BufRead) -> Result<Option<u8>> {
    let head = reader.fill_buf().map_err(|error| unreadable(path, &error))?;
    if head.starts_with(&[0xff, 0xfe]) || head.starts_with(&[0xfe, 0xff]) {
        return Err(Error::data(format!("{} is UTF-16, expected UTF-8", path.display()))
            .hint("convert it: iconv -f utf-16 -t utf-8"));
    }
    let packed = [("gzip", b"\x1f\x8b".as_slice(), ".gz"), ("zstd", b"\x28\xb5\x2f\xfd", ".zst")];
    let columns = [("Parquet", b"PAR1".as_slice(), ".parquet"), ("Arrow", b"ARROW1", ".arrow")];
    if let Some((what, _, end)) = packed.iter().chain(&columns).find(|(_, magic, _)| head.starts_with(magic)) {
        return Err(Error::data(format!("{} holds {what}, expected text", path.display()))
            .hint(format!("its name has to end in {end}")));
    }
    let bom = if head.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let first = head[bom..].iter().copied().find(|byte| !byte.is_ascii_whitespace());
    reader.consume(bom);
    Ok(first)
}

/// What is wrong with the bytes is wrong with the data: a cut archive, a row without end.
fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::io("read", path, error).with_kind(crate::Kind::Data)
}

/// Whether a document that opens with `{` is `{"data": …}`, judged by its first key; else it is JSON Lines.
fn holds_data(reader: &mut dyn BufRead) -> bool {
    let Ok(head) = reader.fill_buf() else { return false };
    let head = head.trim_ascii_start();
    head.strip_prefix(b"{").is_some_and(|rest| rest.trim_ascii_start().starts_with(b"\"data\""))
}

fn read_lines(path: &Path, mut reader: impl BufRead, take: TakeRow<'_>) -> Result<()> {
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
        if !bytes.trim_ascii().is_empty() && !take(RawRow { place, content: Content::Line(bytes) })? {
            break;
        }
    }
    Ok(())
}

fn read_csv(path: &Path, reader: impl Read, delimiter: u8, take: TakeRow<'_>) -> Result<()> {
    let path: Arc<Path> = path.into();
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(reader);
    let malformed = |error: &csv::Error| {
        let line = error.position().map_or(1, csv::Position::line);
        let what = match error.kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!("found {len} fields, expected {expected_len} as in the first line")
            }
            csv::ErrorKind::Utf8 { err, .. } => format!("invalid UTF-8 in field {}", err.field() + 1),
            csv::ErrorKind::Io(error) => error.to_string(),
            _ => error.to_string(),
        };
        Error::data(format!("{}:{line}: malformed CSV: {what}", path.display()))
    };
    let header = reader.headers().map_err(|error| malformed(&error))?.clone();
    let twice = header.iter().enumerate().find(|(index, name)| header.iter().take(*index).any(|other| other == *name));
    if let Some((_, name)) = twice {
        return Err(Error::data(format!("{}:1: the column {name:?} is there twice", path.display())));
    }
    for record in reader.records() {
        let record = record.map_err(|error| malformed(&error))?;
        let line = record.position().map_or(0, csv::Position::line);
        let place = Place { path: path.clone(), line, counts_rows: false };
        let row: Map<String, Value> =
            header.iter().map(str::to_owned).zip(record.iter().map(|cell| Value::String(cell.to_owned()))).collect();
        if !take(RawRow { place, content: Content::Value(Value::Object(row)) })? {
            break;
        }
    }
    Ok(())
}

/// Reads a JSON list, or the list under `data`, item by item.
fn read_document(path: &Path, reader: impl Read, take: TakeRow<'_>) -> Result<()> {
    let mut sink = Sink { path: path.into(), take, row: 0, outcome: None };
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let parsed = deserializer.deserialize_any(Document(&mut sink)).and_then(|()| deserializer.end());
    match (sink.outcome, parsed) {
        (Some(outcome), _) => outcome,
        (None, Ok(())) => Ok(()),
        (None, Err(error)) if error.is_io() => Err(unreadable(path, &std::io::Error::from(error))),
        (None, Err(error)) => {
            let place = format!("{}:{}:{}", path.display(), error.line(), error.column());
            Err(Error::data(format!("{place}: malformed JSON: {}", what(&error)))
                .hint("expected a list of rows, or {\"data\": [rows]}"))
        }
    }
}

/// What the visitors below share: where rows go, and how that ended if it ended early.
struct Sink<'a> {
    path: Arc<Path>,
    take: TakeRow<'a>,
    row: u64,
    outcome: Option<Result<()>>,
}

struct Document<'s, 'a>(&'s mut Sink<'a>);

impl<'de> Visitor<'de> for Document<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(value) = items.next_element::<Value>()? {
            self.0.row += 1;
            let place = Place { path: self.0.path.clone(), line: self.0.row, counts_rows: true };
            match (self.0.take)(RawRow { place, content: Content::Value(value) }) {
                Ok(true) => {}
                ended => {
                    self.0.outcome = Some(ended.map(|_| ()));
                    return Err(serde::de::Error::custom("ended early"));
                }
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        while let Some(key) = fields.next_key::<String>()? {
            if key == "data" {
                fields.next_value_seed(Document(&mut *self.0))?;
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Document<'_, '_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

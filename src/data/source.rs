//! Rows from files: JSON Lines, JSON (a list, or `{"data": […]}`) and CSV or TSV, in UTF-8. Rows are handed on one by
//! one, so that a file is never in memory whole; the costly part (JSON and the row's form) is left to the caller's
//! threads through [`RawRow::parse`].
use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::data::row::{Form, PROBE_ROWS, Row, loss_weight};
use crate::error::{Error, Result};

/// The longest line or JSON row that is read.
const MAX_ROW_BYTES: usize = 256 << 20;

/// Where a row came from.
#[derive(Debug, Clone)]
pub struct Place {
    /// The file.
    pub path: Arc<Path>,
    /// Its line, from 1; for JSON documents the row's number instead.
    pub line: u64,
    /// Whether `line` counts rows.
    pub counts_rows: bool,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.counts_rows { " row " } else { "" };
        write!(f, "{}:{unit}{}", self.path.display(), self.line)
    }
}

/// A row as read, not yet understood.
#[derive(Debug, Clone)]
pub struct RawRow {
    /// Where it stands.
    pub place: Place,
    /// What stands there.
    pub content: Content,
}

/// The content of a [`RawRow`].
#[derive(Debug, Clone)]
pub enum Content {
    /// A line of JSON Lines.
    Line(Vec<u8>),
    /// An item of a JSON document, or a CSV record as an object of strings.
    Value(Value),
}

/// What is wrong with a JSON text, without serde's own count of lines and columns.
fn what(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map(|(what, _)| what.to_owned()).unwrap_or(text)
}

impl RawRow {
    fn value(self) -> Result<Value> {
        match self.content {
            Content::Value(value) => Ok(value),
            Content::Line(line) => {
                let text = std::str::from_utf8(&line).map_err(|error| {
                    Error::data(format!("invalid UTF-8 at byte {} of the line", error.valid_up_to() + 1))
                        .hint("convert the file: iconv -f latin1 -t utf-8")
                })?;
                serde_json::from_str(text).map_err(|error| {
                    Error::data(format!("malformed JSON at column {}: {}", error.column(), what(&error)))
                })
            }
        }
    }

    /// Understands the row as one of `forms`.
    ///
    /// # Errors
    /// Malformed rows, with file and line, what was found and what is expected.
    pub fn parse(self, forms: &[Form]) -> Result<Row> {
        self.parse_weighted(forms).map(|(row, _)| row)
    }

    /// As [`Self::parse`], with what the row's loss counts ([`loss_weight`]).
    ///
    /// # Errors
    /// As there.
    pub fn parse_weighted(self, forms: &[Form]) -> Result<(Row, f32)> {
        let place = self.place.clone();
        let both = |value| {
            let weight = loss_weight(&value)?;
            Ok((Row::parse(value, forms)?, weight))
        };
        self.value().and_then(both).map_err(|error| error.context(place))
    }

    /// The form that `auto` sees; `None` if the row is malformed, which [`Self::parse`] will report.
    fn form(&self) -> Option<Form> {
        match self.clone().value() {
            Ok(Value::Object(row)) => Form::detect(&row),
            _ => None,
        }
    }
}

/// Reads at most `limit` rows of `path` and hands them to `take` in order, with the forms that the file may hold:
/// `format` alone, or what its first rows show. `bytes` counts what was read.
///
/// # Errors
/// Files that cannot be read, malformed documents, and whatever `take` returns.
pub fn read(
    path: &Path,
    format: Option<Form>,
    limit: Option<usize>,
    bytes: &Cell<u64>,
    take: &mut dyn FnMut(RawRow, &[Form]) -> Result<()>,
) -> Result<()> {
    let mut left = limit.unwrap_or(usize::MAX);
    let mut forms: Vec<Form> = format.into_iter().collect();
    let mut probed = Vec::new();
    let mut give = |probed: &mut Vec<RawRow>, forms: &mut Vec<Form>| -> Result<()> {
        if forms.is_empty() {
            *forms = probed.iter().filter_map(RawRow::form).collect();
            forms.sort_unstable();
            forms.dedup();
            if forms.is_empty() {
                forms.extend(Form::ALL);
            }
        }
        probed.drain(..).try_for_each(|row| take(row, forms))
    };
    if left == 0 {
        return Ok(());
    }
    let finished = read_rows(path, bytes, &mut |row| {
        left -= 1;
        probed.push(row);
        if !forms.is_empty() || probed.len() == PROBE_ROWS {
            give(&mut probed, &mut forms)?;
        }
        Ok(left > 0)
    });
    // Rows before a broken one are looked at first: the earliest error is the one to report.
    give(&mut probed, &mut forms)?;
    finished
}

/// The forms that the first rows of `path` show; none if it cannot be read.
pub(super) fn forms(path: &Path, format: Option<Form>) -> Vec<Form> {
    let mut seen = Vec::new();
    let _ = read(path, format, Some(PROBE_ROWS), &Cell::new(0), &mut |_, forms| {
        seen = forms.to_vec();
        Ok(())
    });
    seen
}

struct Counted<'a> {
    inner: File,
    bytes: &'a Cell<u64>,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.bytes.set(self.bytes.get() + read as u64);
        Ok(read)
    }
}

/// Takes one row; false ends the reading.
type TakeRow<'a> = &'a mut dyn FnMut(RawRow) -> Result<bool>;

fn read_rows(path: &Path, bytes: &Cell<u64>, take: TakeRow<'_>) -> Result<()> {
    let file = File::open(path).map_err(|error| {
        Error::io("read", path, &error)
            .with_kind(crate::Kind::Data)
            .hint("check data.train_path, val_path and test_path")
    })?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(Error::data(format!("{} is a folder, expected a file", path.display())));
    }
    let mut reader = BufReader::with_capacity(1 << 20, Counted { inner: file, bytes });
    let head = reader.fill_buf().map_err(|error| Error::io("read", path, &error))?;
    if head.starts_with(&[0xff, 0xfe]) || head.starts_with(&[0xfe, 0xff]) {
        return Err(Error::data(format!("{} is UTF-16, expected UTF-8", path.display()))
            .hint("convert it: iconv -f utf-16 -t utf-8"));
    }
    let bom = if head.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let first = head[bom..].iter().copied().find(|byte| !byte.is_ascii_whitespace());
    reader.consume(bom);
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    match extension.as_deref() {
        Some("json") if first == Some(b'[') || holds_data(&mut reader) => read_document(path, reader, take),
        Some("jsonl" | "ndjson" | "json") => read_lines(path, reader, take),
        Some("csv") => read_csv(path, reader, b',', take),
        Some("tsv") => read_csv(path, reader, b'\t', take),
        _ => Err(Error::data(format!(
            "{}: found no known extension, expected .jsonl, .json, .csv or .tsv",
            path.display()
        ))
        .hint(match extension.as_deref() {
            Some("txt") => "make it a .jsonl file with one {\"text\": …} object a line",
            _ => "rename the file after its format",
        })),
    }
}

/// Whether a document that opens with `{` is `{"data": …}`, judged by its first key; else it is JSON Lines.
fn holds_data(reader: &mut impl BufRead) -> bool {
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
            .map_err(|error| Error::io("read", &path, &error))?;
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
        (None, Err(error)) if error.is_io() => Err(Error::io("read", path, &std::io::Error::from(error))),
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

/// BLAKE3 of a file's bytes and length, read in pieces.
pub(super) fn hash_files(paths: &[PathBuf], hasher: &mut blake3::Hasher) -> Result<()> {
    for path in paths {
        let file = File::open(path).map_err(|error| Error::io("read", path, &error).with_kind(crate::Kind::Data))?;
        let mut content = blake3::Hasher::new();
        content.update_reader(file).map_err(|error| Error::io("read", path, &error).with_kind(crate::Kind::Data))?;
        hasher.update(content.finalize().as_bytes());
        hasher.update(path.extension().unwrap_or_default().as_encoded_bytes());
    }
    Ok(())
}

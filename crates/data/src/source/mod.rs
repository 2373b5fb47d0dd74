//! Reads rows from files: JSON Lines, JSON (a list, or `{"data": […]}`), CSV and TSV in UTF-8, plain or compressed;
//! Parquet and Arrow; tar and zip archives.
//!
//! Rows are passed on one by one, so a file is never in memory as a whole. The expensive part, parsing, happens in the
//! caller's threads ([`RawRow::parse`]). Each format is a file of this folder and a line in
//! [`tunesmith_base::registry`].
mod column_json;
mod columns;
mod compressed;
pub(super) mod glob;
mod samples;
mod text;

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use self::compressed::Compression;
use crate::numbers;
use crate::parsed_row::Parsed;
use crate::row::{Form, PROBE_ROWS, Row, forms_of, source_of};
use crate::row_images;
use crate::strict::REPEATED;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// The longest line or JSON row, in bytes.
const MAX_ROW_BYTES: usize = 256 << 20;

/// The file and line of a row, for messages.
#[derive(Debug, Clone)]
pub struct Place {
    /// The file, as the configuration names it.
    pub path: Arc<Path>,
    /// The line, from 1. In JSON documents, Parquet and Arrow, the number of the row instead.
    pub line: u64,
    /// Whether `line` is the number of a row.
    pub counts_rows: bool,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.counts_rows { " row " } else { "" };
        write!(f, "{}:{unit}{}", self.path.display(), self.line)
    }
}

/// A row before it is parsed.
#[derive(Debug, Clone)]
pub struct RawRow {
    /// File and line of the row.
    pub place: Place,
    /// The text or value of the row.
    pub content: Content,
    /// Whether `data.format: text` asks for the text alone, whatever the row shows.
    text_alone: bool,
}

/// The content of a [`RawRow`].
#[derive(Debug, Clone)]
pub enum Content {
    /// A line of JSON. A row of Parquet or Arrow is written as one.
    Line(Vec<u8>),
    /// An item of a JSON document, or a CSV record as an object of strings.
    Value(Value),
}

/// The message of a JSON error, without serde's line and column.
fn what(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map(|(what, _)| what.to_owned()).unwrap_or(text)
}

impl RawRow {
    const fn new(place: Place, content: Content) -> Self {
        Self { place, content, text_alone: false }
    }

    /// About how much memory the row takes, in bytes.
    pub(super) fn bytes(&self) -> usize {
        fn of(value: &Value) -> usize {
            let inner = match value {
                Value::String(text) => text.len(),
                Value::Array(items) => items.iter().map(of).sum(),
                Value::Object(fields) => fields.iter().map(|(name, field)| name.len() + of(field)).sum(),
                _ => 0,
            };
            size_of::<Value>() + inner
        }
        match &self.content {
            Content::Line(line) => line.len(),
            Content::Value(value) => of(value),
        }
    }

    fn value(self) -> Result<Value> {
        match self.content {
            Content::Value(value) => Ok(value),
            Content::Line(line) => {
                let text = std::str::from_utf8(&line).map_err(|error| {
                    Error::data(format!("invalid UTF-8 at byte {} of the line", error.valid_up_to() + 1))
                        .hint("convert the file: iconv -f latin1 -t utf-8")
                        .with_source(error)
                })?;
                // The error of a truncated line is at its end, not at the start of the next one.
                numbers::parse(text.trim_end()).map_err(|error| {
                    let (what, column) = (what(&error), error.column());
                    Error::data(if what.starts_with(REPEATED) {
                        format!("{what}, at column {column}")
                    } else {
                        format!("malformed JSON at column {column}: {what}")
                    })
                    .with_source(error)
                })
            }
        }
    }

    /// Parses the row as one of `forms`.
    ///
    /// # Errors
    /// A malformed row, with file and line.
    pub fn parse(self, forms: &[Form]) -> Result<Row> {
        self.parse_noting(forms).map(|parsed| parsed.row)
    }

    /// As [`Self::parse`], with the row's `loss_weight` and the fields that nothing reads.
    ///
    /// # Errors
    /// Those of [`Self::parse`]; an invalid `loss_weight`.
    pub fn parse_noting(self, forms: &[Form]) -> Result<Parsed> {
        let (place, text_alone) = (self.place.clone(), self.text_alone);
        self.value().and_then(|value| Parsed::of(value, forms, text_alone)).map_err(|error| error.context(place))
    }

    /// Whether the row, of a file with these forms, shows a picture that its form reads or refuses. A malformed row does not;
    /// [`Self::parse`] will report it.
    pub fn shows_picture(self, forms: &[Form]) -> bool {
        !self.text_alone
            && self.value().is_ok_and(|value| {
                let linked = |row| forms.contains(&Form::Captions) && Form::Captions.fits(row);
                row_images::shows(&value) || value.as_object().is_some_and(linked)
            })
    }

    /// The source text of the row ([`source_of`]).
    ///
    /// # Errors
    /// Those of [`Self::parse`].
    pub fn source(self, forms: &[Form]) -> Result<String> {
        let place = self.place.clone();
        self.value().and_then(|value| source_of(value, forms)).map_err(|error| error.context(place))
    }

    /// Its fields; `None` if the row is malformed, which [`Self::parse`] will report.
    fn fields(&self) -> Option<Map<String, Value>> {
        match self.clone().value() {
            Ok(Value::Object(row)) => Some(row),
            _ => None,
        }
    }
}

/// Reads at most `limit` rows of `path` and passes them to `take` in order, with the forms that the file may have:
/// `format` only, or those of its first rows. `bytes` counts the bytes read from disk.
///
/// # Errors
/// The file cannot be read, the document is malformed, or `take` fails.
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
            let fields: Vec<_> = probed.iter().filter_map(RawRow::fields).collect();
            *forms = forms_of(fields.iter());
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
        probed.push(RawRow { text_alone: format == Some(Form::Text), ..row });
        if !forms.is_empty() || probed.len() == PROBE_ROWS {
            give(&mut probed, &mut forms)?;
        }
        Ok(left > 0)
    });
    // The rows before a broken one come first, because the earliest error is the one to report.
    give(&mut probed, &mut forms)?;
    finished
}

/// The forms of the first rows of `path`; empty if it cannot be read.
pub(super) fn forms(path: &Path, format: Option<Form>) -> Vec<Form> {
    let mut seen = Vec::new();
    let _ = read(path, format, Some(PROBE_ROWS), &Cell::new(0), &mut |_, forms| {
        seen = forms.to_vec();
        Ok(())
    });
    seen
}

/// Receives a row. Returns false to stop reading.
type TakeRow<'a> = &'a mut dyn FnMut(RawRow) -> Result<bool>;

struct Format {
    /// Extensions in lower case, the most common one first.
    extensions: &'static [&'static str],
    read: Read,
}

/// How to read a format.
enum Read {
    /// A text format, whose files may be compressed.
    Text(fn(&Path, &mut dyn BufRead, TakeRow<'_>) -> Result<()>),
    /// A binary format, which has its own compression.
    Whole(fn(&Path, File, &Cell<u64>, TakeRow<'_>) -> Result<()>),
}

macro_rules! formats {
    ($($module:ident = $($extension:literal)|+;)+) => {
        $( mod $module; )+

        const FORMATS: &[Format] = &[$( Format { extensions: &[$($extension),+], read: $module::READ } ),+];
    };
}
tunesmith_base::registry::formats!(formats);

impl Format {
    /// The format and compression of a file by its extensions, such as `.jsonl` or `.csv.gz`.
    fn of(path: &Path) -> Result<(&'static Self, Compression)> {
        let lower = |path: &Path| path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
        let outer = lower(path);
        let compression = outer.as_deref().map_or(Compression::None, Compression::of);
        let plain = compression == Compression::None;
        let inner = if plain { outer } else { lower(&path.with_extension("")) }.unwrap_or_default();
        match FORMATS.iter().find(|format| format.extensions.contains(&&*inner)) {
            Some(format) if plain || format.is_text() => Ok((format, compression)),
            found => Err(Error::data(format!("{}: found no known extension, expected {}", path.display(), known()))
                .hint(match (found, &*inner) {
                    (Some(_), _) => "decompress it: this format has its own compression",
                    (None, "txt") => "make it a .jsonl file with one {\"text\": …} object a line",
                    (None, _) => "rename the file after its format",
                })),
        }
    }

    const fn is_text(&self) -> bool {
        matches!(self.read, Read::Text(_))
    }
}

/// The extensions of all formats, for messages.
fn known() -> String {
    let all = |text: bool| {
        let formats = FORMATS.iter().filter(|format| format.is_text() == text);
        let names: Vec<String> = formats.map(|format| format!(".{}", format.extensions[0])).collect();
        names.split_last().map_or(String::new(), |(last, others)| format!("{} or {last}", others.join(", ")))
    };
    format!("{} (also with .gz or .zst behind it), {}", all(true), all(false))
}

fn read_rows(path: &Path, bytes: &Cell<u64>, take: TakeRow<'_>) -> Result<()> {
    let file = open(path)?;
    let (format, compression) = Format::of(path)?;
    match format.read {
        Read::Whole(read) => read(path, file, bytes, take),
        Read::Text(read) => {
            let since_row = Cell::new(0);
            let mut reader = compressed::reader(file, compression, bytes, &since_row, MAX_ROW_BYTES as u64)
                .map_err(|error| Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Data))?;
            read(path, &mut reader, &mut |row| {
                since_row.set(0);
                take(row)
            })
        }
    }
}

fn open(path: &Path) -> Result<File> {
    if path.is_dir() {
        return Err(Error::data(format!("{} is a folder, expected a file", path.display()))
            .hint(format!("name its files by a pattern: {}/*.jsonl", path.display())));
    }
    // A pipe may never get a writer, and rows are read more than once.
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err(
            Error::data(format!("{} is no regular file", path.display())).hint("write the rows to a file first")
        );
    }
    files::open(path).map_err(|error| {
        let error = Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Data);
        // A fault of the machine, such as its limit on open files, keeps its own hint.
        match error.kind() {
            tunesmith_base::Kind::Data => error.hint("check data.train_path, val_path, test_path and datasets"),
            _ => error,
        }
    })
}

/// Hashes all that decides which rows files have: their bytes and extensions.
pub(super) fn hash_files(paths: &[PathBuf], hasher: &mut blake3::Hasher) -> Result<()> {
    for path in paths {
        let mut content = blake3::Hasher::new();
        content
            .update_reader(open(path)?)
            .map_err(|error| Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Data))?;
        hasher.update(content.finalize().as_bytes());
        hasher.update(path.file_name().map_or_else(String::new, extensions).as_bytes());
        // Rows of archives name pictures by where the archive is.
        if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("tar") || end.eq_ignore_ascii_case("zip")) {
            let whole = std::path::absolute(path).map_err(|error| Error::io("find", path, &error))?;
            hasher.update(whole.as_os_str().as_encoded_bytes());
        }
    }
    Ok(())
}

/// The part of a file name after its first dot.
fn extensions(name: &std::ffi::OsStr) -> String {
    name.to_string_lossy().split_once('.').map_or(String::new(), |(_, extensions)| extensions.to_owned())
}

//! Reads rows from JSON documents: a list of rows, or `{"data": […]}`. Any other `.json` file is read as JSON Lines.
use std::cell::RefCell;
use std::fmt;
use std::io::{BufRead, Read};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::jsonl::lines;
use super::text::{begin, unreadable};
use super::{Content, Place, RawRow, TakeRow, what};
use crate::numbers;
use crate::strict::{REPEATED, Strict};
use tunesmith_base::error::{Error, Result};

pub(super) const READ: super::Read = super::Read::Text(read);

fn read(path: &Path, reader: &mut dyn BufRead, take: TakeRow<'_>) -> Result<()> {
    let first = begin(path, reader)?;
    if first == Some(b'[') || holds_data(reader) {
        read_document(path, reader, take)
    } else {
        lines(path, reader, take)
    }
}

/// Whether a document that begins with `{` is `{"data": …}` and not JSON Lines, judged by its first key.
fn holds_data(reader: &mut dyn BufRead) -> bool {
    let Ok(head) = reader.fill_buf() else { return false };
    let head = head.trim_ascii_start();
    head.strip_prefix(b"{").is_some_and(|rest| rest.trim_ascii_start().starts_with(b"\"data\""))
}

/// Reads the list, or the list under `data`, item by item.
fn read_document(path: &Path, reader: impl BufRead, take: TakeRow<'_>) -> Result<()> {
    let seen = Rc::default();
    let mut sink = Sink { path: path.into(), take, row: 0, outcome: None, seen: Rc::clone(&seen) };
    let mut deserializer = serde_json::Deserializer::from_reader(Recording { reader, seen });
    let parsed = deserializer.deserialize_any(Document(&mut sink)).and_then(|()| deserializer.end());
    match (sink.outcome, parsed) {
        (Some(outcome), _) => outcome,
        (None, Ok(())) => Ok(()),
        (None, Err(error)) if error.is_io() => Err(unreadable(path, &std::io::Error::from(error))),
        (None, Err(error)) => {
            let place = format!("{}:{}:{}", path.display(), error.line(), error.column());
            if what(&error).starts_with(REPEATED) {
                return Err(Error::data(format!("{place}: {}", what(&error))).with_source(error));
            }
            Err(Error::data(format!("{place}: malformed JSON: {}", what(&error)))
                .hint("expected a list of rows, or {\"data\": [rows]}")
                .with_source(error))
        }
    }
}

/// A reader that keeps the text since the last row, from which [`crate::numbers`] takes the floats.
struct Recording<R> {
    reader: R,
    seen: Rc<RefCell<Vec<u8>>>,
}

impl<R: BufRead> Read for Recording<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.seen.borrow_mut().extend_from_slice(&buffer[..read]);
        Ok(read)
    }
}

/// What the visitors below share: where rows go, and the result if reading ended early.
struct Sink<'a> {
    path: Arc<Path>,
    take: TakeRow<'a>,
    row: u64,
    outcome: Option<Result<()>>,
    /// The text since the last row.
    seen: Rc<RefCell<Vec<u8>>>,
}

struct Document<'s, 'a>(&'s mut Sink<'a>);

impl<'de> Visitor<'de> for Document<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(Strict(mut value)) = items.next_element()? {
            numbers::refine(&self.0.seen.take(), &mut value);
            self.0.row += 1;
            let place = Place { path: self.0.path.clone(), line: self.0.row, counts_rows: true };
            match (self.0.take)(RawRow::new(place, Content::Value(value))) {
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

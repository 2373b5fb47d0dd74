//! JSON documents: a list of rows, or `{"data": […]}`; else JSON Lines by another name.
use std::fmt;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::jsonl::lines;
use super::text::{begin, unreadable};
use super::{Content, Place, RawRow, Read, TakeRow, what};
use crate::error::{Error, Result};

pub(super) const READ: Read = Read::Text(read);

fn read(path: &Path, reader: &mut dyn BufRead, take: TakeRow<'_>) -> Result<()> {
    let first = begin(path, reader)?;
    if first == Some(b'[') || holds_data(reader) {
        read_document(path, reader, take)
    } else {
        lines(path, reader, take)
    }
}

/// Whether a document that opens with `{` is `{"data": …}`, judged by its first key; else it is JSON Lines.
fn holds_data(reader: &mut dyn BufRead) -> bool {
    let Ok(head) = reader.fill_buf() else { return false };
    let head = head.trim_ascii_start();
    head.strip_prefix(b"{").is_some_and(|rest| rest.trim_ascii_start().starts_with(b"\"data\""))
}

/// The list, or the list under `data`, item by item.
fn read_document(path: &Path, reader: impl BufRead, take: TakeRow<'_>) -> Result<()> {
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

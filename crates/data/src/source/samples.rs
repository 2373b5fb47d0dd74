//! Turns the members of an archive into rows: members with the same stem are one row, as in `WebDataset`. For example,
//! `0042.jpg`, `0042.txt` and `0042.json` are an image, its caption, and further fields.
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::{Content, MAX_ROW_BYTES, Place, RawRow, TakeRow};
use crate::archive::hash;
use crate::json_type::json_type;
use crate::numbers;
use tunesmith_base::error::{Error, Result};

const PICTURES: [&str; 8] = ["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"];
const TEXTS: [&str; 3] = ["txt", "text", "caption"];
const VIDEOS: [&str; 5] = ["mp4", "mov", "mkv", "webm", "avi"];
const AUDIOS: [&str; 5] = ["wav", "mp3", "flac", "ogg", "m4a"];

/// What a member contributes to its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Picture,
    Text,
    Json,
    /// A video, audio or unknown file. Only its name is passed on, under its extension.
    Other,
}

/// Splits the name of a member into its stem and its extension in lower case, and says what it contributes. `None` for
/// files that belong to no row, such as `.DS_Store`.
pub(super) fn parts(name: &str) -> Option<(&str, String, Kind)> {
    let file = name.rfind('/').map_or(0, |at| at + 1);
    let dot = file + name[file..].find('.')?;
    let extension = name[dot + 1..].to_lowercase();
    let last = extension.rsplit('.').next().unwrap_or_default();
    let kind = match last {
        _ if PICTURES.contains(&last) => Kind::Picture,
        _ if TEXTS.contains(&last) => Kind::Text,
        "json" => Kind::Json,
        _ => Kind::Other,
    };
    (dot > file).then(|| (&name[..dot], extension, kind))
}

/// Collects the members of an archive and passes on a row when its stem changes.
pub(super) struct Samples<'a> {
    path: Arc<Path>,
    take: TakeRow<'a>,
    stem: String,
    row: Row,
    rows: u64,
    /// Bytes of this row's members that were read so far.
    bytes: usize,
    /// The hashes of the names of all members so far, to find a name that occurs twice.
    names: HashSet<u128>,
    goes_on: bool,
}

#[derive(Default)]
struct Row {
    fields: Map<String, Value>,
    text: Option<String>,
    pictures: Vec<Value>,
    others: Vec<(String, String)>,
}

impl<'a> Samples<'a> {
    pub(super) fn new(path: &Path, take: TakeRow<'a>) -> Self {
        let stem = String::new();
        Self {
            path: path.into(),
            take,
            stem,
            row: Row::default(),
            rows: 0,
            bytes: 0,
            names: HashSet::new(),
            goes_on: true,
        }
    }

    /// Adds a member. `read` returns its bytes; for a picture, its name: a path or a `data:` URI. Returns false when no
    /// more rows are wanted.
    pub(super) fn add(&mut self, name: &str, read: &mut dyn FnMut(Kind) -> Result<Vec<u8>>) -> Result<bool> {
        let Some((stem, extension, kind)) = parts(name) else { return Ok(true) };
        if stem != self.stem && !self.finish()? {
            return Ok(false);
        }
        stem.clone_into(&mut self.stem);
        let within = |error: Error| error.context(format!("{}: {name}", self.path.display()));
        if !self.names.insert(hash(name)) {
            let error = Error::data("two members of the archive have this name, and a row can use only one");
            return Err(within(
                error.hint("write the archive again, with each member once (`tar -r` adds a second one)"),
            ));
        }
        let mut bytes = || {
            let bytes = read(kind).map_err(within)?;
            self.bytes += bytes.len();
            if self.bytes > MAX_ROW_BYTES {
                return Err(within(Error::data(format!("a row takes more than {} MiB", MAX_ROW_BYTES >> 20))));
            }
            Ok(bytes)
        };
        let text = |bytes: Vec<u8>| {
            String::from_utf8(bytes).map_err(|error| {
                within(Error::data(format!("invalid UTF-8 at byte {}", error.utf8_error().valid_up_to() + 1)))
            })
        };
        match kind {
            Kind::Picture => self.row.pictures.push(text(bytes()?)?.into()),
            Kind::Text => self.row.text = Some(text(bytes()?)?.trim().to_owned()),
            Kind::Json => match numbers::parse(text(bytes()?)?.trim_start_matches('\u{feff}').trim()) {
                Ok(Value::Object(fields)) => self.row.fields = fields,
                Ok(other) => {
                    return Err(within(Error::data(format!("{}, expected an object", json_type(&other)))));
                }
                Err(error) => return Err(within(Error::data(format!("malformed JSON: {error}")))),
            },
            Kind::Other => self.row.others.push((extension, name.to_owned())),
        }
        Ok(true)
    }

    /// Passes on the row that was collected so far. Returns false when no more rows are wanted.
    pub(super) fn finish(&mut self) -> Result<bool> {
        let Row { mut fields, text, mut pictures, others } = std::mem::take(&mut self.row);
        self.bytes = 0;
        for (extension, name) in others {
            let last = extension.rsplit('.').next().unwrap_or_default();
            let field = match last {
                _ if VIDEOS.contains(&last) => "video".to_owned(),
                _ if AUDIOS.contains(&last) => "audio".to_owned(),
                _ => extension,
            };
            fields.entry(field).or_insert_with(|| name.into());
        }
        if let Some(text) = text {
            fields.entry("caption").or_insert_with(|| text.into());
        }
        if !pictures.is_empty() {
            for field in ["image", "images"] {
                fields.remove(field);
            }
            let one = pictures.len() == 1;
            let value = if one { pictures.swap_remove(0) } else { pictures.into() };
            fields.insert(if one { "image" } else { "images" }.to_owned(), value);
        }
        if fields.is_empty() || !self.goes_on {
            return Ok(self.goes_on);
        }
        self.rows += 1;
        let place = Place { path: Arc::clone(&self.path), line: self.rows, counts_rows: true };
        self.goes_on = (self.take)(RawRow::new(place, Content::Value(Value::Object(fields))))?;
        Ok(self.goes_on)
    }
}

/// The name of a picture that stays in its archive: the path of the archive, followed by that of the member.
pub(super) fn reference(archive: &Path, name: &str) -> Result<Vec<u8>> {
    let whole = std::path::absolute(archive).map_err(|error| Error::io("find", archive, &error))?;
    let whole = whole.to_str().ok_or_else(|| Error::data("the archive's path is not in UTF-8"))?;
    Ok(format!("{whole}/{name}").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_name_is_cut_at_the_first_dot_of_its_file() {
        assert_eq!(parts("a.b/0001.left.JPG"), Some(("a.b/0001", "left.jpg".to_owned(), Kind::Picture)));
        assert_eq!(parts("0001.json"), Some(("0001", "json".to_owned(), Kind::Json)));
        assert_eq!(parts("a/README"), None);
        assert_eq!(parts("a/._0001.jpg"), None);
    }

    #[test]
    fn members_with_one_stem_are_a_row() {
        let mut rows = Vec::new();
        let mut take = |row: RawRow| {
            let Content::Value(value) = row.content else { panic!("no value") };
            rows.push((row.place.line, value));
            Ok(rows.len() < 4)
        };
        let mut samples = Samples::new(Path::new("a.tar"), &mut take);
        let mut goes_on = true;
        for (name, content) in [
            ("x/1.jpg", "A"),
            ("x/1.txt", " a cat \n"),
            ("x/1.npy", "?"),
            ("x/2.left.png", "B"),
            ("x/2.right.png", "C"),
            ("x/2.json", r#"{"caption": ["two", "both"], "image": "elsewhere.png"}"#),
            ("x/2.txt", "unread"),
            ("__MACOSX/._2.png", "?"),
            ("x/3.mp4", "?"),
            ("x/4.json", r#"{"image": "elsewhere.png"}"#),
            ("x/5.jpg", "?"),
        ] {
            goes_on = samples.add(name, &mut |_| Ok(content.as_bytes().to_vec())).unwrap();
        }
        assert!(!goes_on, "nobody wants the fifth row");
        assert!(!samples.finish().unwrap());
        let expected = [
            json!({"image": "A", "caption": "a cat", "npy": "x/1.npy"}),
            json!({"images": ["B", "C"], "caption": ["two", "both"]}),
            json!({"video": "x/3.mp4"}),
            json!({"image": "elsewhere.png"}),
        ];
        assert_eq!(rows, (1..).zip(expected).collect::<Vec<_>>());
    }

    #[test]
    fn a_bad_member_is_named() {
        for (name, content, part) in [
            ("1.json", &b"[1]"[..], "a list, expected an object"),
            ("1.json", &b"{"[..], "malformed JSON"),
            ("1.txt", &b"\xff"[..], "invalid UTF-8 at byte 1"),
        ] {
            let mut take = |_| Ok(true);
            let error = Samples::new(Path::new("a.tar"), &mut take).add(name, &mut |_| Ok(content.to_vec()));
            let error = error.unwrap_err();
            assert!(
                error.message().starts_with(&format!("a.tar: {name}: ")) && error.message().contains(part),
                "{error}"
            );
        }
    }

    #[test]
    fn two_members_with_one_name_are_refused() {
        for again in ["1.txt", "1.json", "1.jpg", "1.npy"] {
            let mut take = |_| Ok(true);
            let mut samples = Samples::new(Path::new("a.tar"), &mut take);
            let mut add = |name: &str| samples.add(name, &mut |_| Ok(b"{}".to_vec()));
            for name in ["1.txt", "1.json", "1.jpg", "1.npy"] {
                add(name).unwrap();
            }
            let error = add(again).unwrap_err();
            assert!(error.message().starts_with(&format!("a.tar: {again}: two members")), "{error}");
            // In another row's place too.
            add("2.txt").unwrap();
            add(again).unwrap_err();
        }
    }
}

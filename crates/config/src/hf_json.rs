//! Reads checked values from a JSON file of a model folder, by key. An error names the file, the key, the value found,
//! and what is expected.
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// The largest width, number of heads and vocabulary. Products of two of them stay far from overflow.
pub(super) const MAX_SIZE: usize = 1 << 24;
/// The most bytes of a `config.json` that are read.
const CONFIG_BYTES: u64 = 4 << 20;

/// The text of a file of at most [`CONFIG_BYTES`] bytes; `None` where the file does not exist.
pub(super) fn read_text(path: &Path) -> Result<Option<String>> {
    let failed = |error: std::io::Error| Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Model);
    let file = match files::open_member(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(CONFIG_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > CONFIG_BYTES {
        return Err(Error::model(format!(
            "{}: larger than {CONFIG_BYTES} bytes, expected a small JSON file",
            path.display()
        )));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| {
        Error::model(format!("{}: not UTF-8 at byte {}", path.display(), error.utf8_error().valid_up_to()))
    })
}

/// Replaces `Infinity`, `-Infinity` and `NaN` outside of strings by the form of Transformers 5,
/// `{"__float__": "Infinity"}`. `None` if the text has none of them.
fn special_floats(text: &str) -> Option<String> {
    let (mut tagged, mut rest, mut in_string, mut found) = (String::with_capacity(text.len()), text, false, false);
    while let Some(first) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| !in_string && rest.starts_with(word));
        let taken = match (word, first) {
            (Some(word), _) => {
                found = true;
                tagged.extend(["{\"", SPECIAL, "\": \"", word, "\"}"]);
                rest = &rest[word.len()..];
                continue;
            }
            (None, '\\') if in_string => first.len_utf8() + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, '"') => {
                in_string = !in_string;
                1
            }
            (None, _) => first.len_utf8(),
        };
        tagged.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    found.then_some(tagged)
}

/// The key by which Transformers 5 writes numbers that JSON does not know.
pub(super) const SPECIAL: &str = "__float__";

/// A parsed JSON object with getters whose errors name the file and the key.
#[derive(Clone)]
pub(super) struct Source<'a> {
    pub(super) origin: &'a Path,
    pub(super) map: Map<String, Value>,
    /// What precedes a key in messages: empty, or the object that holds it, such as `rope_scaling.`.
    pub(super) prefix: String,
}

impl<'a> Source<'a> {
    pub(super) fn parse(text: &str, origin: &'a Path) -> Result<Self> {
        // Python writes `Infinity` and `NaN`, which JSON does not know. Only a file with them fails here and can be
        // parsed after the replacement.
        let parsed = serde_json::from_str(text).or_else(|error| match special_floats(text) {
            Some(tagged) => serde_json::from_str(&tagged).map_err(|_| error),
            None => Err(error),
        });
        match parsed {
            Ok(Value::Object(map)) => Ok(Self { origin, map, prefix: String::new() }),
            Ok(other) => {
                Err(Error::model(format!("{}: expected a JSON object, found {}", origin.display(), brief(&other))))
            }
            Err(error) => Err(Error::model(format!("{}: not valid JSON", origin.display())).caused_by(error)),
        }
    }

    /// An object without keys, for which every getter gives its default.
    pub(super) fn empty(origin: &'a Path) -> Self {
        Self { origin, map: Map::new(), prefix: String::new() }
    }

    pub(super) fn error(&self, message: impl std::fmt::Display) -> Error {
        Error::model(format!("{}: {message}", self.origin.display()))
    }

    /// An error about one key: found and expected.
    pub(super) fn mismatch(&self, key: &str, expected: &str) -> Error {
        match self.map.get(key) {
            Some(value) => self.error(format!("{}{key} is {}, expected {expected}", self.prefix, brief(value))),
            None => self.error(format!("no key {}{key}, expected {expected}", self.prefix)),
        }
    }

    pub(super) fn not_yet(&self, what: impl std::fmt::Display) -> Error {
        self.error(format!("not yet: {what}"))
    }

    /// The value; `None` where the key is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key exists, even with the value null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Whether the key exists and its value is null. Unless a function here gives null a meaning, null is refused, and
    /// only an absent key has the default.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// An integer of at least 1; `default` if the key is absent.
    pub(super) fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        self.size_up_to(key, default, MAX_SIZE)
    }

    pub(super) fn size_up_to(&self, key: &str, default: Option<usize>, most: usize) -> Result<usize> {
        let expected = || self.mismatch(key, &format!("a whole number from 1 to {most}"));
        let found = match self.get(key) {
            Some(value) => value.as_u64().and_then(|value| usize::try_from(value).ok()).ok_or_else(expected)?,
            None => default.filter(|_| !self.is_null(key)).ok_or_else(expected)?,
        };
        if (1..=most).contains(&found) { Ok(found) } else { Err(expected()) }
    }

    /// An integer of at least 1; `default` if the key is absent or null.
    pub(super) fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.is_null(key) { Ok(default) } else { self.size(key, Some(default)) }
    }

    /// An integer of at least 0; `default` if the key is absent.
    pub(super) fn count(&self, key: &str, default: usize) -> Result<usize> {
        let Some(value) = self.map.get(key) else { return Ok(default) };
        let count = value.as_u64().and_then(|value| usize::try_from(value).ok()).filter(|count| *count <= MAX_SIZE);
        count.ok_or_else(|| self.mismatch(key, &format!("a whole number from 0 to {MAX_SIZE}")))
    }

    /// `default` where the key is absent. Null is false, as in Python.
    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.map.get(key) {
            Some(Value::Null) => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.mismatch(key, "true or false")),
            None => Ok(default),
        }
    }

    /// A list of indices into another list, such as numbers of blocks.
    pub(super) fn indexes(&self, key: &str, default: &[usize]) -> Result<Vec<usize>> {
        let Some(value) = self.map.get(key) else { return Ok(default.to_vec()) };
        let index = |value: &Value| value.as_u64().and_then(|value| usize::try_from(value).ok());
        let found = value.as_array().and_then(|list| list.iter().map(index).collect());
        found.ok_or_else(|| self.mismatch(key, "a list of whole numbers"))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            Some(value) => match value.as_f64().filter(|value| value.is_finite()) {
                Some(value) => Ok(Some(value)),
                None => Err(self.mismatch(key, "a number")),
            },
            None => Ok(None),
        }
    }

    /// A number; `default` where the key is absent.
    pub(super) fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        let default = (!self.is_null(key)).then_some(default);
        self.number(key)?.or(default).ok_or_else(|| self.mismatch(key, "a number"))
    }

    /// A number above 0; `default` where the key is absent.
    pub(super) fn positive(&self, key: &str, default: f64) -> Result<f64> {
        let value = self.number_or(key, default)?;
        // f32, in which the value is used, must keep it finite and above zero.
        if (1e-30..=1e30).contains(&value) { Ok(value) } else { Err(self.mismatch(key, "a number above 0")) }
    }

    /// A number above 0. Null means `None`; an absent key means `default`.
    pub(super) fn optional_positive(&self, key: &str, default: Option<f64>) -> Result<Option<f64>> {
        match self.get(key) {
            Some(_) => self.positive(key, 1.0).map(Some),
            None if self.is_null(key) => Ok(None),
            None => Ok(default),
        }
    }

    /// The object under `key`, which describes an image encoder or another part.
    pub(super) fn part(&self, key: &str) -> Result<Source<'a>> {
        match self.get(key) {
            Some(Value::Object(map)) => {
                Ok(Source { origin: self.origin, map: map.clone(), prefix: format!("{}{key}.", self.prefix) })
            }
            _ => Err(self.mismatch(key, "an object that describes the image encoder")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.mismatch(key, "a string")),
            None => Ok(None),
        }
    }

    /// A token id or a list of them. Negative ids are left out: old files write -1 for none.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let one = std::slice::from_ref(value);
        let mut ids = Vec::new();
        for value in value.as_array().map_or(one, Vec::as_slice) {
            match value.as_i64() {
                Some(id) if id < 0 => {}
                Some(id) if u32::try_from(id).is_ok() => ids.push(id as u32),
                _ => return Err(self.mismatch(key, "a token id, a list of token ids, or null")),
            }
        }
        Ok(ids)
    }

    /// Refuses a file whose `architectures` names none of these classes; an absent or empty list passes.
    pub(super) fn check_class(&self, known: &[&str]) -> Result<()> {
        let Some(classes) = self.get("architectures") else { return Ok(()) };
        let classes = classes.as_array().ok_or_else(|| self.mismatch("architectures", "a list"))?;
        let has = |class: &Value| class.as_str().is_some_and(|class| known.contains(&class));
        match known.first() {
            Some(expected) if !classes.is_empty() && !classes.iter().any(has) => {
                Err(self.mismatch("architectures", expected))
            }
            _ => Ok(()),
        }
    }
}

/// A JSON value short enough for a message.
pub(super) fn brief(value: &Value) -> String {
    // A number that JSON does not know, as the file has it.
    let special =
        |value: &Value| value.as_object().and_then(|map| map.get(SPECIAL)).and_then(Value::as_str).map(str::to_owned);
    match value {
        Value::Object(_) => special(value).unwrap_or_else(|| "an object".into()),
        Value::Array(items) if items.len() <= 4 && items.iter().any(|item| special(item).is_some()) => {
            let items: Vec<String> =
                items.iter().map(|item| special(item).unwrap_or_else(|| item.to_string())).collect();
            format!("[{}]", items.join(","))
        }
        Value::Array(items) if items.len() > 4 => format!("a list of {}", items.len()),
        _ => {
            let text = value.to_string();
            if text.chars().count() > 80 { text.chars().take(77).collect::<String>() + "..." } else { text }
        }
    }
}

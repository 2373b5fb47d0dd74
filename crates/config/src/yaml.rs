//! YAML with limits on size and nesting: from bytes to [`Node`]s, and from a node back to its line.
use super::json_comments::without_comments;
use super::suggest::nearest;
use super::value::Node;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::cell::Cell;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

const MAX_BYTES: u64 = 1 << 20;
/// The most values after aliases are followed.
const MAX_NODES: usize = 100_000;
/// The most opening brackets, in comments too: the time of the YAML scanner is quadratic in their depth.
const MAX_BRACKETS: usize = 4_096;

/// A file's mapping, with its text to find lines in.
#[derive(Debug)]
pub(super) struct Document {
    path: PathBuf,
    text: String,
    /// The top-level keys in file order; a key that is written twice is here twice.
    pub entries: Vec<(String, Node)>,
}

/// A line and a column, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub line: usize,
    pub column: usize,
}

impl Document {
    /// Reads a file. Errors: it cannot be read, is too large, is no UTF-8, no YAML or no mapping.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_bytes(path)?;
        let begins = |sign: &[u8]| bytes.trim_ascii_start().starts_with(sign);
        // JSON, with comments before or in it.
        if begins(b"{") || begins(b"//") || begins(b"/*") { Self::read_json(path) } else { Self::parse(path, bytes) }
    }

    /// Reads JSON, in which there may be comments. Errors are those of [`Document::read`].
    pub fn read_json(path: &Path) -> Result<Self> {
        let bytes = read_bytes(path)?;
        match std::str::from_utf8(&bytes) {
            Ok(text) => Self::parse_json(path, text),
            Err(_) => Self::parse(path, bytes),
        }
    }

    /// As [`Document::read_json`], of a text.
    pub(super) fn parse_json(path: &Path, text: &str) -> Result<Self> {
        let plain = without_comments(text).map_err(|line| {
            Error::config(format!("{}:{line}: a comment begins with /* and has no end", path.display()))
                .hint("end it with */")
        })?;
        Self::parse(path, plain.into_bytes())
    }

    pub(super) fn parse(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = valid.split(|&byte| byte == b'\n').count();
            Error::config(format!("{}:{line}: not valid UTF-8 (byte {})", path.display(), valid.len()))
                .hint("save the file as UTF-8")
        })?;
        match parse(&text) {
            Ok(Node::Map(entries)) => Ok(Self { path: path.to_owned(), text, entries }),
            Ok(Node::Null) => Ok(Self { path: path.to_owned(), text, entries: Vec::new() }),
            Ok(other) => {
                let found = other.describe();
                let error = format!("{}: expected sections such as `train:`, found {found}", path.display());
                Err(with_colon_hint(Error::config(error), &text))
            }
            Err(problem) => Err(problem.in_file(path, &text)),
        }
    }

    /// The position of a key. `steps` are its indices among the entries, one for each level.
    pub fn position(&self, steps: &[usize]) -> Position {
        let locate = Locate { steps };
        let location = locate.deserialize(serde_yaml::Deserializer::from_str(&self.text)).err();
        location.and_then(|error| error.location()).map_or(Position { line: 1, column: 1 }, |location| Position {
            line: location.line(),
            column: location.column(),
        })
    }

    /// The path that was given to [`Document::read`].
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What some editors put before UTF-8.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A file's bytes without a byte order mark, if it is no larger than a configuration may be.
fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let cannot = |source: &std::io::Error| Error::io("read", path, source).with_kind(tunesmith_base::Kind::Config);
    let file = files::open(path).map_err(|source| match nearest_file(path) {
        Some(near) => cannot(&source).hint(format!("did you mean {}?", near.display())),
        None => cannot(&source),
    })?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|source| cannot(&source))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::config(format!("{}: larger than {MAX_BYTES} bytes", path.display()))
            .hint("is this a configuration file?"));
    }
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    Ok(bytes)
}

/// Reads one value of the command line or the environment. Text that is not YAML becomes a string, and so does text that YAML would
/// change: in `runs/a #3` it sees a comment, and a line break becomes a space. Quoted text, tags, and block scalars stay YAML.
pub(super) fn parse_value(text: &str) -> Node {
    let trimmed = text.trim();
    let is_marked = trimmed.starts_with(['"', '\'', '!', '|', '>']);
    match parse(text) {
        Ok(Node::Str(read)) if read != trimmed && !is_marked => Node::Str(trimmed.to_owned()),
        Ok(node) => node,
        Err(_) => Node::Str(text.to_owned()),
    }
}

/// The top-level mapping of another program's YAML file, with the limits of our configuration files.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: it cannot be read, or is no mapping; [`tunesmith_base::Kind::Io`].
pub fn read_mapping(path: &Path) -> Result<Vec<(String, Node)>> {
    Document::read(path).map(|document| document.entries)
}

/// Reads YAML from elsewhere, such as the front matter of a data set's card, with the limits of configuration files.
pub fn parse_yaml(text: &str) -> Option<Node> {
    parse(text).ok()
}

/// The file in the same folder with the most similar name.
fn nearest_file(path: &Path) -> Option<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let names: Vec<String> = std::fs::read_dir(folder.unwrap_or(Path::new(".")))
        .ok()?
        .take(1_000)
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    // `include: base` means `base.yaml`: the stem alone may tell.
    let stem = |name: &str| Path::new(name).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
    let stems: Vec<String> = names.iter().map(|name| stem(name)).collect();
    let wanted = path.file_name()?.to_str()?;
    let same_stem = || {
        let near = nearest(&stem(wanted), stems.iter().map(String::as_str))?;
        stems.iter().position(|stem| stem == near).map(|at| names[at].as_str())
    };
    let near = nearest(wanted, names.iter().map(String::as_str)).or_else(same_stem)?;
    Some(folder.map_or_else(|| PathBuf::from(near), |folder| folder.join(near))).filter(|near| near != path)
}

struct Problem {
    message: String,
    position: Option<Position>,
}

impl Problem {
    fn in_file(self, path: &Path, text: &str) -> Error {
        let Some(Position { line, column }) = self.position else {
            let error = Error::config(format!("{}: {}", path.display(), self.message));
            return with_colon_hint(error, text);
        };
        let error = Error::config(format!("{}:{line}:{column}: {}", path.display(), self.message));
        match text.lines().nth(line - 1) {
            Some(found) if found.contains('\t') => error.hint("this line has a tab; YAML is indented by spaces"),
            _ => hint_of_colon(error, assigned_before(text, line)),
        }
    }
}

/// The key of a line `key = value`, as other formats have it.
fn assigned(line: &str) -> Option<&str> {
    let (key, value) = line.split_once('=')?;
    let key = key.trim();
    let is_key = key.starts_with(|first: char| first.is_ascii_alphabetic())
        && key.chars().all(|sign| sign.is_ascii_alphanumeric() || "_-.".contains(sign));
    (is_key && !value.starts_with('=')).then_some(key)
}

/// The first of several lines `key = value` that end at the line of that number, from 1, or above it: the parser notices them
/// late.
fn assigned_before(text: &str, line: usize) -> Option<&str> {
    let lines: Vec<&str> = text.lines().take(line).collect();
    let (here, above) =
        lines.split_last().filter(|_| lines.len() == line).map_or(("", &lines[..]), |(here, above)| (*here, above));
    let above = above.iter().rev().filter(|line| !line.trim().is_empty());
    above.map_while(|line| assigned(line)).last().or_else(|| assigned(here))
}

/// The error about `text` with what to write in place of its first line `key = value`, if there is one.
pub(super) fn with_colon_hint(error: Error, text: &str) -> Error {
    hint_of_colon(error, text.lines().find_map(assigned))
}

fn hint_of_colon(error: Error, key: Option<&str>) -> Error {
    match key {
        Some(key) => error.hint(format!("in YAML a colon stands after a key: write `{key}: …`, not `{key} = …`")),
        None => error,
    }
}

fn parse(text: &str) -> Result<Node, Problem> {
    if text.bytes().filter(|byte| matches!(byte, b'[' | b'{')).count() > MAX_BRACKETS {
        return Err(Problem { message: format!("more than {MAX_BRACKETS} brackets"), position: None });
    }
    let budget = Cell::new(MAX_NODES);
    Tree { budget: &budget }.deserialize(serde_yaml::Deserializer::from_str(text)).map_err(|error| {
        let message = error.to_string();
        // The parser appends the position, which stands in front here.
        let message = message.split(" at line ").next().unwrap_or(&message).to_owned();
        let position = error.location().map(|at| Position { line: at.line(), column: at.column() });
        Problem { message, position }
    })
}

/// Builds a [`Node`], counting values so that aliases cannot multiply without end.
#[derive(Clone, Copy)]
struct Tree<'a> {
    budget: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        match self.budget.get().checked_sub(1) {
            Some(left) => self.budget.set(left),
            None => return Err(D::Error::custom(format!("more than {MAX_NODES} values (aliases followed)"))),
        }
        deserializer.deserialize_any(self)
    }
}

macro_rules! scalars {
    ($($visit:ident($type:ty) => $node:expr;)*) => {$(
        fn $visit<E: serde::de::Error>(self, value: $type) -> Result<Node, E> {
            Ok($node(value))
        }
    )*};
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value without a tag")
    }

    scalars! {
        visit_bool(bool) => Node::Bool;
        visit_i64(i64) => |value| Node::Int(i128::from(value));
        visit_u64(u64) => |value| Node::Int(i128::from(value));
        visit_i128(i128) => Node::Int;
        visit_u128(u128) => |value| i128::try_from(value).map_or(Node::Float(value as f64), Node::Int);
        visit_f64(f64) => Node::Float;
        visit_str(&str) => |value: &str| Node::Str(value.to_owned());
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key_seed(self)? {
            let Node::Str(key) = key else {
                return Err(A::Error::custom(format!("expected a key, found {}", key.describe())));
            };
            entries.push((key, map.next_value_seed(self)?));
        }
        Ok(Node::Map(entries))
    }
}

/// Fails at the key that the steps lead to, so that the parser's error tells its position.
struct Locate<'a> {
    steps: &'a [usize],
}

impl<'de> DeserializeSeed<'de> for Locate<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Locate<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another place")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((&step, rest)) = self.steps.split_first() else {
            return Err(A::Error::custom("here"));
        };
        for _ in 0..step {
            map.next_entry::<IgnoredAny, IgnoredAny>()?;
        }
        if rest.is_empty() {
            map.next_key_seed(Self { steps: rest })?;
        } else {
            map.next_key::<IgnoredAny>()?;
            map.next_value_seed(Self { steps: rest })?;
        }
        Ok(())
    }
}

//! Reads a foreign file: looks up each key in the format's table, and does what the table says.
use super::key_outcomes::{Expected, Fate, Foreign, Line, NOT_NEEDED, Told, cut};
use super::{Act, Format, is_off};
use crate::json_comments::without_comments;
use crate::lookup::{check, takes, unquoted};
use crate::option::Scalar;
use crate::schema::options;
use crate::source::Source;
use crate::suggest::nearest;
use crate::value::{Node, quoted};
use crate::yaml::Document;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use tunesmith_base::error::{Error, Result};

/// A value of the file.
#[derive(Debug, Clone)]
pub struct Value {
    /// The full key as the file spells it.
    pub key: String,
    /// The value.
    pub node: Node,
    /// File and line.
    pub source: Source,
}

impl Value {
    /// Whether it is `auto`, which leaves the decision to our key.
    pub fn is_auto(&self) -> bool {
        matches!(&self.node, Node::Str(word) if word.eq_ignore_ascii_case("auto"))
    }

    /// The value as JSON for messages, cut where it is long; a secret is not shown.
    pub fn shown(&self) -> String {
        if is_secret(&self.key) { "***".to_owned() } else { cut(&self.node.to_json().to_string()) }
    }

    /// How errors name the value: source and key.
    fn place(&self) -> String {
        match &self.source {
            Source::Foreign { .. } => self.source.place(),
            Source::Word(_) if is_secret(&self.key) => format!("argument {}", self.key),
            other => format!("{}: {}", other.place(), self.key),
        }
    }

    /// The error for a value of the wrong type; `what` is expected.
    pub fn expected(&self, what: &str) -> Error {
        Error::config(format!("{}: expected {what}, found {}", self.place(), self.node.describe()))
    }

    /// The error for a value that this version does not support, with the reason as a hint.
    pub fn refused(&self, why: &str) -> Error {
        Error::config(format!("{}: {} is not supported", self.place(), self.shown())).hint(why)
    }

    /// An integer of at least `least`; also accepts `5e8`.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn count(&self, least: u64) -> Result<u64> {
        let number = match &self.node {
            Node::Int(number) => u64::try_from(*number).ok(),
            Node::Float(number) if number.fract() == 0.0 && (0.0..1e15).contains(number) => Some(*number as u64),
            _ => None,
        };
        number
            .filter(|&number| number >= least)
            .ok_or_else(|| self.expected(&format!("an integer of at least {least}")))
    }

    /// A number.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn number(&self) -> Result<f64> {
        match &self.node {
            Node::Int(number) => Ok(*number as f64),
            Node::Float(number) if number.is_finite() => Ok(*number),
            _ => Err(self.expected("a number")),
        }
    }

    /// A word, in lower case.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn word(&self) -> Result<String> {
        match &self.node {
            Node::Str(word) => Ok(word.to_lowercase()),
            // YAML's `no`, and FSDP's numbers of strategies.
            Node::Bool(false) => Ok("no".to_owned()),
            Node::Int(number) => Ok(number.to_string()),
            _ => Err(self.expected("a word")),
        }
    }

    /// `true` or `false`, also as a string.
    ///
    /// # Errors
    /// Something else stands there.
    pub fn flag(&self) -> Result<bool> {
        match &self.node {
            Node::Bool(flag) => Ok(*flag),
            Node::Str(text) if text.eq_ignore_ascii_case("true") => Ok(true),
            Node::Str(text) if text.eq_ignore_ascii_case("false") => Ok(false),
            _ => Err(self.expected("true or false")),
        }
    }

    /// Whether it equals one of these, with numbers compared by value (`5e8` is 500000000) and words without case (`True`).
    fn is(&self, scalars: &[Scalar]) -> bool {
        scalars.iter().any(|scalar| match scalar {
            Scalar::Null => self.node == Node::Null,
            Scalar::Bool(flag) => self.flag().is_ok_and(|found| found == *flag),
            Scalar::Str(text) => match (&self.node, text.parse::<f64>()) {
                (Node::Str(found), _) => found.eq_ignore_ascii_case(text),
                (_, Ok(number)) => self.number().is_ok_and(|found| found == number),
                _ => false,
            },
        })
    }
}

/// Whether a key holds a token of the hub, which no message may show.
fn is_secret(key: &str) -> bool {
    key.ends_with("hub_token") || key.ends_with("to_hub_token")
}

/// The outcome of one key of [`Format::Trainer`] in our own configuration.
pub struct OneKey {
    /// The settings of ours that it gives, by full key.
    pub settings: Vec<(String, Node)>,
    /// Why it has no effect; `None` if it has one.
    pub why: Option<String>,
}

/// Reads one key of [`Format::Trainer`]; `spelled` is the full key as it was given.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the value is refused.
pub(crate) fn take_key(row: &super::Row, spelled: &str, node: &Node, source: &Source) -> Result<OneKey> {
    let value = Value { key: spelled.to_owned(), node: node.clone(), source: source.clone() };
    let mut reader = Reader::new(Format::Trainer, spelled.to_owned(), None, None, source);
    reader.act(row.key, row.act, &value)?;
    let why = reader.told.iter().find(|told| matches!(told.fate, Fate::Same | Fate::Warned));
    let why = why.map(|told| match (row.act, told.fate) {
        // It says why the key has no meaning, whatever its value.
        (Act::Warned(why), _) => why.to_owned(),
        _ => told.text.clone(),
    });
    Ok(OneKey { settings: reader.lines.into_iter().map(|line| (line.key, line.node)).collect(), why })
}

/// Reads one foreign configuration.
pub struct Reader {
    format: Format,
    /// The file's path, or the key that holds the mapping; for messages.
    name: String,
    document: Option<Document>,
    /// A mapping within our own configuration, and its source.
    inline: Option<(Vec<(String, Node)>, Source)>,
    /// The source that names the file.
    named_by: Source,
    seen: BTreeMap<String, Value>,
    told: Vec<Told>,
    lines: Vec<Line>,
    notes: Vec<String>,
    /// Claims that only the start of a run can check.
    pub expected: Expected,
    /// A DeepSpeed file that this one names, and where.
    pub nested: Option<(String, Source)>,
}

impl Reader {
    /// Opens what our `key` holds: the path of a file, or a mapping.
    pub(super) fn open(format: Format, key: &str, node: &Node, source: &Source) -> Result<Self> {
        let (name, document, inline) = match node {
            Node::Str(path) => {
                let path = Path::new(path);
                let document =
                    if format == Format::Accelerate { Document::read(path) } else { Document::read_json(path) };
                let document = document.map_err(|error| error.context(format!("{}: {key}", source.place())))?;
                (path.display().to_string(), Some(document), None)
            }
            Node::Map(entries) => (key.to_owned(), None, Some((entries.clone(), source.clone()))),
            other => return Err(Error::config(format!("{}: {key}: found {}", source.place(), other.describe()))),
        };
        Ok(Self::new(format, name, document, inline, source))
    }

    /// Reads from a text; messages call it `path`.
    pub(super) fn of_text(format: Format, path: &Path, text: &str) -> Result<Self> {
        let document = Document::parse(path, without_comments(text).into_bytes())?;
        Ok(Self::new(format, path.display().to_string(), Some(document), None, &Source::Default))
    }

    fn new(
        format: Format,
        name: String,
        document: Option<Document>,
        inline: Option<(Vec<(String, Node)>, Source)>,
        source: &Source,
    ) -> Self {
        Self {
            format,
            name,
            document,
            inline,
            named_by: source.clone(),
            seen: BTreeMap::new(),
            told: Vec::new(),
            lines: Vec::new(),
            notes: Vec::new(),
            expected: Expected::default(),
            nested: None,
        }
    }

    /// A configuration without keys: Transformers' `fsdp` without a `fsdp_config`.
    pub(super) fn empty(format: Format, key: &str, source: &Source) -> Result<Self> {
        Self::open(format, key, &Node::Map(Vec::new()), source)
    }

    /// Reads all keys, then calls `finish` for what several keys say together, and adds the outcome to `taken`.
    pub(super) fn run(mut self, finish: fn(&mut Self) -> Result<()>, taken: &mut Foreign) -> Result<()> {
        let entries = match (&self.document, &self.inline) {
            (Some(document), _) => document.entries.clone(),
            (None, Some((entries, _))) => entries.clone(),
            (None, None) => Vec::new(),
        };
        self.walk("", &entries, &mut Vec::new())?;
        finish(&mut self)?;
        taken.notes.append(&mut self.notes);
        taken.told.append(&mut self.told);
        taken.lines.append(&mut self.lines);
        taken.nested = taken.nested.take().or(self.nested);
        let Expected { rows, derives, processes, machines, machine_rank, main_address, main_port, gpu_ids } =
            self.expected;
        let all = &mut taken.expected;
        if let (Some((first, one)), Some((second, other))) = (&all.rows, &rows)
            && first != second
        {
            return Err(Error::config(format!("{one}: {first} contradicts {other}: {second}")));
        }
        all.derives |= derives;
        all.rows = all.rows.take().or(rows);
        all.processes = all.processes.take().or(processes);
        all.machines = all.machines.take().or(machines);
        all.machine_rank = all.machine_rank.take().or(machine_rank);
        all.main_address = all.main_address.take().or(main_address);
        all.main_port = all.main_port.take().or(main_port);
        all.gpu_ids = all.gpu_ids.take().or(gpu_ids);
        Ok(())
    }

    fn source(&self, key: &str, steps: &[usize]) -> Source {
        let place = match (&self.document, &self.inline) {
            (Some(document), _) => format!("{}:{}", self.name, document.position(steps).line),
            (None, Some((_, source))) => source.to_string(),
            (None, None) => self.name.clone(),
        };
        Source::Foreign { place, key: key.to_owned() }
    }

    fn walk(&mut self, prefix: &str, entries: &[(String, Node)], steps: &mut Vec<usize>) -> Result<()> {
        let mut names = HashSet::new();
        for (index, (name, node)) in entries.iter().enumerate() {
            steps.push(index);
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            let source = self.source(&key, steps);
            if !names.insert(name) {
                return Err(Error::config(format!("{}: it is given twice", source.place())).hint("keep one"));
            }
            let value = Value { key: key.clone(), node: node.clone(), source };
            let is_section = |key: &str| {
                let below = format!("{key}.");
                let alias = key.replace("bfloat16", "bf16") + ".";
                let inner = self.format == Format::Accelerate && key == "fsdp_config";
                inner || self.format.rows().iter().any(|row| row.key.starts_with(&below) || row.key.starts_with(&alias))
            };
            match (self.format.row(&key), node) {
                (Some(row), _) => self.act(row.key, row.act, &value)?,
                (None, Node::Map(inner)) if is_section(&key) => self.walk(&key, inner, steps)?,
                (None, node) if is_section(&key) && is_off(node) => {}
                (None, _) if is_section(&key) => return Err(value.expected("keys, within braces or indented below it")),
                (None, _) => return Err(self.unknown(&value)),
            }
            steps.pop();
        }
        Ok(())
    }

    fn unknown(&self, value: &Value) -> Error {
        let title = self.format.title();
        let error = Error::config(format!("{}: unknown to {title}'s configuration", value.source.place()));
        let (section, leaf) = value.key.rsplit_once('.').unwrap_or(("", &value.key));
        let own = self.format.rows().iter().map(|row| row.key);
        let within: Vec<&str> = own.clone().filter_map(|key| key.strip_prefix(section)?.strip_prefix('.')).collect();
        let misplaced = own.clone().find(|key| key.rsplit('.').next() == Some(leaf));
        let near = misplaced.map(str::to_owned);
        let near = near.or_else(|| nearest(leaf, within).map(|near| format!("{section}.{near}")));
        match near.or_else(|| nearest(&value.key, own).map(str::to_owned)) {
            Some(near) => error.hint(format!("did you mean {near}?")),
            None => error.hint("docs/foreign-configs.md lists every key"),
        }
    }

    fn act(&mut self, name: &str, act: Act, value: &Value) -> Result<()> {
        self.seen.insert(name.to_owned(), value.clone());
        match act {
            Act::Together(_) => Ok(()),
            _ if value.node == Node::Null => self.same(value, "empty"),
            Act::To(ours) if value.is_auto() => self.auto(value, ours),
            Act::To(ours) => self.put(value, ours, value.node.clone(), ""),
            Act::With(take, _) => take(self, value),
            Act::Always(scalars, why) if value.is(scalars) || value.is_auto() => self.same(value, why),
            // Where only `true` asks for nothing, `false` asks for something.
            Act::Unless(scalars, _)
                if value.is(scalars)
                    || value.is_auto()
                    || (is_off(&value.node) && !scalars.contains(&Scalar::Bool(true))) =>
            {
                self.same(value, "already so")
            }
            Act::Unless(_, why) => Err(value.refused(why)),
            Act::Warned(_) if is_off(&value.node) => self.same(value, "already so"),
            Act::Always(_, why) | Act::Warned(why) => self.warn(value, why),
        }
    }

    /// A value that was read, by its key in the table; `None` if it is absent or null.
    pub fn get(&self, name: &str) -> Option<Value> {
        self.seen.get(name).filter(|value| value.node != Node::Null).cloned()
    }

    fn tell(&mut self, value: &Value, fate: Fate, key: Option<&str>, text: String) {
        let (source, key) = (value.source.clone(), key.map(str::to_owned));
        self.told.push(Told { source, value: value.shown(), fate, key, text });
    }

    /// Notes that the value has no effect, since it asks for what holds anyway.
    ///
    /// # Errors
    /// None.
    pub fn same(&mut self, value: &Value, why: &str) -> Result<()> {
        self.tell(value, Fate::Same, None, why.to_owned());
        Ok(())
    }

    /// Notes that the value has no effect, with a note for the user that says why.
    ///
    /// # Errors
    /// None.
    pub fn warn(&mut self, value: &Value, why: &str) -> Result<()> {
        self.tell(value, Fate::Warned, None, why.to_owned());
        self.notes.push(format!("{NOT_NEEDED}{}: {} ({why})", value.source, value.shown()));
        Ok(())
    }

    /// Notes that `auto` leaves the value to our key `ours`.
    ///
    /// # Errors
    /// None.
    pub fn auto(&mut self, value: &Value, ours: &str) -> Result<()> {
        self.tell(value, Fate::Auto, Some(ours), String::new());
        Ok(())
    }

    /// Notes that the value is used or checked where the ranks are started.
    ///
    /// # Errors
    /// None.
    pub fn checked(&mut self, value: &Value, how: &str) -> Result<()> {
        self.tell(value, Fate::Taken, None, how.to_owned());
        Ok(())
    }

    /// Sets our key `ours`. `why` says what differs from the foreign value; empty if nothing does.
    ///
    /// # Errors
    /// Our key does not exist, or does not take the value.
    pub fn put(&mut self, value: &Value, ours: &str, node: Node, why: &str) -> Result<()> {
        self.line(value, ours, node, why, None, false)
    }

    /// As [`Reader::put`], but it counts only if `switch` of ours is on.
    ///
    /// # Errors
    /// As [`Reader::put`].
    pub fn put_with(&mut self, value: &Value, ours: &str, switch: &'static str) -> Result<()> {
        self.line(value, ours, value.node.clone(), "", Some(switch), false)
    }

    /// As [`Reader::put`], but it counts only if nothing else sets the key.
    ///
    /// # Errors
    /// As [`Reader::put`].
    pub fn imply(&mut self, value: &Value, ours: &str, node: Node, why: &str) -> Result<()> {
        self.line(value, ours, node, why, None, true)
    }

    fn line(
        &mut self,
        value: &Value,
        ours: &str,
        node: Node,
        why: &str,
        only_with: Option<&'static str>,
        soft: bool,
    ) -> Result<()> {
        let Some(def) = options().find(|def| def.path() == ours) else {
            return Err(value.refused(&format!("{ours} is not yet part of this version")));
        };
        let node = whole(ours, node);
        if let Err(error) = check(def, ours, &node, &Source::Word(ours.to_owned())) {
            let why = error.hint_text().unwrap_or_else(|| error.message());
            return Err(value.refused(&format!("{ours} does not take {}: {why}", quoted(&node.to_json().to_string()))));
        }
        let becomes = format!("{ours}: {}", node.to_json());
        let text = if why.is_empty() { becomes } else { format!("{becomes} ({why})") };
        self.tell(value, Fate::Taken, Some(ours), text);
        let (source, named_by) = (value.source.clone(), self.named_by.clone());
        self.lines.push(Line { key: ours.to_owned(), node, source, only_with, soft, named_by });
        Ok(())
    }
}

/// A float without a fraction as an integer, if our key takes only integers: DeepSpeed's files write `5e8`.
fn whole(ours: &str, node: Node) -> Node {
    match node {
        Node::Float(number) if number.fract() == 0.0 && number.abs() < 1e15 && !takes(ours, &Node::Float(number)) => {
            Node::Int(number as i128)
        }
        // Numbers that some readers take for texts: `1e-5`.
        Node::Str(_) => unquoted(ours, node),
        other => other,
    }
}

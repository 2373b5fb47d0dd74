//! The state of one import: the source's keys, what is written, and a note on each key.
use super::refusal::refusal;
use super::report::{Imported, Note, Outcome, Refused};
use super::toolkit::Toolkit;
use super::write::{self, Line};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{self as config, Node, foreign};

/// What a table says about a key of the source.
#[derive(Clone, Copy)]
pub(super) enum Act {
    /// The same value under our key.
    To(&'static str),
    /// The same value under our key; what differs.
    ToBut(&'static str, &'static str),
    /// A function of the value.
    With(fn(&mut Work, &str, &Node)),
    /// Nothing to set here, and why.
    Needless(&'static str),
    /// Not possible, and why; `false` and empty values are fine.
    Lost(&'static str),
    /// Read together with others, by the toolkit's function.
    Together,
}

/// One line of a toolkit's table.
pub(super) struct Rule {
    pub key: &'static str,
    pub act: Act,
}

/// Keys that share an outcome; a name with `*` at its end stands for all keys that begin so.
type Others = &'static [(Act, &'static [&'static str])];

/// One import while it is made.
pub(super) struct Work {
    pub path: PathBuf,
    toolkit: Toolkit,
    rules: &'static [Rule],
    others: Others,
    entries: Vec<(String, Node)>,
    lines: Vec<Line>,
    notes: Vec<Note>,
}

impl Work {
    pub fn new(
        path: &Path,
        toolkit: Toolkit,
        (rules, others): (&'static [Rule], Others),
        entries: Vec<(String, Node)>,
    ) -> Self {
        let entries = entries.into_iter().map(|(key, node)| (key, as_python(node))).collect();
        Self { path: path.to_owned(), toolkit, rules, others, entries, lines: Vec::new(), notes: Vec::new() }
    }

    /// The source's keys.
    pub fn entries(&mut self) -> &mut Vec<(String, Node)> {
        &mut self.entries
    }

    /// The first of these keys that has a value.
    pub fn get(&self, keys: &[&str]) -> Option<(String, Node)> {
        let found = |key: &&str| self.entries.iter().find(|(name, node)| name == *key && *node != Node::Null);
        keys.iter().find_map(found).cloned()
    }

    /// Whether the key is there and `true`.
    pub fn is_on(&self, key: &str) -> bool {
        matches!(self.get(&[key]), Some((_, Node::Bool(true))))
    }

    /// The word that a key has.
    pub fn word(&self, key: &str) -> Option<String> {
        match self.get(&[key]) {
            Some((_, Node::Str(word))) => Some(word),
            _ => None,
        }
    }

    /// What has been written under our key.
    pub fn written(&self, key: &str) -> Option<&Node> {
        self.lines.iter().find(|line| line.key == key).map(|line| &line.node)
    }

    fn note(&mut self, outcome: Outcome, from: &str, to: String, why: &str) {
        let value = self.entries.iter().find(|(key, _)| key == from).map(|(_, node)| write::short(node));
        let from = write::printable(&value.map_or_else(|| from.to_owned(), |value| format!("{from}: {value}")));
        // A second look at a key replaces the first.
        self.notes.retain(|note| note.from != from);
        self.notes.push(Note { outcome, from, to, why: why.to_owned() });
    }

    /// Writes our key; `why` says what differs, if anything does.
    pub fn put(&mut self, from: &str, to: &str, node: Node, why: &str) {
        let node = config::unquoted(to, node);
        let before = format!("{to}: ");
        self.notes.retain(|note| note.outcome != Outcome::Default || !note.to.starts_with(&before));
        let setting = format!("{to}: {}", write::short(&node));
        self.note(if why.is_empty() { Outcome::Mapped } else { Outcome::Changed }, from, setting, why);
        self.line(to, node, why);
    }

    /// Writes what the toolkit does without being told, and ours does not.
    pub fn implied(&mut self, to: &str, node: Node, why: &str) {
        self.notes.push(Note {
            outcome: Outcome::Default,
            from: String::new(),
            to: format!("{to}: {}", write::short(&node)),
            why: why.to_owned(),
        });
        self.line(to, node, &format!("{}: {why}", self.toolkit.title()));
    }

    /// Removes what has been written for a key of the source, if it is there.
    pub fn take_back(&mut self, from: &str, ours: &str, why: &str) {
        if self.get(&[from]).is_some() {
            self.lines.retain(|line| line.key != ours);
            self.needless(from, why);
        }
    }

    /// Something that is done in another way, with no key of its own.
    pub fn changed(&mut self, from: &str, to: &str, why: &str) {
        self.note(Outcome::Changed, from, to.to_owned(), why);
    }

    pub fn needless(&mut self, from: &str, why: &str) {
        self.note(Outcome::Needless, from, String::new(), why);
    }

    pub fn lost(&mut self, from: &str, why: &str) {
        self.note(Outcome::Lost, from, String::new(), why);
    }

    /// A later line of the same key replaces an earlier one.
    fn line(&mut self, key: &str, node: Node, why: &str) {
        self.lines.retain(|line| line.key != key);
        self.lines.push(Line { key: key.to_owned(), node, why: why.to_owned() });
    }

    /// Follows the toolkit's table, in the order of the source.
    pub fn follow(&mut self) {
        let toolkit = self.toolkit;
        let rules: BTreeMap<&str, Act> = self.rules.iter().map(|rule| (rule.key, rule.act)).collect();
        for (key, node) in self.entries.clone() {
            match rules.get(key.as_str()).copied().or_else(|| self.other(&key)) {
                None if toolkit == Toolkit::SftPlay && foreign::needless(&key).is_some() => {
                    self.needless(&key, foreign::needless(&key).unwrap_or_default());
                }
                None => {
                    let why = match config::nearest(&key, rules.keys().copied()) {
                        Some(near) => format!("unknown to this import; is {near} meant?"),
                        None => "unknown to this import".to_owned(),
                    };
                    self.lost(&key, &why);
                }
                Some(_) if node == Node::Null => self.needless(&key, "empty"),
                Some(Act::To(ours)) => self.put(&key, ours, node, ""),
                Some(Act::ToBut(ours, why)) => self.put(&key, ours, node, why),
                Some(Act::With(act)) => act(self, &key, &node),
                Some(Act::Needless(why)) => self.needless(&key, why),
                Some(Act::Lost(_)) if is_off(&node) => self.needless(&key, "off"),
                Some(Act::Lost(why)) => self.lost(&key, why),
                Some(Act::Together) => {}
            }
        }
    }

    /// What the table of keys that share an outcome says of a key.
    fn other(&self, key: &str) -> Option<Act> {
        let named = |name: &&str| name.strip_suffix('*').map_or(*name == key, |start| key.starts_with(start));
        self.others.iter().find(|(_, keys)| keys.iter().any(named)).map(|(act, _)| *act)
    }

    /// What nothing would read goes: the shape of an adapter where none is trained, how answers are drawn where none are.
    fn drop_unread(&mut self) {
        let written = self.lines.iter().map(|line| (line.key.as_str(), &line.node));
        let unread = config::unread(&written.collect::<Vec<_>>());
        let unread: BTreeMap<String, &str> = unread.into_iter().map(|(key, why)| (key.to_owned(), why)).collect();
        self.lines.retain(|line| !unread.contains_key(&line.key));
        self.notes.retain(|note| note.outcome != Outcome::Default || !unread.contains_key(&note.to));
        for note in &mut self.notes {
            let Some(why) = unread.get(&note.to) else { continue };
            let why = why.split_once("; ").map_or(*why, |(why, _)| why);
            (note.outcome, note.why) = (Outcome::Needless, why.to_owned());
            note.to.clear();
        }
    }

    /// Writes the file and holds it against the configuration's own rules.
    pub fn finish(mut self) -> Result<Imported> {
        self.drop_unread();
        // Nothing goes in silence, whatever the toolkit's function has looked at.
        for (key, node) in self.entries.clone() {
            let named =
                |note: &Note| note.from == key || note.from.starts_with(&format!("{}: ", write::printable(&key)));
            if !self.notes.iter().any(named) {
                if is_off(&node) {
                    self.needless(&key, if node == Node::Null { "empty" } else { "off" });
                } else {
                    self.lost(&key, "of no effect beside the other keys");
                }
            }
        }
        let refused: Vec<Refused> = self
            .lines
            .iter()
            .filter_map(|line| {
                let why = match config::try_setting(&line.key, &line.node) {
                    Err(error) => error.hint_text().unwrap_or_else(|| error.message()).to_owned(),
                    Ok(()) => refusal(&line.key, &line.node)?.message().to_owned(),
                };
                Some(Refused { setting: format!("{}: {}", line.key, write::short(&line.node)), why })
            })
            .collect();
        let place = |key: &str| config::schema::options().position(|def| def.path() == key).unwrap_or(usize::MAX);
        self.lines.sort_by_cached_key(|line| place(&line.key));
        let lost: Vec<&Note> = self.notes.iter().filter(|note| note.outcome == Outcome::Lost).collect();
        let yaml = write::file(&self.path, self.toolkit, &self.lines, &lost, &refused);
        if refused.is_empty() {
            let written = format!("what {} becomes", self.path.display());
            config::load_text(Path::new(&written), &yaml)
                .map_err(|error: Error| error.context("the settings contradict each other"))?;
        }
        Ok(Imported { toolkit: self.toolkit, yaml, notes: self.notes, refused })
    }
}

/// Words and numbers as `PyYAML` reads them: `yes`, `on`, `500_000`.
fn as_python(node: Node) -> Node {
    let Node::Str(text) = &node else { return node };
    match text.as_str() {
        "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Node::Bool(true),
        "no" | "No" | "NO" | "off" | "Off" | "OFF" => Node::Bool(false),
        text if text.contains('_') && text.starts_with(|c: char| c.is_ascii_digit()) => {
            text.replace('_', "").parse().map_or_else(|_| node.clone(), Node::Int)
        }
        _ => node,
    }
}

/// `false`, nothing, zero, or an empty text, list or mapping.
pub(super) fn is_off(node: &Node) -> bool {
    match node {
        Node::Null | Node::Bool(false) | Node::Int(0) => true,
        Node::Float(number) => *number == 0.0,
        Node::Str(text) => text.is_empty() || text == "none" || text == "no",
        Node::List(items) => items.is_empty(),
        Node::Map(entries) => entries.is_empty(),
        Node::Bool(true) | Node::Int(_) => false,
    }
}

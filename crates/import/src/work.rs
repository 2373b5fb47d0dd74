//! The state of one import: the source's keys, the settings to write, and a note on each key.
use super::refusal::refusal;
use super::report::{Imported, Note, Outcome, Refused};
use super::toolkit::Toolkit;
use super::write::{self, Line};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{self as config, Node, foreign};

/// What a toolkit's table says about a key of the source.
#[derive(Clone, Copy)]
pub(super) enum Act {
    /// The same value under our key.
    To(&'static str),
    /// The same value under our key; the text says what differs.
    ToBut(&'static str, &'static str),
    /// A function of the key and its value.
    With(fn(&mut Work, &str, &Node)),
    /// Nothing to set here; the text says why.
    Needless(&'static str),
    /// No counterpart here; the text says why. A value that is off or empty is needless instead.
    Lost(&'static str),
    /// Read together with other keys, by the toolkit's `read`.
    Together,
}

/// One entry of a toolkit's table.
pub(super) struct Rule {
    pub key: &'static str,
    pub act: Act,
}

/// Keys that share an outcome; a name with `*` at its end stands for all keys that begin so.
type Others = &'static [(Act, &'static [&'static str])];

/// One import in progress.
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

    /// The source's keys and values, in file order.
    pub fn entries(&mut self) -> &mut Vec<(String, Node)> {
        &mut self.entries
    }

    /// The first of `keys` that the source has with a value other than null.
    pub fn get(&self, keys: &[&str]) -> Option<(String, Node)> {
        let found = |key: &&str| self.entries.iter().find(|(name, node)| name == *key && *node != Node::Null);
        keys.iter().find_map(found).cloned()
    }

    /// Whether the source has the key with the value `true`.
    pub fn is_on(&self, key: &str) -> bool {
        matches!(self.get(&[key]), Some((_, Node::Bool(true))))
    }

    /// The string under a key of the source; `None` for any other value.
    pub fn word(&self, key: &str) -> Option<String> {
        match self.get(&[key]) {
            Some((_, Node::Str(word))) => Some(word),
            _ => None,
        }
    }

    /// The value that has been written under our key.
    pub fn written(&self, key: &str) -> Option<&Node> {
        self.lines.iter().find(|line| line.key == key).map(|line| &line.node)
    }

    fn note(&mut self, outcome: Outcome, from: &str, to: String, why: &str) {
        let value = self.entries.iter().find(|(key, _)| key == from).map(|(_, node)| write::short(node));
        let from = write::printable(&value.map_or_else(|| from.to_owned(), |value| format!("{from}: {value}")));
        // A later note on the same key replaces the earlier one.
        self.notes.retain(|note| note.from != from);
        self.notes.push(Note { outcome, from, to, why: why.to_owned() });
    }

    /// Writes our key `to`. `why` says what differs from the source; empty if nothing does.
    pub fn put(&mut self, from: &str, to: &str, node: Node, why: &str) {
        let node = config::unquoted(to, node);
        let before = format!("{to}: ");
        self.notes.retain(|note| note.outcome != Outcome::Default || !note.to.starts_with(&before));
        let setting = format!("{to}: {}", write::short(&node));
        self.note(if why.is_empty() { Outcome::Mapped } else { Outcome::Changed }, from, setting, why);
        self.line(to, node, why);
    }

    /// Writes a default of the toolkit that differs from ours.
    pub fn implied(&mut self, to: &str, node: Node, why: &str) {
        self.notes.push(Note {
            outcome: Outcome::Default,
            from: String::new(),
            to: format!("{to}: {}", write::short(&node)),
            why: why.to_owned(),
        });
        self.line(to, node, &format!("{}: {why}", self.toolkit.title()));
    }

    /// Removes what has been written under `ours`, if the source has the key `from`.
    pub fn take_back(&mut self, from: &str, ours: &str, why: &str) {
        if self.get(&[from]).is_some() {
            self.lines.retain(|line| line.key != ours);
            self.needless(from, why);
        }
    }

    /// Notes that a key is achieved in another way, without a key of ours.
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

    /// Applies the toolkit's table to each key, in the order of the source.
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

    /// Removes settings that nothing would read, such as those of an adapter in full training; our configuration would refuse them.
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

    /// Writes the file, and checks it by the rules of our configuration.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the settings contradict each other.
    pub fn finish(mut self) -> Result<Imported> {
        self.drop_unread();
        // Every key gets a note, even one that no function has looked at.
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

/// Words and numbers as `PyYAML` reads them: `yes` and `on` are true, `500_000` is a number.
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

/// Whether a value asks for nothing: null, `false`, zero, `none`, `no`, or an empty string, list or mapping.
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

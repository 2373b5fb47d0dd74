//! The state of one import: the source's keys, the settings to write, and what became of each key.
use super::refusal::refusal;
use super::report::{Imported, Refused};
use super::toolkit::Toolkit;
use super::write::{self, SettingLine};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::foreign::rules::{Action, Rule, Translation, find_rule, key_names, nearest_key, translate};
use tunesmith_config::foreign::{KeyOutcome, Outcome, Value, not_needed_reason, unsupported_reason};
use tunesmith_config::{self as config, Node, Source};

/// A function of a toolkit's table: it gets a key of the source and its value.
pub(super) type Function = fn(&mut Import, &str, &Node);
pub(super) type Rules = &'static [Rule<Function>];

/// An import in progress: what the source says, and what has been made of it so far.
pub(super) struct Import {
    pub path: PathBuf,
    toolkit: Toolkit,
    rules: Rules,
    entries: Vec<(String, Node)>,
    lines: Vec<SettingLine>,
    outcomes: Vec<KeyOutcome>,
}

impl Translation for Import {
    type Function = Function;

    fn value(&self, key: String, node: Node, _: &[usize]) -> Value {
        Value { source: Source::Foreign { place: self.path.display().to_string(), key: key.clone() }, key, node }
    }

    fn action(&mut self, value: &Value) -> Option<Action<Function>> {
        find_rule(self.rules, &value.key).map(|(_, rule)| rule.action)
    }

    fn is_section(&self, _: &str) -> bool {
        false
    }

    fn call(&mut self, function: Function, value: &Value) -> Result<()> {
        function(self, &value.key, &value.node);
        Ok(())
    }

    fn put(&mut self, value: &Value, ours: &str, node: Node, why: &str) -> Result<()> {
        self.put(&value.key, ours, node, why);
        Ok(())
    }

    fn same(&mut self, value: &Value, why: &str) -> Result<()> {
        self.not_needed(&value.key, why);
        Ok(())
    }

    fn not_needed(&mut self, value: &Value, why: &str) -> Result<()> {
        self.not_needed(&value.key, why);
        Ok(())
    }

    fn changed(&mut self, value: &Value, why: &str) -> Result<()> {
        self.changed(&value.key, "", why);
        Ok(())
    }

    fn unsupported(&mut self, value: &Value, why: &str) -> Result<()> {
        self.unsupported(&value.key, why);
        Ok(())
    }

    fn unknown(&mut self, value: &Value) -> Result<()> {
        let key = &value.key;
        let trainer = format!("train.{key}");
        let passed_on = matches!(self.toolkit, Toolkit::MsSwift | Toolkit::Trl);
        let reason = match self.toolkit {
            Toolkit::SftPlay => not_needed_reason(key),
            Toolkit::MsSwift | Toolkit::Trl => not_needed_reason(&trainer),
            Toolkit::Axolotl | Toolkit::LlamaFactory => None,
        };
        let impossible = unsupported_reason(&trainer, &value.node).filter(|_| self.toolkit == Toolkit::Trl);
        match reason {
            Some(why) => self.not_needed(key, why),
            None if impossible.is_some() => match impossible.flatten() {
                Some(why) => self.unsupported(key, why),
                None => self.not_needed(key, "already so"),
            },
            None if passed_on && config::schema::options().any(|def| def.spellings().any(|name| name == trainer)) => {
                self.put(key, &trainer, value.node.clone(), "");
            }
            None => match nearest_key(key, key_names(self.rules)) {
                Some(near) => self.unsupported(key, &format!("unknown to this import; is {near} meant?")),
                None => self.unsupported(key, "unknown to this import"),
            },
        }
        Ok(())
    }

    fn is_off(&self, node: &Node) -> bool {
        is_off_or_zero(node)
    }

    /// Never: in an import, `auto` is a value like any other.
    fn is_auto(&self, _: &Value) -> bool {
        false
    }
}

impl Import {
    pub fn new(path: &Path, toolkit: Toolkit, rules: Rules, entries: Vec<(String, Node)>) -> Self {
        let entries = entries.into_iter().map(|(key, node)| (key, as_python(node))).collect();
        Self { path: path.to_owned(), toolkit, rules, entries, lines: Vec::new(), outcomes: Vec::new() }
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

    /// Records what became of the source's key `from`.
    fn record(&mut self, outcome: Outcome, from: &str, setting: String, why: &str) {
        let value = self.entries.iter().find(|(key, _)| key == from).map(|(_, node)| write::short(node));
        let key = write::printable(from);
        // A later outcome of a key replaces the earlier one.
        self.outcomes.retain(|earlier| !is_of(earlier, &key));
        self.outcomes.push(KeyOutcome {
            outcome,
            source: Source::Foreign { place: self.path.display().to_string(), key },
            value: write::printable(&value.unwrap_or_default()),
            ours: setting.split_once(": ").map(|(ours, _)| ours.to_owned()),
            setting,
            why: why.to_owned(),
        });
    }

    /// Writes our key `to`. `why` says what differs from the source; empty if nothing does.
    pub fn put(&mut self, from: &str, to: &str, node: Node, why: &str) {
        let node = config::unquoted(to, node);
        self.outcomes.retain(|one| one.outcome != Outcome::Default || one.ours.as_deref() != Some(to));
        let setting = format!("{to}: {}", write::short(&node));
        self.record(if why.is_empty() { Outcome::Taken } else { Outcome::Changed }, from, setting, why);
        self.line(to, node, why);
    }

    /// Writes a default of the toolkit that differs from ours.
    pub fn default(&mut self, to: &str, node: Node, why: &str) {
        self.outcomes.push(KeyOutcome {
            outcome: Outcome::Default,
            source: Source::Default,
            value: String::new(),
            ours: Some(to.to_owned()),
            setting: format!("{to}: {}", write::short(&node)),
            why: why.to_owned(),
        });
        self.line(to, node, &format!("{}: {why}", self.toolkit.title()));
    }

    /// Removes what has been written under `ours`, if the source has the key `from`.
    pub fn take_back(&mut self, from: &str, ours: &str, why: &str) {
        if self.get(&[from]).is_some() {
            self.lines.retain(|line| line.key != ours);
            self.not_needed(from, why);
        }
    }

    /// Records that the effect of the source's key `from` is reached in another way, without a key of ours. `to` describes it.
    pub fn changed(&mut self, from: &str, to: &str, why: &str) {
        self.record(Outcome::Changed, from, to.to_owned(), why);
    }

    /// Records that the source's key `from` needs no setting of ours, and why.
    pub fn not_needed(&mut self, from: &str, why: &str) {
        self.record(Outcome::NotNeeded, from, String::new(), why);
    }

    /// Records that this import has no counterpart of the source's key `from`, and why or what to do instead.
    pub fn unsupported(&mut self, from: &str, why: &str) {
        self.record(Outcome::Unsupported, from, String::new(), why);
    }

    /// Adds a line to the file. It replaces an earlier line of the same key.
    fn line(&mut self, key: &str, node: Node, why: &str) {
        self.lines.retain(|line| line.key != key);
        self.lines.push(SettingLine { key: key.to_owned(), node, why: why.to_owned() });
    }

    /// Applies the toolkit's table to each key, in the order of the source.
    ///
    /// # Errors
    /// A key that is given twice.
    pub fn apply_rules(&mut self) -> Result<()> {
        let entries = self.entries.clone();
        translate(self, &entries)
    }

    /// Removes settings that nothing would read, such as those of an adapter in full training; our configuration would refuse them.
    fn drop_unused(&mut self) {
        let written = self.lines.iter().map(|line| (line.key.as_str(), &line.node));
        let unused = config::unused_keys(&written.collect::<Vec<_>>());
        let unused: BTreeMap<String, &str> = unused.into_iter().map(|(key, why)| (key.to_owned(), why)).collect();
        let reason = |one: &KeyOutcome| one.ours.as_ref().and_then(|ours| unused.get(ours)).copied();
        self.lines.retain(|line| !unused.contains_key(&line.key));
        self.outcomes.retain(|one| one.outcome != Outcome::Default || reason(one).is_none());
        for one in &mut self.outcomes {
            let Some(why) = reason(one) else { continue };
            one.why = why.split_once("; ").map_or(why, |(why, _)| why).to_owned();
            (one.outcome, one.ours) = (Outcome::NotNeeded, None);
            one.setting.clear();
        }
    }

    /// Writes the file, and checks it by the rules of our configuration.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the settings contradict each other.
    pub fn finish(mut self) -> Result<Imported> {
        self.drop_unused();
        // Every key has an outcome, even one that no function has looked at.
        for (key, node) in self.entries.clone() {
            if !self.outcomes.iter().any(|one| is_of(one, &write::printable(&key))) {
                if is_off_or_zero(&node) {
                    self.not_needed(&key, if node == Node::Null { "empty" } else { "off" });
                } else {
                    self.unsupported(&key, "it has no effect with the other keys");
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
        let unsupported: Vec<&KeyOutcome> =
            self.outcomes.iter().filter(|one| one.outcome == Outcome::Unsupported).collect();
        let yaml = write::file(&self.path, self.toolkit, &self.lines, &unsupported, &refused);
        if refused.is_empty() {
            let written = format!("what {} becomes", self.path.display());
            config::load_text(Path::new(&written), &yaml)
                .map_err(|error: Error| error.context("the settings contradict each other"))?;
        }
        Ok(Imported { toolkit: self.toolkit, yaml, outcomes: self.outcomes, refused })
    }
}

/// Whether this is the outcome of that key.
fn is_of(outcome: &KeyOutcome, key: &str) -> bool {
    matches!(&outcome.source, Source::Foreign { key: of, .. } if of == key)
}

/// Converts text that `PyYAML` reads as another type: `yes` and `on` are true, `500_000` is a number.
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

/// Whether a value is null, `false`, zero, `none`, `no`, or an empty string, list or mapping. Unlike for [`config::foreign::is_off`], a
/// mapping counts as on even if each of its values is off.
pub(super) fn is_off_or_zero(node: &Node) -> bool {
    match node {
        Node::Null | Node::Bool(false) | Node::Int(0) => true,
        Node::Float(number) => *number == 0.0,
        Node::Str(text) => text.is_empty() || text == "none" || text == "no",
        Node::List(items) => items.is_empty(),
        Node::Map(entries) => entries.is_empty(),
        Node::Bool(true) | Node::Int(_) => false,
    }
}

//! Reads the files of other programs that a configuration names, by the format's table.
use super::Format;
use super::claims::Claims;
use super::outcomes::{CHANGED, Condition, Foreign, ForeignSetting, KeyOutcome, NOT_NEEDED, Outcome};
use super::rules::{Action, Rule, Translation, apply, nearest_key, translate};
use super::value::Value;
use crate::lookup::{check, takes, unquoted};
use crate::schema::options;
use crate::source::Source;
use crate::value::{Node, quoted};
use crate::yaml::Document;
use std::collections::BTreeMap;
use std::path::Path;
use tunesmith_base::error::{Error, Result};

/// A function of a table.
pub(super) type Function = fn(&mut Reader, &Value) -> Result<()>;
/// The table of a format.
pub(super) type Rules = &'static [Rule<Function>];

/// What one key of [`Format::Trainer`] becomes in our own configuration.
pub(crate) struct TrainerKey {
    /// The settings of ours that it gives, by full key.
    pub settings: Vec<(String, Node)>,
    /// Why it has no effect; `None` if it has one.
    pub why: Option<String>,
}

/// Reads one key of [`Format::Trainer`]; `spelled` is the full key as it was given. `None` if there is no such key.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the value is refused.
pub(crate) fn read_trainer_key(spelled: &str, node: &Node, source: &Source) -> Result<Option<TrainerKey>> {
    let Some((_, rule)) = Format::Trainer.rule(spelled) else { return Ok(None) };
    let value = Value { key: spelled.to_owned(), node: node.clone(), source: source.clone() };
    let mut reader = Reader::empty(Format::Trainer, spelled, source);
    apply(&mut reader, rule.action, &value)?;
    let unused = |outcome: &&KeyOutcome| matches!(outcome.outcome, Outcome::Same | Outcome::NotNeeded);
    let why = reader.outcomes.iter().find(unused).map(|outcome| match rule.action {
        // It says why the key has no meaning, whatever its value.
        Action::NotNeeded(why) => why.to_owned(),
        _ => outcome.why.clone(),
    });
    let settings = reader.settings.into_iter().map(|setting| (setting.key, setting.node)).collect();
    Ok(Some(TrainerKey { settings, why }))
}

enum Contents {
    File(Document),
    /// A mapping within our own configuration.
    Mapping(Vec<(String, Node)>),
}

/// Reads one file, or one mapping within our own configuration.
pub(super) struct Reader {
    format: Format,
    /// The file's path, or the key that holds the mapping; for messages.
    name: String,
    contents: Contents,
    /// The source that names the file.
    named_by: Source,
    /// The values so far, by their names in the table.
    values: BTreeMap<String, Value>,
    outcomes: Vec<KeyOutcome>,
    settings: Vec<ForeignSetting>,
    notes: Vec<String>,
    /// Claims that only the start of a run can check.
    pub claims: Claims,
    /// A DeepSpeed file that this one names, and where.
    pub deepspeed_file: Option<(String, Source)>,
}

impl Translation for Reader {
    type Function = Function;

    fn value(&self, key: String, node: Node, steps: &[usize]) -> Value {
        let place = match &self.contents {
            Contents::File(document) => format!("{}:{}", self.name, document.position(steps).line),
            Contents::Mapping(_) => self.named_by.to_string(),
        };
        Value { source: Source::Foreign { place, key: key.clone() }, key, node }
    }

    fn action(&mut self, value: &Value) -> Option<Action<Function>> {
        let (name, rule) = self.format.rule(&value.key)?;
        self.values.insert(name.to_owned(), value.clone());
        Some(rule.action)
    }

    fn is_section(&self, key: &str) -> bool {
        let (below, alias) = (format!("{key}."), key.replace("bfloat16", "bf16") + ".");
        let of_fsdp = self.format == Format::Accelerate && key == "fsdp_config";
        of_fsdp || self.format.keys().any(|name| name.starts_with(&below) || name.starts_with(&alias))
    }

    fn call(&mut self, function: Function, value: &Value) -> Result<()> {
        function(self, value)
    }

    fn put(&mut self, value: &Value, ours: &str, node: Node, why: &str) -> Result<()> {
        self.set(value, ours, node, why, Condition::None)
    }

    fn auto(&mut self, value: &Value, ours: &str) -> Result<()> {
        self.record(value, Outcome::Auto, Some(ours), String::new(), "");
        Ok(())
    }

    fn same(&mut self, value: &Value, why: &str) -> Result<()> {
        self.record(value, Outcome::Same, None, String::new(), why);
        Ok(())
    }

    fn not_needed(&mut self, value: &Value, why: &str) -> Result<()> {
        self.record(value, Outcome::NotNeeded, None, String::new(), why);
        self.notes.push(format!("{NOT_NEEDED}{}: {} ({why})", value.source, value.shown()));
        Ok(())
    }

    fn changed(&mut self, value: &Value, why: &str) -> Result<()> {
        self.record(value, Outcome::Changed, None, String::new(), why);
        self.notes.push(format!("{CHANGED}{}: {} ({why})", value.source, value.shown()));
        Ok(())
    }

    fn unsupported(&mut self, value: &Value, why: &str) -> Result<()> {
        Err(value.refused(why))
    }

    fn unknown(&mut self, value: &Value) -> Result<()> {
        let title = self.format.title();
        let error = Error::config(format!("{}: unknown to {title}'s configuration", value.source.place()));
        Err(match nearest_key(&value.key, self.format.keys()) {
            Some(near) => error.hint(format!("did you mean {near}?")),
            None => error.hint("docs/foreign-configs.md lists every key"),
        })
    }
}

impl Reader {
    /// Opens what our `key` holds: the path of a file, or a mapping.
    pub(super) fn open(format: Format, key: &str, node: &Node, source: &Source) -> Result<Self> {
        let (name, contents) = match node {
            Node::Str(path) => {
                let path = Path::new(path);
                let document =
                    if format == Format::Accelerate { Document::read(path) } else { Document::read_json(path) };
                let document = document.map_err(|error| error.context(format!("{}: {key}", source.place())))?;
                (path.display().to_string(), Contents::File(document))
            }
            Node::Map(entries) => (key.to_owned(), Contents::Mapping(entries.clone())),
            other => return Err(Error::config(format!("{}: {key}: found {}", source.place(), other.describe()))),
        };
        Ok(Self::new(format, name, contents, source))
    }

    /// Reads from a text; messages call it `path`.
    pub(super) fn from_text(format: Format, path: &Path, text: &str) -> Result<Self> {
        let document = Document::parse_json(path, text)?;
        Ok(Self::new(format, path.display().to_string(), Contents::File(document), &Source::Default))
    }

    fn new(format: Format, name: String, contents: Contents, source: &Source) -> Self {
        Self {
            format,
            name,
            contents,
            named_by: source.clone(),
            values: BTreeMap::new(),
            outcomes: Vec::new(),
            settings: Vec::new(),
            notes: Vec::new(),
            claims: Claims::default(),
            deepspeed_file: None,
        }
    }

    /// A configuration without keys: Transformers' `fsdp` without a `fsdp_config`.
    pub(super) fn empty(format: Format, key: &str, source: &Source) -> Self {
        Self::new(format, key.to_owned(), Contents::Mapping(Vec::new()), source)
    }

    /// Reads all keys, then calls `finish` for what several keys say together, and adds what they become to `all`.
    pub(super) fn run(mut self, finish: fn(&mut Self) -> Result<()>, all: &mut Foreign) -> Result<()> {
        let entries = match &self.contents {
            Contents::File(document) => document.entries.clone(),
            Contents::Mapping(entries) => entries.clone(),
        };
        translate(&mut self, &entries)?;
        finish(&mut self)?;
        all.notes.append(&mut self.notes);
        all.outcomes.append(&mut self.outcomes);
        all.settings.append(&mut self.settings);
        all.deepspeed_file = all.deepspeed_file.take().or(self.deepspeed_file);
        all.claims.merge(self.claims)
    }

    /// A value that was read, by its name in the table; `None` if it is absent or null.
    pub fn get(&self, name: &str) -> Option<Value> {
        self.values.get(name).filter(|value| value.node != Node::Null).cloned()
    }

    fn record(&mut self, value: &Value, outcome: Outcome, ours: Option<&str>, setting: String, why: &str) {
        let (source, ours) = (value.source.clone(), ours.map(str::to_owned));
        self.outcomes.push(KeyOutcome { outcome, source, value: value.shown(), ours, setting, why: why.to_owned() });
    }

    /// The value is used or checked where the ranks are started.
    pub fn checked(&mut self, value: &Value, how: &str) {
        self.record(value, Outcome::Taken, None, String::new(), how);
    }

    /// Sets our key `ours` to the same value, which counts only if `switch` of ours is on.
    ///
    /// # Errors
    /// As [`Translation::put`].
    pub fn put_if_on(&mut self, value: &Value, ours: &str, switch: &'static str) -> Result<()> {
        self.set(value, ours, value.node.clone(), "", Condition::SwitchedOn(switch))
    }

    /// Sets our key `ours` if nothing else sets it.
    ///
    /// # Errors
    /// As [`Translation::put`].
    pub fn put_if_unset(&mut self, value: &Value, ours: &str, node: Node, why: &str) -> Result<()> {
        self.set(value, ours, node, why, Condition::Unset)
    }

    fn set(&mut self, value: &Value, ours: &str, node: Node, why: &str, condition: Condition) -> Result<()> {
        let Some(def) = options().find(|def| def.path() == ours) else {
            return Err(value.refused(&format!("{ours} is not yet part of this version")));
        };
        let node = whole(ours, node);
        if let Err(error) = check(def, ours, &node, &Source::Word(ours.to_owned())) {
            let why = error.hint_text().unwrap_or_else(|| error.message());
            return Err(value.refused(&format!("{ours} does not take {}: {why}", quoted(&node.to_json().to_string()))));
        }
        self.record(value, Outcome::Taken, Some(ours), format!("{ours}: {}", node.to_json()), why);
        let (source, named_by) = (value.source.clone(), self.named_by.clone());
        self.settings.push(ForeignSetting { key: ours.to_owned(), node, source, condition, named_by });
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

//! Configuration files of DeepSpeed and Accelerate, Transformers' `fsdp`, and keys of Transformers' and TRL's arguments: one table
//! for each format ([`Row`]) says whether a key becomes one of ours, is not needed, or is refused. No key is ignored silently.
//!
//! Such a file is read beside the configuration. A value that both give must be the same, and `auto` leaves the value to the
//! configuration. The environment, words and flags override both.
mod accelerate;
mod deepspeed;
pub mod docs;
mod fsdp;
mod key_outcomes;
mod optimizer;
mod trainer;
mod walk;

use super::option::Scalar;
use super::source::Source;
use super::value::Node;
use std::path::Path;
use tunesmith_base::error::{Error, Result};

pub(super) use key_outcomes::Line;
pub use key_outcomes::{Expected, Fate, Foreign, NOT_NEEDED, NotNeeded, Told};
pub(super) use trainer::{NULL_IS_DEFAULT, find as trainer_row, names as trainer_names};
pub(super) use walk::take_key;
pub use walk::{Reader, Value};

/// The program that a foreign configuration is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// DeepSpeed's JSON.
    DeepSpeed,
    /// Accelerate's YAML.
    Accelerate,
    /// Transformers' `fsdp_config`, and the section `fsdp_config` of Accelerate's file.
    Fsdp,
    /// Transformers' `TrainingArguments` and TRL's `SFTConfig`: keys that stand in our own configuration.
    Trainer,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::DeepSpeed, Self::Accelerate, Self::Fsdp, Self::Trainer];

    /// The name in messages and in the documentation.
    pub const fn title(self) -> &'static str {
        match self {
            Self::DeepSpeed => "DeepSpeed",
            Self::Accelerate => "Accelerate",
            Self::Fsdp => "Transformers' fsdp_config",
            Self::Trainer => "Transformers' TrainingArguments, TRL's SFTConfig and SFT-Play",
        }
    }

    /// The table with an entry for each of its keys.
    pub const fn rows(self) -> &'static [Row] {
        match self {
            Self::DeepSpeed => deepspeed::ROWS,
            Self::Accelerate => accelerate::ROWS,
            Self::Fsdp => fsdp::ROWS,
            Self::Trainer => trainer::ROWS,
        }
    }

    /// The table entry of a full key, also by its older names. A key below a section has its own entry or none: see
    /// [`Format::covers`].
    pub fn row(self, key: &str) -> Option<&'static Row> {
        let exact = |key: &str| self.rows().iter().find(|row| row.key == key);
        exact(key).or_else(|| match self {
            Self::DeepSpeed => {
                let rest = key.strip_prefix("zero_optimization.");
                let stage3 = rest.and_then(|rest| exact(&format!("zero_optimization.stage3_{rest}")));
                stage3.or_else(|| exact(&format!("bf16.{}", key.strip_prefix("bfloat16.")?)))
            }
            Self::Accelerate => {
                let bare = key.strip_prefix("fsdp_config.")?;
                Self::Fsdp.row(bare)
            }
            Self::Fsdp => exact(key.strip_prefix("fsdp_")?),
            Self::Trainer => None,
        })
    }

    /// As [`Format::row`], or the entry of a section that covers all keys below it.
    pub fn covers(self, key: &str) -> Option<&'static Row> {
        let sections = key.match_indices('.').map(|(end, _)| &key[..end]);
        self.row(key).or_else(|| sections.filter_map(|section| self.row(section)).find(|row| row.whole))
    }
}

/// What becomes of a key.
#[derive(Clone, Copy)]
pub enum Act {
    /// The same value under our key.
    To(&'static str),
    /// A function of the value; what it does, in words.
    With(Take, &'static str),
    /// Read together with other keys, by a function of the whole file; the outcome, in words.
    Together(&'static str),
    /// These values describe what always holds here. Any other value has no effect, and a note says why.
    Always(&'static [Scalar], &'static str),
    /// No effect here; a note says why.
    Warned(&'static str),
    /// These values ask for nothing special; any other is refused, with this reason.
    Unless(&'static [Scalar], &'static str),
}

/// Reads one value into settings of ours.
pub type Take = fn(&mut Reader, &Value) -> Result<()>;

/// A key of a foreign format, and what becomes of it.
#[derive(Clone, Copy)]
pub struct Row {
    /// The full key, or a section.
    pub key: &'static str,
    /// The outcome of the key.
    pub act: Act,
    /// Whether it is a section, and the entry covers all keys below it.
    pub whole: bool,
}

/// A table entry for one key.
const fn row(key: &'static str, act: Act) -> Row {
    Row { key, act, whole: false }
}

/// A table entry for a section and all keys below it.
const fn section(key: &'static str, act: Act) -> Row {
    Row { key, act, whole: true }
}

/// The keys of ours that name foreign files, in the order in which they are read.
pub const KEYS: [&str; 4] = ["train.accelerate", "train.deepspeed", "train.fsdp", "train.fsdp_config"];

/// Reads the configurations that `named` holds: key, value and source of each of [`KEYS`] that is set.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: no such file, no JSON or YAML, an unknown key, or a value that is refused.
pub(super) fn read(named: &[(&'static str, Node, Source)]) -> Result<Foreign> {
    let mut taken = Foreign::default();
    // A mapping says something even where each of its values is off.
    let says = |node: &Node| matches!(node, Node::Map(entries) if !entries.is_empty()) || !is_off(node);
    let of = |key: &str| named.iter().find(|(name, node, _)| *name == key && says(node));
    if let Some((key, node, source)) = of("train.accelerate") {
        Reader::open(Format::Accelerate, key, node, source)?.run(accelerate::finish, &mut taken)?;
    }
    if let Some((file, source)) = taken.nested.take() {
        let key = "deepspeed_config.deepspeed_config_file";
        Reader::open(Format::DeepSpeed, key, &Node::Str(file), &source)?.run(deepspeed::finish, &mut taken)?;
    }
    if let Some((key, node, source)) = of("train.deepspeed") {
        Reader::open(Format::DeepSpeed, key, node, source)?.run(deepspeed::finish, &mut taken)?;
    }
    match (of("train.fsdp"), of("train.fsdp_config")) {
        (Some((_, words, source)), config) => fsdp::read((words, source), config, &mut taken)?,
        (None, Some((_, node, source))) if !is_off(node) => {
            return Err(Error::config(format!(
                "{}: train.fsdp_config without train.fsdp has no effect",
                source.place()
            ))
            .hint("set train.fsdp: true, or remove train.fsdp_config"));
        }
        (None, _) => {}
    }
    Ok(taken)
}

/// Checks a text as a file of that format; messages call it `path`. Returns the settings it gives for `train.strategy` and
/// `train.fsdp*`.
///
/// # Errors
/// As a file with that text.
pub fn check(format: Format, path: &Path, text: &str) -> Result<Vec<(String, Node)>> {
    let mut taken = Foreign::default();
    let finish: fn(&mut Reader) -> Result<()> = match format {
        Format::Accelerate => accelerate::finish,
        Format::DeepSpeed => deepspeed::finish,
        Format::Fsdp | Format::Trainer => |_: &mut Reader| Ok(()),
    };
    Reader::of_text(format, path, text)?.run(finish, &mut taken)?;
    let shares = |line: &Line| line.key == "train.strategy" || line.key.starts_with("train.fsdp");
    Ok(taken.lines.into_iter().filter(shares).map(|line| (line.key, line.node)).collect())
}

/// The format of a file by its top-level keys; `None` for one of our own, or of no known format.
pub(super) fn format_of(entries: &[(String, Node)]) -> Option<Format> {
    let ours = |key: &str| {
        key == "include"
            || super::schema::SECTIONS.iter().any(|section| {
                section.name == key || section.options.iter().any(|def| section.name.is_empty() && def.name == key)
            })
    };
    if entries.iter().any(|(key, _)| ours(key)) {
        return None;
    }
    let known = |format: Format| {
        let named = |key: &str| {
            format.row(key).is_some()
                || format.rows().iter().any(|row| row.key.split('.').next() == Some(key))
                || (format == Format::Accelerate && key == "fsdp_config")
        };
        entries.iter().filter(|(key, _)| named(key)).count()
    };
    let counts = [Format::DeepSpeed, Format::Accelerate, Format::Fsdp].map(|format| (known(format), format));
    // On a tie the first format wins: `max_by_key` takes the last of the reversed list.
    counts.into_iter().rev().max_by_key(|(count, _)| *count).filter(|(count, _)| *count > 0).map(|(_, format)| format)
}

/// Why a full key of [`Format::Trainer`] is not needed, if that holds for every value.
pub fn needless(key: &str) -> Option<&'static str> {
    match trainer::find(key)?.act {
        Act::Warned(why) => Some(why),
        _ => None,
    }
}

/// Each full key of [`Format::Trainer`] with a description for the JSON Schema.
pub(super) fn trainer_keys() -> impl Iterator<Item = (String, String)> {
    trainer::names().filter_map(|key| {
        let (fate, what) = docs::describe(trainer::find(&key)?.act);
        Some((key, format!("A key of other toolkits, {fate}: {what}.")))
    })
}

/// Whether a value asks for nothing: `null`, `false`, `none`, or a section with nothing in it that is on.
fn is_off(node: &Node) -> bool {
    match node {
        Node::Null | Node::Bool(false) => true,
        Node::Bool(true) | Node::Int(_) | Node::Float(_) => false,
        Node::Str(text) => matches!(text.to_lowercase().as_str(), "" | "none" | "no" | "false" | "null"),
        Node::List(items) => items.is_empty(),
        Node::Map(entries) => {
            let enabled = entries.iter().find(|(key, _)| key == "enabled");
            enabled.map_or_else(|| entries.iter().all(|(_, node)| is_off(node)), |(_, node)| is_off(node))
        }
    }
}

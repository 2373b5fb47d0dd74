//! Configurations of other toolkits. One table for each ([`rules`]) says what becomes of each of its keys. No key is ignored silently.
//!
//! This folder has DeepSpeed's and Accelerate's files, Transformers' `fsdp`, and keys of Transformers' and TRL's arguments. They are
//! read beside our configuration: a value that both give must be the same, and `auto` leaves the value to the configuration. The
//! environment, words and flags override both. The crate `import` has tables for toolkits whose configurations are rewritten as ours.
mod accelerate;
mod claims;
mod deepspeed;
pub mod docs;
mod fsdp;
mod optimizer;
mod outcomes;
mod reader;
pub mod rules;
mod trainer;
mod value;

use super::source::Source;
use super::value::Node;
use std::path::Path;
use tunesmith_base::error::{Error, Result};

pub use claims::Claims;
pub use outcomes::{CHANGED, Foreign, KeyOutcome, NOT_NEEDED, NotNeeded, Outcome};
pub(super) use outcomes::{Condition, ForeignSetting};
pub(super) use reader::read_trainer_key;
use reader::{Function, Reader, Rules};
use rules::{Action, Rule, find_rule, key_names};
pub use trainer::one_device;
pub(super) use trainer::{NULL_IS_DEFAULT, names as trainer_names};
pub use value::{Value, is_off};

/// The program that a foreign configuration is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// DeepSpeed's JSON file, `--deepspeed`.
    DeepSpeed,
    /// The YAML file of `accelerate config`.
    Accelerate,
    /// Transformers' `fsdp_config`, and the section `fsdp_config` of Accelerate's file.
    Fsdp,
    /// Transformers' `TrainingArguments` and TRL's `SFTConfig`: keys that stand in our own configuration.
    Trainer,
}

impl Format {
    /// Every format, in the order of the documentation.
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

    const fn rules(self) -> Rules {
        match self {
            Self::DeepSpeed => deepspeed::RULES,
            Self::Accelerate => accelerate::RULES,
            Self::Fsdp => fsdp::RULES,
            Self::Trainer => trainer::RULES,
        }
    }

    /// Every key of its table, in the order of the documentation.
    pub fn keys(self) -> impl Iterator<Item = &'static str> + Clone {
        key_names(self.rules())
    }

    /// The name in the table and the rule of a full key, which may have an older name. A key below a section has its own rule or none:
    /// see [`Format::covering`].
    fn rule(self, key: &str) -> Option<(&'static str, &'static Rule<Function>)> {
        let find = |key: &str| find_rule(self.rules(), key);
        // A key of a section is in this table without its section, and never stands alone.
        let own = if self == Self::Trainer && !key.contains('.') { None } else { find(key) };
        own.or_else(|| match self {
            Self::DeepSpeed => {
                let rest = key.strip_prefix("zero_optimization.");
                let stage3 = rest.and_then(|rest| find(&format!("zero_optimization.stage3_{rest}")));
                stage3.or_else(|| find(&format!("bf16.{}", key.strip_prefix("bfloat16.")?)))
            }
            Self::Accelerate => Self::Fsdp.rule(key.strip_prefix("fsdp_config.")?),
            Self::Fsdp => find(key.strip_prefix("fsdp_")?),
            Self::Trainer => trainer::find(key),
        })
    }

    /// The entry of [`Format::keys`] that says what becomes of a full key: its own, or that of a section above it.
    pub fn covering(self, key: &str) -> Option<&'static str> {
        let own = self.rule(key).map(|(name, _)| name);
        let sections = key.match_indices('.').filter_map(|(end, _)| self.rule(&key[..end]));
        let name = own.or_else(|| sections.map(|(name, _)| name).find(|name| name.ends_with(".*")))?;
        Some(name.strip_suffix(".*").unwrap_or(name))
    }
}

/// The keys of ours that name foreign files, in the order in which they are read.
pub const KEYS: [&str; 4] = ["train.accelerate", "train.deepspeed", "train.fsdp", "train.fsdp_config"];

/// Reads the configurations that `named` holds: key, value and source of each of [`KEYS`] that is set.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: no such file, no JSON or YAML, an unknown key, or a value that is refused.
pub(super) fn read(named: &[(&'static str, Node, Source)]) -> Result<Foreign> {
    let mut all = Foreign::default();
    // A mapping says something even where each of its values is off.
    let says = |node: &Node| matches!(node, Node::Map(entries) if !entries.is_empty()) || !is_off(node);
    let of = |key: &str| named.iter().find(|(name, node, _)| *name == key && says(node));
    if let Some((key, node, source)) = of("train.accelerate") {
        Reader::open(Format::Accelerate, key, node, source)?.run(accelerate::finish, &mut all)?;
    }
    if let Some((file, source)) = all.deepspeed_file.take() {
        let key = "deepspeed_config.deepspeed_config_file";
        Reader::open(Format::DeepSpeed, key, &Node::Str(file), &source)?.run(deepspeed::finish, &mut all)?;
    }
    if let Some((key, node, source)) = of("train.deepspeed") {
        Reader::open(Format::DeepSpeed, key, node, source)?.run(deepspeed::finish, &mut all)?;
    }
    match (of("train.fsdp"), of("train.fsdp_config")) {
        (Some((_, words, source)), config) => fsdp::read(words, source, config, &mut all)?,
        (None, Some((_, node, source))) if !is_off(node) => {
            return Err(Error::config(format!(
                "{}: train.fsdp_config without train.fsdp has no effect",
                source.place()
            ))
            .hint("set train.fsdp: true, or remove train.fsdp_config"));
        }
        (None, _) => {}
    }
    Ok(all)
}

/// Checks a text as a file of that format; messages call it `path`. Returns the settings it gives for `train.strategy` and
/// `train.fsdp*`.
///
/// # Errors
/// As a file with that text.
pub fn check(format: Format, path: &Path, text: &str) -> Result<Vec<(String, Node)>> {
    let mut all = Foreign::default();
    let finish: fn(&mut Reader) -> Result<()> = match format {
        Format::Accelerate => accelerate::finish,
        Format::DeepSpeed => deepspeed::finish,
        Format::Fsdp | Format::Trainer => |_: &mut Reader| Ok(()),
    };
    Reader::from_text(format, path, text)?.run(finish, &mut all)?;
    let settings = all.settings.into_iter().map(|setting| (setting.key, setting.node));
    Ok(settings.filter(|(key, _)| key == "train.strategy" || key.starts_with("train.fsdp")).collect())
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
            format.rule(key).is_some()
                || format.keys().any(|name| name.split('.').next() == Some(key))
                || (format == Format::Accelerate && key == "fsdp_config")
        };
        entries.iter().filter(|(key, _)| named(key)).count()
    };
    let counts = [Format::DeepSpeed, Format::Accelerate, Format::Fsdp].map(|format| (known(format), format));
    // On a tie the first format wins: `max_by_key` takes the last of the reversed list.
    counts.into_iter().rev().max_by_key(|(count, _)| *count).filter(|(count, _)| *count > 0).map(|(_, format)| format)
}

/// Why a full key of [`Format::Trainer`] is not needed, if that holds for every value.
pub fn not_needed_reason(key: &str) -> Option<&'static str> {
    match Format::Trainer.rule(key)?.1.action {
        Action::NotNeeded(why) => Some(why),
        _ => None,
    }
}

/// Why a value of a full key of [`Format::Trainer`] is not supported: `Some(None)` if this one asks for what holds anyway, and `None`
/// for keys of which no value or every value is supported.
pub fn unsupported_reason(key: &str, node: &Node) -> Option<Option<&'static str>> {
    let value = Value { source: Source::Default, key: key.to_owned(), node: node.clone() };
    match Format::Trainer.rule(key)?.1.action {
        Action::Only(scalars, why) => Some((!value.is(scalars)).then_some(why)),
        Action::Unsupported(why) => Some((!is_off(node)).then_some(why)),
        _ => None,
    }
}

/// Each full key of [`Format::Trainer`] with a description for the JSON Schema.
pub(super) fn trainer_keys() -> impl Iterator<Item = (String, String)> {
    trainer::names().filter_map(|key| {
        let (outcome, what) = docs::describe(Format::Trainer.rule(&key)?.1);
        Some((key, format!("A key of other toolkits, {outcome}: {what}.")))
    })
}

//! What foreign configurations become: settings of ours, the outcome of each key, and claims that only the start of a run can check.
use super::claims::Claims;
use crate::source::Source;
use crate::value::Node;

/// The longest value that a message shows, in characters.
const SHOWN: usize = 60;

/// The outcome of all foreign configurations of a run.
#[derive(Debug, Clone, Default)]
pub struct Foreign {
    /// The outcome of each key of each file, in file order.
    pub outcomes: Vec<KeyOutcome>,
    /// Claims that are checked when the number of ranks is known.
    pub claims: Claims,
    /// Notes for the user, one sentence each.
    pub(crate) notes: Vec<String>,
    /// Settings of ours that the files give.
    pub(crate) settings: Vec<ForeignSetting>,
    /// `deepspeed_config_file` of Accelerate's file, and where it stands.
    pub(super) deepspeed_file: Option<(String, Source)>,
}

/// When a setting of a foreign file counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The value has the same effect in every run.
    None,
    /// If this switch of ours is on.
    SwitchedOn(&'static str),
    /// If nothing else sets the key.
    Unset,
}

/// A setting of ours that a foreign file gives.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ForeignSetting {
    pub key: String,
    /// Its value, which the key accepts.
    pub node: Node,
    /// The foreign key that gives it.
    pub source: Source,
    pub condition: Condition,
    /// The source that names the file, which decides precedence.
    pub named_by: Source,
}

/// A text of at most [`SHOWN`] characters.
pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// How the note on a key begins that is accepted without effect.
pub const NOT_NEEDED: &str = "not needed: ";

/// How the note on a key begins in whose place something else is done.
pub const CHANGED: &str = "changed: ";

/// A key of another toolkit in our own configuration that is accepted without effect.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct NotNeeded {
    /// The full key, as it was given.
    pub key: String,
    /// Its value, as JSON, uncut.
    pub value: serde_json::Value,
    /// Where the key was given.
    pub source: Source,
    /// Why it has no effect.
    pub note: String,
}

impl NotNeeded {
    /// The note for the user.
    pub fn text(&self) -> String {
        format!("{NOT_NEEDED}{} {}: {} ({})", self.source, self.key, cut(&self.value.to_string()), self.note)
    }
}

/// What became of one key of another toolkit's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyOutcome {
    /// What happened to the key.
    pub outcome: Outcome,
    /// The place of the key and its name; [`Source::Default`] for [`Outcome::Default`].
    pub source: Source,
    /// Its value, as messages show it.
    pub value: String,
    /// Our key that it sets or leaves the decision to.
    pub ours: Option<String>,
    /// Our setting, as `key: value`; empty without one.
    pub setting: String,
    /// The reason; empty where it is obvious.
    pub why: String,
}

impl KeyOutcome {
    /// The key with its value; empty for [`Outcome::Default`].
    pub fn given(&self) -> String {
        match &self.source {
            Source::Foreign { key, .. } if self.value.is_empty() => key.clone(),
            Source::Foreign { key, .. } => format!("{key}: {}", self.value),
            _ => String::new(),
        }
    }

    /// The setting and the reason.
    pub fn text(&self) -> String {
        match (self.setting.is_empty(), self.why.is_empty()) {
            (true, _) => self.why.clone(),
            (false, true) => self.setting.clone(),
            (false, false) => format!("{} ({})", self.setting, self.why),
        }
    }
}

/// What happened to a key of another toolkit's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It sets a key of ours to the same value, or is checked against the ranks.
    Taken,
    /// It sets a key of ours to another value, or the same is achieved in another way.
    Changed,
    /// It is not given: the toolkit's default, which differs from ours.
    Default,
    /// The file says `auto`: the run's own key decides.
    Auto,
    /// It has no effect, since it asks for what holds anyway.
    Same,
    /// It has no effect; a note says why.
    NotNeeded,
    /// A source that takes precedence says otherwise.
    Overridden,
    /// It has no counterpart here.
    Unsupported,
}

impl Outcome {
    /// How `tunesmith config` shows it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Changed => "changed",
            Self::Default => "default",
            Self::Auto => "auto",
            Self::Same => "no effect:",
            Self::NotNeeded => "not needed:",
            Self::Overridden => "overridden",
            Self::Unsupported => "not supported:",
        }
    }
}

//! What an import gives back: the file's text, and what became of each key of the source.
use super::toolkit::Toolkit;

/// What happened to a key of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// A setting of ours has the same value.
    Mapped,
    /// A setting of ours has another value, or the same is achieved in another way.
    Changed,
    /// Not a key of the source: the toolkit's default, which differs from ours.
    Default,
    /// Nothing to set: it holds anyway, or the key is empty or off.
    Needless,
    /// It has no counterpart here.
    Lost,
}

/// The outcome of one key of the source.
#[derive(Debug, Clone, PartialEq)]
pub struct Note {
    /// What happened to the key.
    pub outcome: Outcome,
    /// The source's key with its value; empty for [`Outcome::Default`].
    pub from: String,
    /// Our setting, as `key: value`; empty without one.
    pub to: String,
    /// The reason; empty where it is obvious.
    pub why: String,
}

/// A setting of the written file that this version refuses.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// The setting, as `key: value`.
    pub setting: String,
    /// The reason.
    pub why: String,
}

/// The result of an import.
#[derive(Debug)]
pub struct Imported {
    /// The toolkit that the source belongs to.
    pub toolkit: Toolkit,
    /// The text of our configuration file.
    pub yaml: String,
    /// The outcome of each key of the source and of the toolkit's defaults.
    pub notes: Vec<Note>,
    /// The settings in `yaml` that this version refuses; if empty, the file loads.
    pub refused: Vec<Refused>,
}

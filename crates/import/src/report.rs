//! What an import gives back: the file's text, and what became of each key of the source.
use super::toolkit::Toolkit;

/// What became of a key of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Ours says the same.
    Mapped,
    /// Ours says something else, or in another way.
    Changed,
    /// The toolkit's default, which is another than ours.
    Default,
    /// There is nothing to set: it is so anyway, or is empty or off.
    Needless,
    /// It has no counterpart.
    Lost,
}

/// One key of the source and what became of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Note {
    /// What became of it.
    pub outcome: Outcome,
    /// The source's key, with its value where that helps.
    pub from: String,
    /// Our key and value, as `key: value`; empty where there is none.
    pub to: String,
    /// Why, where it is not obvious.
    pub why: String,
}

/// A key that this version refuses.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// Our key and value, as `key: value`.
    pub setting: String,
    /// Why.
    pub why: String,
}

/// A configuration of ours that was made of another.
#[derive(Debug)]
pub struct Imported {
    /// Where it comes from.
    pub toolkit: Toolkit,
    /// The file's text.
    pub yaml: String,
    /// Each key of the source, in its order, then the toolkit's defaults.
    pub notes: Vec<Note>,
    /// What stands in `yaml` and is refused by this version; if empty, the file loads.
    pub refused: Vec<Refused>,
}

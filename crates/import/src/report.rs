//! The result of an import: the file's text, and what became of each key of the source.
use super::toolkit::Toolkit;
use tunesmith_config::foreign::KeyOutcome;

/// A setting of the written file that this version refuses.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// The setting, as `key: value`.
    pub setting: String,
    /// Why this version refuses it.
    pub why: String,
}

/// The result of an import.
#[derive(Debug)]
pub struct Imported {
    /// The toolkit that the source belongs to.
    pub toolkit: Toolkit,
    /// The text of our configuration file.
    pub yaml: String,
    /// The outcome of each key of the source, and of the toolkit's defaults that are not ours.
    pub outcomes: Vec<KeyOutcome>,
    /// The settings in `yaml` that this version refuses; if empty, the file loads.
    pub refused: Vec<Refused>,
}

//! Where a value of the configuration comes from.
use super::value::quoted;
use std::fmt;
use std::path::PathBuf;

/// A key with its effective value.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Setting {
    /// The full key with its section: `train.batch_size`.
    pub key: String,
    /// The effective value, as JSON.
    pub value: serde_json::Value,
    /// The source that set it.
    pub source: Source,
}

/// Where a value comes from. Shown as `FILE:LINE`, `env NAME`, `argument`, `flag NAME` or `default`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// No source sets it: the schema's default.
    Default,
    /// A line of a file.
    File {
        /// The path as the user or the including file wrote it.
        path: PathBuf,
        /// Counted from 1, of the value.
        line: usize,
        /// Counted from 1, of the value.
        column: usize,
    },
    /// A key in a configuration of DeepSpeed, Accelerate or FSDP.
    Foreign {
        /// `FILE:LINE`, or the source of a mapping within our own configuration.
        place: String,
        /// The key as that file spells it.
        key: String,
    },
    /// The environment variable of this name.
    Env(String),
    /// The word `KEY=VALUE` of the command line.
    Word(String),
    /// The flag of this name, on the command line.
    Flag(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line, .. } => write!(f, "{}:{line}", path.display()),
            Self::Foreign { place, key } => write!(f, "{place} {key}"),
            Self::Env(name) => write!(f, "env {name}"),
            Self::Word(_) => f.write_str("argument"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

impl Source {
    /// Whether the value was given on the command line or in the environment.
    pub(super) const fn is_shell(&self) -> bool {
        matches!(self, Self::Env(_) | Self::Word(_) | Self::Flag(_))
    }

    /// The start of an error message: unlike `Display`, with the column of a file and the text of a word.
    pub(super) fn place(&self) -> String {
        match self {
            Self::File { path, line, column } => format!("{}:{line}:{column}", path.display()),
            Self::Word(word) => format!("argument {}", quoted(word)),
            other => other.to_string(),
        }
    }
}

impl serde::Serialize for Source {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

//! Where a value of the configuration comes from.
use super::value::quoted;
use std::fmt;
use std::path::PathBuf;

/// One effective value.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Setting {
    /// The full key: `train.batch_size`.
    pub key: String,
    /// The value.
    pub value: serde_json::Value,
    /// Where it comes from.
    pub source: Source,
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Nothing sets it.
    Default,
    /// A line of a file.
    File {
        /// The file as it was named.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Counted from 1.
        column: usize,
    },
    /// A key of a file of DeepSpeed or Accelerate, or of FSDP's.
    Foreign {
        /// File and line.
        place: String,
        /// The key.
        key: String,
    },
    /// This environment variable.
    Env(String),
    /// This `KEY=VALUE` word.
    Word(String),
    /// This flag.
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
    /// The place as an error message begins with it: with the column, or the whole word.
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

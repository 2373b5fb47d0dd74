//! What every layer stands on: errors with their exit codes, files, memory, signals, and what is registered by a line.
#![warn(missing_docs)]

pub mod error;
pub mod files;
pub mod memory;
pub mod registry;
pub mod signals;
pub mod words;

pub use error::{Error, Kind, Result};

//! What every layer uses: errors with their exit codes, files and glob patterns, memory, signals, and the registry.
//! A new optimizer, schedule, adapter, model family, file format or row form is one line of the registry.
#![warn(missing_docs)]

pub mod error;
pub mod files;
pub mod glob;
pub mod memory;
pub mod registry;
pub mod signals;
pub mod threads;
pub mod words;

pub use error::{Error, Kind, Result};

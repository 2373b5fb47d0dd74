//! A configuration in which every value is settled and has a source.
use super::foreign::{Foreign, NotNeeded};
use super::schema::Config;
use super::source::{Setting, Source};
use std::path::PathBuf;
use tunesmith_base::error::{Error, Result};

/// A configuration with a value for each key, and the source of each value.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The values, as the program uses them.
    pub config: Config,
    /// Each value with its source, in the order of the documentation.
    pub settings: Vec<Setting>,
    /// The configuration file that the user named, not those that it includes.
    pub path: PathBuf,
    /// Notes for the user, one sentence each.
    pub notes: Vec<String>,
    /// The outcome of each key in files of DeepSpeed, Accelerate and FSDP.
    pub foreign: Foreign,
    /// Keys of other toolkits that are accepted without effect, sorted by name.
    pub not_needed: Vec<NotNeeded>,
}

impl Resolved {
    /// Where the value of `key` comes from; [`Source::Default`] for a key that does not exist.
    pub fn source(&self, key: &str) -> &Source {
        self.settings.iter().find(|setting| setting.key == key).map_or(&Source::Default, |setting| &setting.source)
    }

    /// Refuses two keys if they contradict each other; `why` says what to change.
    ///
    /// # Errors
    /// [`Resolved::conflict`], if `contradict` holds.
    pub(super) fn refuse_if(&self, contradict: bool, first: &str, second: &str, why: &str) -> Result<()> {
        if contradict { Err(self.conflict(first, second, why)) } else { Ok(()) }
    }

    /// The error for two keys that contradict each other. It names both with their values and sources; `why` says what to change.
    pub(super) fn conflict(&self, first: &str, second: &str, why: &str) -> Error {
        let show = |key: &str| {
            let value =
                self.settings.iter().find(|setting| setting.key == key).map(|setting| setting.value.to_string());
            format!("{key}: {} ({})", value.unwrap_or_default(), self.source(key))
        };
        Error::config(format!("{} contradicts {}", show(first), show(second))).hint(why)
    }
}

/// Sets a value that follows from another setting, whose source it gets.
pub(super) fn set_by(settings: &mut [Setting], key: &str, value: serde_json::Value, source: &Source) {
    if let Some(setting) = settings.iter_mut().find(|setting| setting.key == key) {
        setting.value = value;
        setting.source = source.clone();
    }
}

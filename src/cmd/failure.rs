//! Passes a rank's final error to the launcher through a file, so that the launcher shows the original failure once.
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::atomic_lines;
use crate::comm::env;
use crate::error::{Error, Kind};
use crate::files::output::Existing;

/// An error in the form of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    code: u8,
    /// The error's message, which begins with the rank unless it is rank 0.
    pub message: String,
    hint: Option<String>,
}

const KINDS: [Kind; 9] = [
    Kind::Config,
    Kind::Data,
    Kind::Model,
    Kind::Checkpoint,
    Kind::Io,
    Kind::Peer,
    Kind::Numeric,
    Kind::Memory,
    Kind::Preempted,
];

/// The kind of a rank's error, from its exit code. An unknown code counts as a failed peer.
pub fn class(exit_code: i32) -> Kind {
    KINDS.into_iter().find(|kind| i32::from(kind.exit_code()) == exit_code).unwrap_or(Kind::Peer)
}

impl Report {
    /// The report of `error` in `rank`, the text of the variable `RANK`.
    fn new(error: &Error, rank: &str) -> Self {
        let message = error.message();
        let known = matches!(rank, "" | "0") || message.starts_with("rank ");
        let message = if known { message.to_owned() } else { format!("rank {rank}: {message}") };
        Self { code: error.kind().exit_code(), message, hint: error.hint_text().map(str::to_owned) }
    }

    pub fn into_error(self) -> Error {
        let error = Error::new(class(self.code.into()), self.message);
        self.hint.into_iter().fold(error, Error::hint)
    }
}

/// Writes `error` to the launcher's file. Returns false without a launcher; then this process must show it. If all
/// ranks stopped on a signal, only rank 0 reports it.
pub fn report(error: &Error) -> bool {
    let others = std::env::var("RANK").is_ok_and(|rank| !matches!(&*rank, "" | "0"));
    if error.kind() == Kind::Preempted && others {
        return true;
    }
    let Some(path) = std::env::var_os(env::ERROR_FILE).filter(|path| !path.is_empty()) else { return false };
    let rank = std::env::var("RANK").unwrap_or_default();
    let text = serde_json::to_string(&Report::new(error, &rank));
    text.is_ok_and(|text| atomic_lines::write(Path::new(&path), Existing::Replace, &text).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_through_whole() {
        for kind in KINDS {
            let error = Error::new(kind, "what").hint("how");
            let text = serde_json::to_string(&Report::new(&error, "2")).unwrap();
            let read = serde_json::from_str::<Report>(&text).unwrap().into_error();
            assert_eq!((read.kind(), read.message(), read.hint_text()), (kind, "rank 2: what", Some("how")));
        }
        assert_eq!(Report::new(&Error::peer("rank 1: barrier: late"), "1").message, "rank 1: barrier: late");
    }
}

//! The one error type. A message names the file, line or key, what was found and what was expected. A hint
//! says what to do, and the kind decides the exit code.
//!
//! An error that is made from another keeps it ([`Error::caused_by`]): `source()` returns it, and the message ends in
//! its text. So printing the error alone prints every cause once.
//!
//! Every message goes through [`shown`]: it holds no secret and no control characters, and is at most some 2000
//! characters long.
pub mod shown;

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use self::shown::brief;
use crate::files;

/// What went wrong, by class. The class decides the process's exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A configuration file, flag or environment variable: exit 2.
    Config,
    /// A data set or a row, or what a template makes of it: exit 3.
    Data,
    /// A model folder: its `config.json`, weights, tokenizer or chat template: exit 4.
    Model,
    /// A checkpoint or its stamp: exit 5.
    Checkpoint,
    /// The file system: exit 6.
    Io,
    /// Another rank, or the connection to it: exit 7.
    Peer,
    /// NaN or infinity that does not go away: exit 8.
    Numeric,
    /// Memory or threads that the system does not give, or a budget that would be exceeded: exit 9.
    Memory,
    /// A GPU, its driver or its libraries are missing, or fail: exit 10.
    Device,
    /// Stopped by a signal after saving: exit 75 (`EX_TEMPFAIL`).
    Preempted,
}

impl Kind {
    /// The process exit code of this class.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Config => 2,
            Self::Data => 3,
            Self::Model => 4,
            Self::Checkpoint => 5,
            Self::Io => 6,
            Self::Peer => 7,
            Self::Numeric => 8,
            Self::Memory => 9,
            Self::Device => 10,
            Self::Preempted => 75,
        }
    }

    /// The word that opens the printed message.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Data => "data",
            Self::Model => "model",
            Self::Checkpoint => "checkpoint",
            Self::Io => "i/o",
            Self::Peer => "peer",
            Self::Numeric => "numeric",
            Self::Memory => "memory",
            Self::Device => "device",
            Self::Preempted => "preempted",
        }
    }
}

/// An error with its class, its message and, if possible, a hint what to do about it.
#[derive(Debug, Clone)]
pub struct Error {
    kind: Kind,
    message: String,
    hint: Option<String>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    /// Whether the machine lacks something, such as disk space or file handles. [`Error::with_kind`] then keeps the
    /// class.
    of_machine: bool,
}

/// `std::result::Result` with this crate's [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! constructors {
    ($($name:ident $kind:ident),*) => {$(
        #[doc = concat!("An error of [`Kind::", stringify!($kind), "`].")]
        pub fn $name(message: impl Into<String>) -> Self {
            Self::new(Kind::$kind, message)
        }
    )*};
}

impl Error {
    /// An error of the given class, its message without secrets and cut to length ([`shown::brief`]).
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: brief(&message.into()), hint: None, source: None, of_machine: false }
    }

    constructors!(config Config, data Data, model Model, checkpoint Checkpoint, peer Peer, numeric Numeric,
        memory Memory, device Device, preempted Preempted);

    /// Adds what led to this error: its text and those of its own causes go after the message, and `source()` returns it.
    #[must_use]
    pub fn caused_by(mut self, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let cause = Arc::<dyn StdError + Send + Sync>::from(cause.into());
        let mut next: Option<&dyn StdError> = Some(&*cause);
        while let Some(error) = next {
            let text = brief(&error.to_string());
            // Many errors repeat the text of their cause.
            if !self.message.ends_with(&text) {
                self.message = format!("{}: {text}", self.message);
            }
            next = error.source();
        }
        self.message = brief(&self.message);
        self.source = Some(cause);
        self
    }

    /// Makes `cause` this error's `source()` and leaves the message, which already describes the cause, in other words
    /// or with another position.
    #[must_use]
    pub fn with_source(mut self, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(Arc::from(cause.into()));
        self
    }

    /// A file-system error: what was being done (`"read"`, `"create"`), to which path, and the system's reason. It is
    /// of [`Kind::Io`], or of [`Kind::Memory`] for `ENOMEM`, with a hint for the usual causes.
    pub fn io(doing: &str, path: impl AsRef<Path>, source: &io::Error) -> Self {
        let path = path.as_ref();
        let code = source.raw_os_error();
        let kind = if code == Some(libc::ENOMEM) { Kind::Memory } else { Kind::Io };
        let mut error = Self::new(kind, format!("cannot {doing} {}", path.display())).caused_by(same(source));
        let codes = [
            libc::EMFILE,
            libc::ENFILE,
            libc::ENOMEM,
            libc::EAGAIN,
            libc::EIO,
            libc::EFBIG,
            libc::ENOSPC,
            libc::EDQUOT,
        ];
        error.of_machine = code.is_some_and(|code| codes.contains(&code));
        match hint_of(source) {
            // `/dev/full`, or a full disk behind `>`.
            Some(_) if path == Path::new("standard output") && source.kind() == io::ErrorKind::StorageFull => {
                error.hint("there is no room where the output is sent to: send it to another place")
            }
            Some(hint) => error.hint(hint),
            None => error,
        }
    }

    /// This error with `source` as its cause. If `source` shows that the machine lacks something, such as file handles,
    /// returns the file-system error about `path` instead.
    #[must_use]
    pub fn unless_of_machine(self, path: impl AsRef<Path>, source: &io::Error) -> Self {
        let fault = Self::io("read", path, source);
        if fault.of_machine { fault } else { self.caused_by(same(source)) }
    }

    /// The system cannot start a thread: a limit of the machine ([`Kind::Memory`]), whatever the thread was for.
    pub fn no_thread(source: &io::Error) -> Self {
        let error = Self::memory("cannot start a thread").caused_by(same(source));
        Self { of_machine: true, ..error }
            .hint("raise the limits of processes and memory (ulimit -u, ulimit -v, pids.max)")
    }

    /// Adds what the user can do about it (printed as `hint: …`). A later hint replaces an earlier one.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(brief(&hint.into()));
        self
    }

    /// Puts `context` and a colon before the message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = brief(&format!("{context}: {}", self.message));
        self
    }

    /// The same error about another key: names `to` in place of `from`.
    #[must_use]
    pub fn of_key(mut self, from: &str, to: &str) -> Self {
        self.message = self.message.replace(from, to);
        self.hint = self.hint.map(|hint| hint.replace(from, to));
        self
    }

    /// Puts a semicolon and `more` after the message.
    #[must_use]
    pub fn with_more(mut self, more: &str) -> Self {
        self.message = brief(&format!("{}; {more}", self.message));
        self
    }

    /// Changes the class of the error: a missing file is [`Kind::Data`] if it should hold data, for example. An error about
    /// what the machine lacks, such as disk space or memory, keeps its class.
    #[must_use]
    pub const fn with_kind(mut self, kind: Kind) -> Self {
        if !self.of_machine {
            self.kind = kind;
        }
        self
    }

    /// The class, which decides the exit code.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The message without class and hint.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it, if known.
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

/// Copies the error: its code or class, and its text.
fn same(source: &io::Error) -> io::Error {
    match source.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(source.kind(), source.to_string()),
    }
}

/// What a user can do about an error of the file system.
fn hint_of(source: &io::Error) -> Option<&'static str> {
    use io::ErrorKind as Of;
    Some(match (source.raw_os_error(), source.kind()) {
        (Some(libc::EMFILE | libc::ENFILE), _) => "the limit of open files is too low: raise it (ulimit -n)",
        (Some(libc::EFBIG), _) => "the limit of a file's size is too low: raise it (ulimit -f)",
        (Some(libc::EIO), _) => "the device fails: look at the system's log (dmesg), and write to another one",
        (Some(libc::ELOOP), _) => "the links lead in a circle: name the file itself",
        (_, Of::StorageFull) => "free some space, or name a place on another disk",
        (_, Of::QuotaExceeded) => "your quota is used up (quota -s): free some space, or name a place on another disk",
        (_, Of::IsADirectory) => "it is a folder, expected a file: move it away",
        (_, Of::NotADirectory) => "a part of this path is a file, not a folder: check the path",
        (_, Of::PermissionDenied) => "check the owner and mode of the path",
        (_, Of::ReadOnlyFilesystem) => "the file system is read-only: name a place on another one",
        (_, Of::InvalidFilename) => "the name is too long: choose a shorter one",
        (_, Of::NotFound) => "check the path: nothing is there",
        (_, Of::AlreadyExists) => "move away what is there, or name another place",
        (_, Of::UnexpectedEof) => "the file is cut off: copy it or write it again",
        // A path that leads to no regular file. Decompressors report a wrong checksum as `InvalidInput` too: see the next arm.
        (None, Of::InvalidInput) if files::is_no_regular_file(source) => {
            "put a regular file in its place, or name another: FIFOs, devices, sockets and links like this are not used"
        }
        (None, Of::InvalidInput | Of::InvalidData) => {
            "check that this is the file that you mean, and that it is whole: copy it or write it again"
        }
        _ => return None,
    })
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} error: {}", self.kind.label(), self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_user_can_mend_has_a_hint() {
        let codes = [
            libc::EMFILE,
            libc::EFBIG,
            libc::EIO,
            libc::ELOOP,
            libc::ENOSPC,
            libc::EDQUOT,
            libc::EISDIR,
            libc::ENOTDIR,
            libc::EACCES,
            libc::EROFS,
            libc::ENAMETOOLONG,
            libc::ENOENT,
            libc::EEXIST,
        ];
        for source in codes.map(io::Error::from_raw_os_error) {
            assert!(Error::io("read", "x", &source).hint_text().is_some(), "{source}");
        }
    }

    #[test]
    fn the_hint_is_about_what_failed() {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let hint = |path: &str, source: &io::Error| Error::io("write", path, source).hint_text().map(str::to_owned);
        assert!(hint("standard output", &full).is_some_and(|hint| hint.contains("where the output is sent to")));
        assert!(hint("run/metrics.jsonl", &full).is_some_and(|hint| hint.contains("free some space")));
        // The error of a decompressor about a wrong checksum.
        let damaged = io::Error::new(io::ErrorKind::InvalidInput, "corrupt gzip stream");
        assert!(hint("rows.jsonl.gz", &damaged).is_some_and(|hint| hint.contains("whole") && !hint.contains("FIFO")));
    }

    #[test]
    fn causes_are_kept_and_said_once() {
        let missing = || io::Error::from_raw_os_error(libc::ENOENT);
        let error = Error::io("read", "x", &missing());
        assert_eq!(error.message(), format!("cannot read x: {}", missing()));
        let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
        assert_eq!(cause, Some(io::ErrorKind::NotFound));
        let outer = Error::data("rows.jsonl: not readable").caused_by(io::Error::other(missing())).context("load");
        assert_eq!(outer.message(), format!("load: rows.jsonl: not readable: {}", missing()));
        assert!(outer.source().is_some() && outer.clone().source().is_some());
        let told = Error::data("line 3: no number").with_source(io::Error::other("no number at line 3"));
        assert!(told.message() == "line 3: no number" && told.source().is_some());
    }

    #[test]
    fn what_the_machine_lacks_keeps_its_class() {
        let of = |code| {
            let source = io::Error::from_raw_os_error(code);
            Error::checkpoint("x: cannot be read").unless_of_machine("x", &source).kind()
        };
        assert_eq!([libc::EMFILE, libc::ENOMEM, libc::ENOENT].map(of), [Kind::Io, Kind::Memory, Kind::Checkpoint]);
    }
}

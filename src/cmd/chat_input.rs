//! The input of `tunesmith chat`: in a terminal, lines with editing and a history; otherwise the lines of standard input.
use std::fs::{self, OpenOptions, Permissions};
use std::io::{IsTerminal as _, Lines, StdinLock};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};

use super::terminal::{Style, print_note, print_text, stdout_colour};
use crate::error::{Error, Result};

/// The most lines in the history.
const KEPT: usize = 1000;

pub(super) enum ChatInput {
    Terminal(Box<Prompt>),
    Lines(Lines<StdinLock<'static>>),
}

/// A line editor with its history.
pub(super) struct Prompt {
    editor: Editor<(), FileHistory>,
    /// The file of the history; `None` if it cannot be written.
    history: Option<PathBuf>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// A line, without its end.
    Line(String),
    /// Nothing to answer: Ctrl-C, or bytes that are not UTF-8.
    Nothing,
    /// The end of the input.
    End,
}

impl ChatInput {
    /// Opens standard input, and in a terminal the history of earlier chats.
    ///
    /// # Errors
    /// [`crate::Kind::Io`]: the terminal cannot be set up.
    pub(super) fn open() -> Result<Self> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() || !std::io::stdout().is_terminal() {
            return Ok(Self::Lines(stdin.lines()));
        }
        let config = Config::builder().auto_add_history(true).history_ignore_space(true).max_history_size(KEPT);
        let config = config.map_err(failed)?.build();
        let history = FileHistory::with_config(&config);
        let mut editor = Editor::with_history(config, history).map_err(failed)?;
        let history = state_dir().map(|folder| folder.join("chat_history"));
        let history = history.and_then(|path| match prepare(&path) {
            Ok(()) => Some(path),
            Err(error) => {
                print_note(&format!("{}: no history is kept: {error}", path.display()));
                None
            }
        });
        if let Some(path) = &history {
            // An unreadable history must not prevent a chat.
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal(Box::new(Prompt { editor, history })))
    }

    /// Whether the input is a terminal.
    pub(super) const fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Waits for the next line.
    ///
    /// # Errors
    /// [`crate::Kind::Io`]: standard input cannot be read.
    pub(super) fn next(&mut self) -> Result<Said> {
        match self {
            Self::Lines(lines) => match lines.next() {
                None => Ok(Said::End),
                Some(Ok(line)) => Ok(Said::Line(line)),
                Some(Err(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                    print_text("not UTF-8: the line is left out\n");
                    Ok(Said::Nothing)
                }
                Some(Err(error)) => Err(Error::io("read", "standard input", &error)),
            },
            Self::Terminal(prompt) => prompt.next(),
        }
    }
}

impl Prompt {
    fn next(&mut self) -> Result<Said> {
        match self.editor.readline(&Style::Green.paint("> ", stdout_colour())) {
            Ok(line) => {
                // After each line: a chat may end in ways that leave no time for it.
                if let Some(path) = &self.history
                    && let Err(error) = self.editor.append_history(path)
                {
                    print_note(&format!("{}: the history is no longer kept: {error}", path.display()));
                    self.history = None;
                }
                Ok(Said::Line(line))
            }
            Err(ReadlineError::Interrupted) => {
                print_text("Ctrl-D or /quit leaves\n");
                Ok(Said::Nothing)
            }
            Err(ReadlineError::Eof) => Ok(Said::End),
            Err(error) => Err(failed(error)),
        }
    }
}

fn failed(error: ReadlineError) -> Error {
    match error {
        ReadlineError::Io(error) => Error::io("read", "the terminal", &error),
        error => Error::new(crate::Kind::Io, "cannot read the terminal")
            .caused_by(error)
            .hint("give the question with -p, or a file of them with --in"),
    }
}

/// The program's folder for state that outlives a run: in `XDG_STATE_HOME`, else `~/.local/state`.
fn state_dir() -> Option<PathBuf> {
    let xdg = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    xdg.or_else(home).map(|state| state.join("tunesmith"))
}

/// Creates the file of the history if it is missing, and makes it readable for its owner alone.
fn prepare(path: &Path) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(std::io::Error::other("not a regular file"));
    }
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_is_its_owners_alone() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("state/tunesmith/chat_history");
        prepare(&path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        prepare(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        let link = root.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(prepare(&link).unwrap_err().to_string().contains("not a regular file"));
    }
}

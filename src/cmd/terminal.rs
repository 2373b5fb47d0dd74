//! How subcommands write to the terminal: colours only where a person looks, a closed pipe is no error.
use crate::error::{Error, Result};
use std::io::{IsTerminal, Write};

/// Ways to set a piece of text apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// What is wrong.
    Red,
    /// What is right.
    Green,
    /// What to look at.
    Yellow,
    /// Names.
    Bold,
    /// What matters less.
    Dim,
}

impl Style {
    const fn code(self) -> &'static str {
        match self {
            Self::Red => "1;31",
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Bold => "1",
            Self::Dim => "2",
        }
    }

    /// `text` in this style, or as it is without `colour`.
    pub fn paint(self, text: &str, colour: bool) -> String {
        if colour { format!("\x1b[{}m{text}\x1b[0m", self.code()) } else { text.to_owned() }
    }
}

/// Whether standard output is a terminal that wants colours (`NO_COLOR` unset).
pub fn stdout_colour() -> bool {
    std::io::stdout().is_terminal() && wants_colour()
}

fn stderr_colour() -> bool {
    std::io::stderr().is_terminal() && wants_colour()
}

fn wants_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|terminal| terminal != "dumb")
}

/// Writes to standard output. A reader that has gone away (`| head`) is no error.
///
/// # Errors
/// [`crate::Kind::Io`] when the output cannot be written, such as to a full disk.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("write", "standard output", &source))
        }
        _ => Ok(()),
    }
}

/// Writes a text to standard error, as it is.
pub(super) fn print_text(text: &str) {
    // A text that nobody can read is no failure.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Writes a remark to standard error.
pub(super) fn print_note(text: &str) {
    // A remark that nobody can read is no failure.
    let _ = writeln!(std::io::stderr().lock(), "{} {text}", Style::Yellow.paint("note:", stderr_colour()));
}

/// Writes an error and its hint to standard error.
pub(super) fn print_error(error: &Error) {
    let colour = stderr_colour();
    let label = Style::Red.paint(&format!("{} error:", error.kind().label()), colour);
    let hint =
        error.hint_text().map_or_else(String::new, |hint| format!("  {} {hint}\n", Style::Bold.paint("hint:", colour)));
    let text = format!("{label} {}\n{hint}", error.message());
    // With standard error closed there is nowhere left to complain.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

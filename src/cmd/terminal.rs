//! How subcommands write to the terminal: colours only where a person looks, a closed pipe is no error.
use crate::error::shown::{escaped, shown};
use crate::error::{Error, Result};
use std::borrow::Cow;
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

/// Writes to standard output, as [`shown`]. A reader that has gone away (`| head`) is no error.
///
/// # Errors
/// [`crate::Kind::Io`] when the output cannot be written, such as to a full disk.
pub fn print(text: &str) -> Result<()> {
    print_bytes(styled(text, stdout_colour()).as_bytes())
}

/// Writes a text that the program itself has to standard output, to the byte: keys such as `hub_token` in it have no secrets behind them.
///
/// # Errors
/// As [`print`].
pub(super) fn print_reference(text: &str) -> Result<()> {
    print_bytes(text.as_bytes())
}

/// Writes a model's answer to standard output: as it is into a file or a pipe, escaped where a terminal would obey it.
///
/// # Errors
/// As [`print`].
pub(super) fn print_answer(text: &str) -> Result<()> {
    if std::io::stdout().is_terminal() { print_bytes(escaped(text).as_bytes()) } else { print_bytes(text.as_bytes()) }
}

fn print_bytes(bytes: &[u8]) -> Result<()> {
    if super::streams::stdout_is_closed() {
        return Err(Error::new(crate::Kind::Io, "cannot write standard output: it is closed"));
    }
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("write", "standard output", &source))
        }
        _ => Ok(()),
    }
}

/// The text as [`shown`], with the styles of [`Style::paint`] left in it where there is colour.
fn styled(text: &str, colour: bool) -> Cow<'_, str> {
    const ESCAPE: char = '\u{1b}';
    if !colour || !text.contains(ESCAPE) {
        return shown(text);
    }
    let codes = [Style::Red, Style::Green, Style::Yellow, Style::Bold, Style::Dim].map(Style::code);
    let mut parts = text.split(ESCAPE);
    let mut out = shown(parts.next().unwrap_or_default()).into_owned();
    for part in parts {
        let style = part.strip_prefix('[').and_then(|rest| rest.split_once('m'));
        if let Some((_, rest)) = style.filter(|(code, _)| *code == "0" || codes.contains(code)) {
            out.push(ESCAPE);
            out.push_str(&part[..part.len() - rest.len()]);
            out.push_str(&shown(rest));
        } else {
            out.push_str(&shown(&format!("{ESCAPE}{part}")));
        }
    }
    Cow::Owned(out)
}

/// Writes a text to standard error, as [`shown`].
pub(super) fn print_text(text: &str) {
    // A text that nobody can read is no failure.
    let _ = std::io::stderr().lock().write_all(styled(text, stderr_colour()).as_bytes());
}

/// Writes a remark to standard error.
pub(super) fn print_note(text: &str) {
    print_text(&format!("{} {text}\n", Style::Yellow.paint("note:", stderr_colour())));
}

/// Writes an error and its hint to standard error.
pub(super) fn print_error(error: &Error) {
    let colour = stderr_colour();
    let label = Style::Red.paint(&format!("{} error:", error.kind().label()), colour);
    let hint =
        error.hint_text().map_or_else(String::new, |hint| format!("  {} {hint}\n", Style::Bold.paint("hint:", colour)));
    print_text(&format!("{label} {}\n{hint}", error.message()));
}

/// Lets panics be shown like any other text.
pub(super) fn clean_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.to_string();
        if shown(&text) == text { print(panic) } else { print_text(&format!("{text}\n")) }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_styles_reach_a_terminal() {
        let text = format!("{} \u{1b}[31mb \u{1b}]0;title\u{7}", Style::Red.paint("a", true));
        assert_eq!(styled(&text, true), "\u{1b}[1;31ma\u{1b}[0m \\u{1b}[31mb \\u{1b}]0;title\\u{7}");
        assert!(!styled(&text, false).contains('\u{1b}'));
    }
}

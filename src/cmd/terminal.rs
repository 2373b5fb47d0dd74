//! Output of subcommands: colours and folded lines only on a terminal; a closed pipe is no error.
use crate::error::shown::{escaped, shown};
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use unicode_width::UnicodeWidthChar;

/// Text styles of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Red,
    Green,
    Yellow,
    Bold,
    Dim,
    /// The filled part of a bar.
    Cyan,
}

impl Style {
    const fn code(self) -> &'static str {
        match self {
            Self::Red => "1;31",
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Cyan => "36",
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

/// Columns of a terminal that does not report its width.
const COLUMNS: usize = 80;

/// The width of the terminal at standard output, in columns; `None` if it is not a terminal.
pub(super) fn columns() -> Option<usize> {
    let stdout = std::io::stdout();
    let size = || terminal_size::terminal_size_of(&stdout).map(|(width, _)| usize::from(width.0));
    stdout.is_terminal().then(|| size().filter(|&columns| columns > 0).unwrap_or(COLUMNS))
}

/// Writes a page of text to standard output, as [`shown`]: on a terminal its long lines are folded between words.
///
/// # Errors
/// As [`print_exact`].
pub fn print(text: &str) -> Result<()> {
    let text = styled(text, stdout_colour());
    match columns() {
        Some(columns) => print_bytes(fold(&text, columns).as_bytes()),
        None => print_bytes(text.as_bytes()),
    }
}

/// Wraps lines longer than `columns` between words. Continued text is indented to the second column of a table, else by
/// two columns. A word longer than the line stays whole, so that paths can be copied.
pub(super) fn fold(text: &str, columns: usize) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        if width(line) <= columns {
            out.push_str(line);
        } else {
            fold_line(line, columns, &mut out);
        }
    }
    out
}

fn fold_line(line: &str, columns: usize, out: &mut String) {
    let (body, end) = line.strip_suffix('\n').map_or((line, ""), |body| (body, "\n"));
    let hang = hang(body, columns);
    let (mut column, mut start) = (0, true);
    for piece in body.split_inclusive(' ') {
        let word = width(piece.trim_end_matches(' '));
        if word > 0 && column + word > columns && !start && column > hang {
            out.truncate(out.trim_end_matches(' ').len());
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', hang));
            column = hang;
        }
        out.push_str(piece);
        column += width(piece);
        start = start && word == 0;
    }
    out.push_str(end);
}

/// The column at which a folded line continues.
fn hang(line: &str, columns: usize) -> usize {
    let indent = line.len() - line.trim_start_matches(' ').len();
    let rest = &line[indent..];
    let second = rest.find("  ").map(|gap| {
        let value = rest[gap..].trim_start_matches(' ');
        indent + width(&rest[..rest.len() - value.len()])
    });
    second.filter(|&at| at <= columns * 3 / 5).unwrap_or((indent + 2).min(columns / 2))
}

/// The width of a text in columns, without colour codes and line ends.
pub(super) fn width(text: &str) -> usize {
    let (mut columns, mut chars) = (0, text.chars());
    while let Some(character) = chars.next() {
        if character == '\x1b' {
            // Only colours are written here: `ESC [ … m`.
            chars.by_ref().take_while(|&next| next != 'm').for_each(drop);
        } else {
            columns += character.width().unwrap_or(0);
        }
    }
    columns
}

/// Writes to standard output, as [`shown`], without folding: commands, JSON. A reader that has gone away (`| head`) is no error.
///
/// # Errors
/// [`crate::Kind::Io`] when the output cannot be written, such as to a full disk.
pub fn print_exact(text: &str) -> Result<()> {
    print_bytes(styled(text, stdout_colour()).as_bytes())
}

/// Writes a text of the program itself to standard output, byte for byte. Keys such as `hub_token` in it hold no secrets.
///
/// # Errors
/// As [`print()`].
pub(super) fn print_reference(text: &str) -> Result<()> {
    print_bytes(text.as_bytes())
}

/// Writes a model's answer to standard output: as it is into a file or a pipe, escaped where a terminal would obey it.
///
/// # Errors
/// As [`print()`].
pub(super) fn print_answer(text: &str) -> Result<()> {
    if std::io::stdout().is_terminal() { print_bytes(escaped(text).as_bytes()) } else { print_bytes(text.as_bytes()) }
}

/// Writes reasoning to standard error, dim in a terminal, so that standard output has the answer alone.
pub(super) fn print_reasoning(text: &str) {
    print_text(&Style::Dim.paint(text, stderr_colour()));
}

fn print_bytes(bytes: &[u8]) -> Result<()> {
    if super::streams::stdout_is_closed() {
        return Err(Error::new(crate::Kind::Io, "cannot write standard output: it is closed")
            .hint("send it to a file or to /dev/null instead"));
    }
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::io("write", "standard output", &source))
        }
        _ => Ok(()),
    }
}

/// The text as [`shown`], but with the styles of [`Style::paint`] if there is colour.
fn styled(text: &str, colour: bool) -> Cow<'_, str> {
    const ESCAPE: char = '\u{1b}';
    if !colour || !text.contains(ESCAPE) {
        return shown(text);
    }
    let codes = [Style::Red, Style::Green, Style::Yellow, Style::Bold, Style::Dim, Style::Cyan].map(Style::code);
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
    // Closed standard error is not a failure.
    let _ = std::io::stderr().lock().write_all(styled(text, stderr_colour()).as_bytes());
}

/// Writes a remark to standard error.
pub(super) fn print_note(text: &str) {
    print_text(&format!("{} {text}\n", Style::Yellow.paint("note:", stderr_colour())));
}

/// A line about something that the user should act on.
pub(super) fn warning(text: &str, colour: bool) -> String {
    format!("{} {text}\n", Style::Yellow.paint("warning:", colour))
}

/// Writes a [`warning`] to standard error.
pub(super) fn print_warning(text: &str) {
    print_text(&warning(text, stderr_colour()));
}

/// Writes an error and its hint to standard error.
pub(super) fn print_error(error: &Error) {
    let colour = stderr_colour();
    let label = Style::Red.paint(&format!("{} error:", error.kind().label()), colour);
    let hint =
        error.hint_text().map_or_else(String::new, |hint| format!("  {} {hint}\n", Style::Bold.paint("hint:", colour)));
    print_text(&format!("{label} {}\n{hint}", error.message()));
}

/// Prints panic messages like other text, without control characters.
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

    #[test]
    fn long_lines_are_folded_below_their_text() {
        let table =
            "run\n  memory    45.0 MiB at most, predicted: 5 MiB of weights, 12 MiB of activations\n  rows      6\n";
        assert_eq!(
            fold(table, 40),
            "run\n  memory    45.0 MiB at most, predicted:\n            5 MiB of weights, 12 MiB of\n            activations\n  rows      6\n"
        );
        assert!(fold(table, 40).lines().all(|line| width(line) <= 40));
        assert_eq!(fold(table, 120), table);
        assert_eq!(fold("one two three four", 9), "one two\n  three\n  four");
    }

    #[test]
    fn colours_take_no_columns_and_wide_characters_two() {
        assert_eq!((width("\x1b[1;31mred\x1b[0m"), width("日本"), width("é\n")), (3, 4, 1));
        let red = Style::Red.paint("aaa bbb", true);
        assert_eq!(fold(&red, 7), red);
        assert_eq!(fold(&red, 6), "\x1b[1;31maaa\n  bbb\x1b[0m");
    }

    #[test]
    fn words_stay_whole() {
        // A line break before the word would not make room for it.
        let path = "file  /a/very/long/path/without/blanks";
        assert_eq!(fold(path, 12), path);
        assert_eq!(fold("/a/very/long/path", 4), "/a/very/long/path");
    }
}

//! White space and line ends as Python's `str` methods define them: more characters than in Rust.

/// Python's `str.isspace` of one character: Unicode white space and the four ASCII separators U+001C to U+001F.
pub(super) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || matches!(letter, '\u{1c}'..='\u{1f}')
}

/// Python's `strip`: removes white space, or any of `letters`, at both ends.
pub(super) fn strip<'a>(text: &'a str, letters: Option<&str>) -> &'a str {
    lstrip(rstrip(text, letters), letters)
}

/// Python's `lstrip`: [`strip`] at the start only.
pub(super) fn lstrip<'a>(text: &'a str, letters: Option<&str>) -> &'a str {
    text.trim_start_matches(|letter| is_stripped(letter, letters))
}

/// Python's `rstrip`: [`strip`] at the end only.
pub(super) fn rstrip<'a>(text: &'a str, letters: Option<&str>) -> &'a str {
    text.trim_end_matches(|letter| is_stripped(letter, letters))
}

fn is_stripped(letter: char, letters: Option<&str>) -> bool {
    letters.map_or_else(|| is_space(letter), |letters| letters.contains(letter))
}

/// Python's `split` without a separator, with at most `most` splits.
pub(super) fn split(text: &str, most: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = if words.len() < most { rest.find(is_space) } else { None };
        let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
        words.push(word);
        rest = after.trim_start_matches(is_space);
    }
    words
}

/// Python's `splitlines`: it knows ten line ends, not only `\n` and `\r`.
pub(super) fn splitlines(text: &str, keep_ends: bool) -> Vec<&str> {
    let ends = |letter: char| matches!(letter, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.find(ends).unwrap_or(rest.len());
        let behind = &rest[at..];
        let length = if behind.starts_with("\r\n") { 2 } else { behind.chars().next().map_or(0, char::len_utf8) };
        lines.push(&rest[..if keep_ends { at + length } else { at }]);
        rest = &rest[at + length..];
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by Python: `[c for c in range(0x110000) if chr(c).isspace()]`.
    const SPACES: [u32; 29] = [
        0x9, 0xa, 0xb, 0xc, 0xd, 0x1c, 0x1d, 0x1e, 0x1f, 0x20, 0x85, 0xa0, 0x1680, 0x2000, 0x2001, 0x2002, 0x2003,
        0x2004, 0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200a, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000,
    ];
    /// Written by Python: `[c for c in range(0x110000) if len(f"a{chr(c)}b".splitlines()) > 1]`.
    const LINE_ENDS: [u32; 10] = [0xa, 0xb, 0xc, 0xd, 0x1c, 0x1d, 0x1e, 0x85, 0x2028, 0x2029];

    #[test]
    fn every_character_is_what_python_takes_it_for() {
        let all = || (0..=0x0010_ffff).filter_map(char::from_u32);
        let found: Vec<u32> = all().filter(|letter| is_space(*letter)).map(u32::from).collect();
        assert_eq!(found, SPACES);
        let found: Vec<u32> =
            all().filter(|letter| splitlines(&format!("a{letter}b"), false).len() > 1).map(u32::from).collect();
        assert_eq!(found, LINE_ENDS);
    }

    #[test]
    fn strip_and_split_are_pythons() {
        assert_eq!(strip("\u{1c}\u{1f} a \u{1f}", None), "a");
        assert_eq!(lstrip(" a ", None), "a ");
        assert_eq!(rstrip(" a ", None), " a");
        assert_eq!(strip("xyaxy", Some("yx")), "a");
        assert_eq!(strip(" a ", Some("")), " a ");
        assert_eq!(split("  a\u{1f}b  c ", usize::MAX), ["a", "b", "c"]);
        assert_eq!(split("  a  b  c ", 1), ["a", "b  c "]);
        assert_eq!(split("  a ", 0), ["a "]);
        assert_eq!(split(" \u{1c}", 3), [""; 0]);
    }

    #[test]
    fn lines_are_pythons() {
        assert_eq!(splitlines("a\r\nb\rc\n\nd", false), ["a", "b", "c", "", "d"]);
        assert_eq!(splitlines("a\r\nb\u{85}", true), ["a\r\n", "b\u{85}"]);
        assert_eq!(splitlines("a\n", false), ["a"]);
        assert_eq!(splitlines("", false), [""; 0]);
    }
}

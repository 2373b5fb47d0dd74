//! Patterns of data files as data set cards write them: `data/train-*`, `**/*.jsonl`, `{a,b}/[0-9].csv`.
use std::fmt::Write as _;

use regex::Regex;

/// Whether `text` is a pattern and not the name of one file.
pub(super) fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '[', '{'])
}

/// The pattern as an expression on the whole path; nothing where it is none. `*` stays within a folder, `**` does not.
pub(super) fn compile(pattern: &str) -> Option<Regex> {
    let mut expression = String::from("^");
    let mut braces = 0_usize;
    let mut rest = pattern.strip_prefix("./").unwrap_or(pattern);
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '*' if rest.starts_with("*/") => {
                rest = &rest[2..];
                expression.push_str("(?:.*/)?");
            }
            '*' if rest.starts_with('*') => {
                rest = &rest[1..];
                expression.push_str(".*");
            }
            '*' => expression.push_str("[^/]*"),
            '?' => expression.push_str("[^/]"),
            '[' => {
                let (class, after) = rest.split_once(']')?;
                let (not, class) = class.strip_prefix(['!', '^']).map_or(("", class), |class| ("^", class));
                let class = class.replace('\\', "\\\\").replace('[', "\\[").replace('&', "\\&").replace('~', "\\~");
                let _ = write!(expression, "[{not}{class}]"); // a String never fails
                rest = after;
            }
            '{' => {
                braces += 1;
                expression.push_str("(?:");
            }
            '}' if braces > 0 => {
                braces -= 1;
                expression.push(')');
            }
            ',' if braces > 0 => expression.push('|'),
            other => expression.push_str(&regex::escape(other.encode_utf8(&mut [0; 4]))),
        }
    }
    expression.push('$');
    Regex::new(&expression).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        let matches = |pattern: &str, text: &str| compile(pattern).is_some_and(|regex| regex.is_match(text));
        assert!(matches("data/train-*", "data/train-00000-of-00001.parquet"));
        assert!(!matches("data/train-*", "data/train-a/b.parquet") && !matches("*.jsonl", "a/b.jsonl"));
        assert!(matches("**/*.jsonl", "b.jsonl") && matches("**/*.jsonl", "a/c/b.jsonl") && matches("a/**", "a/c/b"));
        assert!(matches("{a,b}/[0-9].csv", "b/3.csv") && !matches("{a,b}/[!0-9].csv", "b/3.csv"));
        assert!(matches("./a+b?.json", "a+bc.json") && !matches("a.json", "abjson"));
        assert!(compile("a[").is_none() && compile("{a").is_none());
        assert!(is_pattern("a*") && !is_pattern("a-b.csv"));
    }
}

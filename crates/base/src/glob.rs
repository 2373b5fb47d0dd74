//! Patterns for paths, as shells and data set cards write them: `data/train-*`, `**/*.jsonl`, `{a,b}/[0-9].csv`.
use globset::{GlobBuilder, GlobMatcher};

use crate::error::{Error, Result};

/// Whether a path has a character with a special meaning in patterns.
pub fn is_pattern(path: &str) -> bool {
    path.contains(['*', '?', '[', '{'])
}

/// Compiles a pattern, which must match a path as a whole. Only `**` matches the `/` between folders. A backslash has
/// no meaning: `[*]` matches a star.
///
/// # Errors
/// [`crate::Kind::Data`]: a bracket or brace is not closed, or a class such as `[z-a]` is empty.
pub fn compile(pattern: &str) -> Result<GlobMatcher> {
    let glob = GlobBuilder::new(pattern).literal_separator(true).backslash_escape(false).empty_alternates(true).build();
    glob.map(|glob| glob.compile_matcher())
        .map_err(|error| Error::data(format!("{pattern} is not a valid pattern: {}", error.kind())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        let matches = |pattern: &str, path: &str| compile(pattern).unwrap().is_match(path);
        assert!(matches("data/train-*", "data/train-00000-of-00001.parquet"));
        assert!(!matches("data/train-*", "data/train-a/b.parquet") && !matches("*.jsonl", "a/b.jsonl"));
        assert!(matches("**/*.jsonl", "b.jsonl") && matches("**/*.jsonl", "a/c/b.jsonl") && matches("a/**", "a/c/b"));
        assert!(matches("{a,b}/[0-9].csv", "b/3.csv") && !matches("{a,b}/[!0-9].csv", "b/3.csv"));
        assert!(matches("a{,-b/c}.csv", "a.csv") && matches("a{,-b/c}.csv", "a-b/c.csv"));
        assert!(matches("a+b?.json", "a+bc.json") && matches("a\\b*", "a\\bc") && !matches("a.json", "abjson"));
        for wrong in ["a[", "{a", "[z-a]"] {
            assert!(compile(wrong).unwrap_err().message().starts_with(wrong));
        }
        assert!(is_pattern("a*") && !is_pattern("a-b.csv"));
    }
}

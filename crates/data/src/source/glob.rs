//! Finds the files that a pattern matches: `*`, `?`, `[abc]` and `{a,b}` within a name, and `**` for any folders.
//! Matches are sorted, so a pattern has the same rows in the same order everywhere.
use std::fs;
use std::path::{Component, Path, PathBuf};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::glob::{compile, is_pattern};

/// How many levels of folders `**` matches.
const MAX_DEPTH: usize = 32;

/// Replaces patterns among `paths` by the files that they match. Other paths stay as they are. `setting` names the
/// setting in errors. Braces cannot contain a `/`.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: a pattern matches no file, or is invalid.
pub fn expand(paths: &[PathBuf], setting: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        let text = path.to_string_lossy();
        if !is_pattern(&text) || path.exists() {
            files.push(path.clone());
            continue;
        }
        let mut found = Vec::new();
        let components: Vec<Component<'_>> = path.components().collect();
        walk(PathBuf::new(), &components, 0, &mut found)
            .map_err(|error| error.context(format!("{setting}: {text}")))?;
        if found.is_empty() {
            return Err(Error::data(format!("{setting}: no file matches {text}"))
                .hint("patterns are relative to the current directory; `**` goes through folders"));
        }
        found.sort();
        found.dedup();
        files.append(&mut found);
    }
    Ok(files)
}

fn walk(base: PathBuf, rest: &[Component<'_>], depth: usize, found: &mut Vec<PathBuf>) -> Result<()> {
    let Some((first, rest)) = rest.split_first() else {
        if base.is_file() {
            found.push(base);
        }
        return Ok(());
    };
    let name = first.as_os_str().to_string_lossy();
    if *first == Component::Normal("**".as_ref()) {
        walk(base.clone(), rest, depth, found)?;
        if depth < MAX_DEPTH {
            let folders = entries(&base).into_iter().filter(|(name, path)| !name.starts_with('.') && path.is_dir());
            // A symbolic link may lead to a parent folder.
            for (_, folder) in folders.filter(|(_, path)| !path.is_symlink()) {
                let again: Vec<Component<'_>> = std::iter::once(*first).chain(rest.iter().copied()).collect();
                walk(folder, &again, depth + 1, found)?;
            }
        }
        return Ok(());
    }
    if !is_pattern(&name) {
        return walk(base.join(first), rest, depth, found);
    }
    let pattern = compile(&name)?;
    for (entry, path) in entries(&base) {
        if pattern.is_match(&entry) && entry.starts_with('.') == name.starts_with('.') {
            walk(path, rest, depth, found)?;
        }
    }
    Ok(())
}

/// Names and paths of the entries of a folder; empty if it is not a folder.
fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let listed = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let Ok(entries) = fs::read_dir(listed) else { return Vec::new() };
    entries
        .flatten()
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), folder.join(entry.file_name())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_expanded_in_order_and_must_match() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b1.jsonl", "a2.jsonl", "a10.jsonl", "c.csv", ".hidden.jsonl", "deep/er/x.jsonl", "deep/y.jsonl"] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let expanded = |pattern: &str| -> Vec<String> {
            let files = expand(&[folder.path().join(pattern)], "data.train_path").unwrap();
            files.iter().map(|path| path.strip_prefix(folder.path()).unwrap().to_string_lossy().into_owned()).collect()
        };
        assert_eq!(expanded("*.jsonl"), ["a10.jsonl", "a2.jsonl", "b1.jsonl"]);
        assert_eq!(expanded("a?.jsonl"), ["a2.jsonl"]);
        assert_eq!(expanded("[!a-b]*.csv"), ["c.csv"]);
        assert_eq!(expanded("deep/**/*.jsonl"), ["deep/er/x.jsonl", "deep/y.jsonl"]);
        assert_eq!(expanded("{b1,a?}.jsonl"), ["a2.jsonl", "b1.jsonl"]);
        assert_eq!(expanded("{deep,gone}/y.jsonl"), ["deep/y.jsonl"]);
        assert_eq!(expanded("**/y.jsonl"), ["deep/y.jsonl"]);
        assert_eq!(expanded("plain-name.jsonl"), ["plain-name.jsonl"], "the reader says that it is not there");
        let error = expand(&[folder.path().join("*.parquet")], "data.train_path").unwrap_err();
        assert!(error.message().contains("*.parquet") && error.message().contains("data.train_path"), "{error}");
        for (wrong, what) in [("[*.jsonl", "character class"), ("{a,b/c}.jsonl", "{a,b is not a valid pattern")] {
            let error = expand(&[folder.path().join(wrong)], "data.train_path").unwrap_err();
            assert!(error.message().contains(what), "{error}");
        }
    }
}

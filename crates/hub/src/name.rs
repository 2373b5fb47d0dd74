//! Names on the hub: repositories, revisions, `hf://` paths, and safe paths inside a repository.
use std::fmt;
use std::path::Path;

use tunesmith_base::error::{Error, Result};

/// The kind of a repository; part of its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// A model or an adapter.
    Model,
    /// A data set; its pages lie under `datasets/owner/name`.
    Dataset,
}

/// A repository of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    /// Whether it is a model or a data set.
    pub kind: RepoKind,
    /// `owner/name`; old repositories have only a name.
    pub id: String,
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            RepoKind::Model => f.write_str(&self.id),
            RepoKind::Dataset => write!(f, "the data set {}", self.id),
        }
    }
}

impl Repo {
    /// Checks the form of the name.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`] where no repository can have this name.
    pub fn new(kind: RepoKind, id: &str) -> Result<Self> {
        let word = |word: &str| {
            (1..=96).contains(&word.len())
                && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
                && !word.starts_with(['.', '-'])
                && !word.ends_with(['.', '-'])
                && !word.contains("..")
                && !word.contains("--")
        };
        if id.split('/').count() <= 2 && id.split('/').all(word) {
            return Ok(Self { kind, id: id.to_owned() });
        }
        Err(Error::config(format!("{id:?} is no name of a repository on the hub")).hint("expected owner/name"))
    }

    /// The word for its kind in the hub's addresses.
    pub(super) const fn plural(&self) -> &'static str {
        match self.kind {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        }
    }

    /// Its folder in the cache.
    pub(super) fn folder(&self) -> String {
        format!("{}--{}", self.plural(), self.id.replace('/', "--"))
    }

    /// Its path on the hub's web pages.
    pub(super) fn page(&self) -> String {
        match self.kind {
            RepoKind::Model => self.id.clone(),
            RepoKind::Dataset => format!("datasets/{}", self.id),
        }
    }

    /// An error about it: of a model or of data.
    pub(super) fn error(&self, message: impl Into<String>) -> Error {
        match self.kind {
            RepoKind::Model => Error::model(message),
            RepoKind::Dataset => Error::data(message),
        }
    }
}

/// Whether a path inside a repository stays inside the folder that it is written to.
pub(super) fn is_safe_path(path: &str) -> bool {
    path.len() <= 1_024
        && !path.contains(['\\', ':'])
        && !path.chars().any(char::is_control)
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != ".." && part.len() <= 255)
}

/// Whether `revision` may name a branch, a tag or a commit.
pub(super) fn check_revision(revision: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
    if is_safe_path(revision) && revision.len() <= 255 && revision.chars().all(plain) {
        return Ok(());
    }
    Err(Error::config(format!("{revision:?} is no revision"))
        .hint("expected a branch, a tag or a commit, such as main"))
}

/// Whether `text` is a whole commit hash.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// A path such as `hf://datasets/owner/name@revision/data/rows.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubPath {
    /// The repository before the `@` or the path.
    pub repo: Repo,
    /// The revision, if one is named.
    pub revision: Option<String>,
    /// The file in it, or a pattern for several.
    pub path: String,
}

const SCHEME: &str = "hf://";

/// Whether a path is on the hub.
pub fn is_hub_path(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with(SCHEME))
}

impl HubPath {
    /// Parses a path; none if it is local.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: it begins with `hf://` and the rest is malformed.
    pub fn parse(path: &Path) -> Result<Option<Self>> {
        let Some(rest) = path.to_str().and_then(|text| text.strip_prefix(SCHEME)) else { return Ok(None) };
        let fail = || {
            Error::config(format!("{}: not a path of the hub", path.display()))
                .hint("expected hf://datasets/owner/name/file.jsonl, or hf://datasets/owner/name@revision/file.jsonl")
        };
        let (kind, rest) = match rest.strip_prefix("datasets/") {
            Some(rest) => (RepoKind::Dataset, rest),
            None => (RepoKind::Model, rest.strip_prefix("models/").unwrap_or(rest)),
        };
        let mut parts = rest.splitn(3, '/');
        let (Some(owner), Some(name), Some(inner)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(fail());
        };
        let (name, revision) = name.split_once('@').map_or((name, None), |(name, revision)| (name, Some(revision)));
        let revision = revision.map(|revision| match revision {
            "~parquet" => "refs/convert/parquet".to_owned(),
            other => other.replace("%2F", "/").replace("%2f", "/"),
        });
        revision.as_deref().map_or(Ok(()), check_revision)?;
        if !is_safe_path(inner) {
            return Err(fail());
        }
        let repo = Repo::new(kind, &format!("{owner}/{name}")).map_err(|_| fail())?;
        Ok(Some(Self { repo, revision, path: inner.to_owned() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_their_folder_are_seen() {
        for good in ["config.json", "data/train-00000-of-00001.parquet", "a b/ü.jsonl", "..a"] {
            assert!(is_safe_path(good), "{good}");
        }
        for bad in ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/", "", "a\\..\\b", "C:x", "a\0b"] {
            assert!(!is_safe_path(bad), "{bad:?}");
        }
    }

    #[test]
    fn names_have_the_form_of_the_hub() {
        for good in ["gpt2", "Qwen/Qwen3-0.6B", "a/b_c.d"] {
            assert!(Repo::new(RepoKind::Model, good).is_ok(), "{good}");
        }
        for bad in ["", "/", "a/", "a/b/c", "../b", "a/..", "a b/c", "a/b--c", "-a/b", "a/b."] {
            assert!(Repo::new(RepoKind::Model, bad).is_err(), "{bad:?}");
        }
        assert_eq!(Repo::new(RepoKind::Dataset, "a/b").unwrap().folder(), "datasets--a--b");
        assert!(check_revision("refs/pr/1").is_ok() && check_revision("../main").is_err());
        assert!(is_commit(&"a".repeat(40)) && !is_commit("main") && !is_commit(&"A".repeat(40)));
    }

    #[test]
    fn hub_paths_have_a_repository_a_revision_and_a_file() {
        let parse = |text: &str| HubPath::parse(Path::new(text));
        let path = parse("hf://datasets/o/n@v1/data/x.jsonl").unwrap().unwrap();
        assert_eq!((path.repo.kind, path.repo.id.as_str()), (RepoKind::Dataset, "o/n"));
        assert_eq!((path.revision.as_deref(), path.path.as_str()), (Some("v1"), "data/x.jsonl"));
        let converted = parse("hf://datasets/o/n@~parquet/default/train/*.parquet").unwrap().unwrap();
        assert_eq!(converted.revision.as_deref(), Some("refs/convert/parquet"));
        assert_eq!(parse("hf://o/n/rows.jsonl").unwrap().unwrap().repo.kind, RepoKind::Model);
        assert_eq!(parse("rows.jsonl").unwrap(), None);
        for bad in ["hf://datasets/o/n", "hf://datasets/o/n/../x", "hf://datasets/o/n@../x.jsonl", "hf://"] {
            assert_eq!(parse(bad).unwrap_err().kind(), tunesmith_base::Kind::Config, "{bad}");
        }
    }
}

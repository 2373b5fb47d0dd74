//! The cache on disk, in the layout that every Hugging Face tool shares: `blobs/<etag>`, `snapshots/<commit>/<path>`
//! (links to blobs), `refs/<revision>` (a commit). It also stores the file list of each commit, in
//! `.listings/<commit>.json`, so that later uses need no network.
use std::fs;
#[cfg(feature = "hub")]
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::name::{Repo, is_commit, is_safe_path};
#[cfg(feature = "hub")]
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
#[cfg(feature = "hub")]
use tunesmith_base::files::disk::{Disk as _, RealDisk};

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    /// Its path in the repository.
    pub path: String,
    pub size: u64,
}

/// The largest stored file list that is read, in bytes. Lists of accepted repositories are smaller.
const LISTING_BYTES: u64 = 64 << 20;

/// A repository's folder in the cache.
#[derive(Debug, Clone)]
pub(super) struct Store {
    folder: PathBuf,
    locks: PathBuf,
}

impl Store {
    pub fn new(cache: &Path, repo: &Repo) -> Self {
        Self { folder: cache.join(repo.folder()), locks: cache.join(".locks").join(repo.folder()) }
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The commit of `revision` when it was last looked up.
    pub fn read_ref(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned()).filter(|commit| self.snapshot(commit).is_dir());
        }
        let mut text = String::new();
        files::open_own(&self.folder.join("refs").join(revision)).ok()?.take(64).read_to_string(&mut text).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// The files of a commit: the stored list, or else those that the cache has.
    pub fn read_listing(&self, commit: &str) -> Option<Vec<Listed>> {
        let file = files::open_own(&self.listing(commit)).ok()?;
        let mut bytes = Vec::new();
        file.take(LISTING_BYTES).read_to_end(&mut bytes).ok()?;
        let pairs: Vec<(String, u64)> = serde_json::from_slice(&bytes).ok()?;
        // The cache may be shared, so a path from it must be as safe as one from the hub.
        let listed = pairs.into_iter().map(|(path, size)| is_safe_path(&path).then_some(Listed { path, size }));
        listed.collect()
    }

    /// The files of a commit in the cache, whichever tool downloaded them.
    pub fn present(&self, commit: &str) -> Vec<Listed> {
        fn walk(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<Listed>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let Ok(name) = entry.file_name().into_string() else { continue };
                let path = format!("{prefix}{name}");
                match fs::metadata(entry.path()) {
                    Ok(about) if about.is_dir() && depth > 0 => {
                        walk(&entry.path(), &format!("{path}/"), depth - 1, found);
                    }
                    Ok(about) if about.is_file() => found.push(Listed { path, size: about.len() }),
                    _ => {}
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.snapshot(commit), "", 16, &mut found);
        found.sort_by(|left, right| left.path.cmp(&right.path));
        found
    }

    fn listing(&self, commit: &str) -> PathBuf {
        self.folder.join(".listings").join(format!("{commit}.json"))
    }
}

#[cfg(feature = "hub")]
impl Store {
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    pub fn write_listing(&self, commit: &str, files: &[Listed]) -> Result<()> {
        let pairs: Vec<(&str, u64)> = files.iter().map(|file| (file.path.as_str(), file.size)).collect();
        write_whole(&self.listing(commit), &serde_json::json!(pairs).to_string())
    }

    pub fn write_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if is_commit(revision) { Ok(()) } else { write_whole(&self.folder.join("refs").join(revision), commit) }
    }

    /// Makes `path` of the snapshot a link to its blob. The caller holds the blob's [lock](Self::lock).
    pub fn link(&self, commit: &str, path: &str, etag: &str) -> Result<()> {
        let pointer = self.snapshot(commit).join(path);
        make_parent(&pointer)?;
        let up = "../".repeat(2 + path.split('/').count() - 1);
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        // Made under another name and then renamed over the old link, so that the link never is missing.
        let fresh = pointer.with_file_name(format!(".{etag}.link"));
        let _ = fs::remove_file(&fresh); // of a process that was killed
        std::os::unix::fs::symlink(&target, &fresh)
            .and_then(|()| RealDisk.rename(&fresh, &pointer))
            .map_err(|source| Error::io("link", &pointer, &source))
    }

    /// Waits until no other process downloads the blob, and locks it until the value is dropped. Calls `busy` once if
    /// it must wait.
    pub fn lock(&self, etag: &str, busy: impl FnOnce()) -> Result<File> {
        let path = self.locks.join(format!("{etag}.lock"));
        make_parent(&path)?;
        let file = files::open_to_write(&path, false).map_err(|source| Error::io("open", &path, &source))?;
        if file.try_lock().is_err() {
            busy();
            file.lock().map_err(|source| Error::io("lock", &path, &source))?;
        }
        Ok(file)
    }
}

#[cfg(feature = "hub")]
pub(super) fn make_parent(path: &Path) -> Result<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    fs::create_dir_all(parent).map_err(|source| {
        Error::io("create", parent, &source).hint("set HF_HUB_CACHE (or HF_HOME) to a folder that can be written to")
    })
}

/// Writes a small file atomically.
#[cfg(feature = "hub")]
fn write_whole(path: &Path, text: &str) -> Result<()> {
    make_parent(path)?;
    files::temporary::sweep(path);
    files::atomic::write(path, text.as_bytes()).map_err(|source| Error::io("write", path, &source))
}

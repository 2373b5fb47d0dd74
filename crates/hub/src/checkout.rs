//! One commit of a repository: which files it has, and how to download those that are needed.
use std::path::PathBuf;

#[cfg(feature = "hub")]
use super::name::is_commit;
use super::name::{Repo, check_revision};
use super::store::{Listed, Store};
use super::{Destination, Hub};
use tunesmith_base::error::{Error, Result};

/// A local folder with files of one commit of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The repository of the files.
    pub repo: Repo,
    /// The hash of the commit.
    pub commit: String,
    /// The local folder that holds the files.
    pub dir: PathBuf,
}

impl Snapshot {
    /// Repository and short commit: `owner/name@0123456789ab`.
    pub fn label(&self) -> String {
        format!("{}@{}", self.repo.id, &self.commit[..self.commit.len().min(12)])
    }
}

/// One commit of a repository, whose files can be listed and downloaded.
pub struct Checkout<'a> {
    hub: &'a Hub<'a>,
    repo: Repo,
    revision: String,
    commit: String,
    files: Vec<Listed>,
    place: Destination,
    store: Store,
    /// Why only the cache is used; `None` if the hub can be asked.
    cache_only: Option<String>,
}

impl Hub<'_> {
    /// Opens the repository at `revision` (by default `main`), as the hub has it now or, if the hub cannot be reached,
    /// as the cache has it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the name is not possible; [`tunesmith_base::Kind::Model`] or
    /// [`tunesmith_base::Kind::Data`]: the hub refuses the request or the file list; [`tunesmith_base::Kind::Io`]: the
    /// hub cannot be reached, and the cache has nothing.
    pub fn open(&self, repo: Repo, revision: Option<&str>, place: Destination) -> Result<Checkout<'_>> {
        let revision = revision.unwrap_or("main");
        check_revision(revision)?;
        if self.settings.offline {
            return self.cached(repo, revision, place, "HF_HUB_OFFLINE is set");
        }
        self.current(repo, revision, place)
    }

    #[cfg(not(feature = "hub"))]
    fn current(&self, repo: Repo, revision: &str, place: Destination) -> Result<Checkout<'_>> {
        self.cached(repo, revision, place, "this tunesmith was built without the feature `hub`, which downloads")
    }

    #[cfg(feature = "hub")]
    fn current(&self, repo: Repo, revision: &str, place: Destination) -> Result<Checkout<'_>> {
        let store = Store::new(&self.settings.cache, &repo);
        let known = store.read_ref(revision);
        if is_commit(revision)
            && let Some(files) = store.read_listing(revision)
        {
            let (commit, revision) = (revision.to_owned(), revision.to_owned());
            return Ok(Checkout { hub: self, repo, revision, commit, files, place, store, cache_only: None });
        }
        let mut settings = self.settings.clone();
        if known.is_some() {
            // The cache can replace a hub that is away, so a long wait has no reason.
            settings.pace.attempts = settings.pace.attempts.min(2);
        }
        let remote = super::remote::Remote::new(&settings, self.progress, &repo);
        let now = if is_commit(revision) { Ok(revision.to_owned()) } else { remote.commit(revision) };
        let commit = match now {
            Ok(commit) => commit,
            Err(failure) if failure.is_unreachable() && known.is_some() => {
                let why = failure.brief(&self.settings);
                self.progress.notice(&format!("{why}: using what the cache has of {repo}"));
                return self.cached(repo.clone(), revision, place, "the hub cannot be reached");
            }
            Err(failure) => return Err(remote.explain(failure, revision)),
        };
        let files = if let Some(files) = store.read_listing(&commit) {
            files
        } else {
            let files = remote.list(&commit).map_err(|failure| remote.explain(failure, revision))?;
            if place == Destination::Cache {
                // If the cache cannot be written to, all files may be there already.
                let _ = store.write_listing(&commit, &files);
            }
            files
        };
        drop(remote);
        let revision = revision.to_owned();
        Ok(Checkout { hub: self, repo, revision, commit, files, place, store, cache_only: None })
    }

    fn cached(&self, repo: Repo, revision: &str, place: Destination, why: &str) -> Result<Checkout<'_>> {
        let store = Store::new(&self.settings.cache, &repo);
        if place != Destination::Cache {
            return Err(Error::config(format!("{repo} cannot be put into a folder: {why}"))
                .hint("without the hub only the cache can be used; leave out --dir"));
        }
        let Some(commit) = store.read_ref(revision) else {
            let cache = self.settings.cache.display();
            return Err(repo.error(format!("{repo} at {revision} is not in the cache {cache}, and {why}")).hint(
                format!(
                    "fetch it where there is a network: tunesmith download {}{}; or name a local folder or file instead",
                    repo.id,
                    if repo.kind == super::RepoKind::Dataset { " --dataset" } else { "" }
                ),
            ));
        };
        let files = store.read_listing(&commit).unwrap_or_else(|| store.present(&commit));
        let (revision, cache_only) = (revision.to_owned(), Some(why.to_owned()));
        Ok(Checkout { hub: self, repo, revision, commit, files, place, store, cache_only })
    }
}

impl Checkout<'_> {
    pub fn repo(&self) -> &Repo {
        &self.repo
    }

    /// The paths of its files.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|file| file.path.as_str())
    }

    /// Whether it has a file with this path.
    pub fn has(&self, path: &str) -> bool {
        self.paths().any(|found| found == path)
    }

    /// The size of one of its files.
    pub(super) fn size(&self, path: &str) -> u64 {
        self.files.iter().find(|file| file.path == path).map_or(0, |file| file.size)
    }

    /// The local path of one of its files, once downloaded.
    pub fn path(&self, path: &str) -> PathBuf {
        self.dir().join(path)
    }

    fn dir(&self) -> PathBuf {
        match &self.place {
            Destination::Cache => self.store.snapshot(&self.commit),
            Destination::Folder(folder) => folder.clone(),
        }
    }

    /// Downloads those of its files that are not in place yet.
    ///
    /// # Errors
    /// The errors of the hub and of the disk; if the hub cannot be reached, [`tunesmith_base::Kind::Model`] or
    /// [`tunesmith_base::Kind::Data`] for a file that the cache lacks.
    pub fn fetch(&self, paths: &[&str]) -> Result<()> {
        let is_missing = |file: &&Listed| self.place != Destination::Cache || !self.path(&file.path).is_file();
        let wanted = |file: &&Listed| paths.contains(&file.path.as_str());
        let missing: Vec<&Listed> = self.files.iter().filter(wanted).filter(is_missing).collect();
        if let (Some(why), Some(first)) = (&self.cache_only, missing.first()) {
            let message = format!("the cache lacks {} of {} at {}, and {why}", first.path, self.repo, self.revision);
            return Err(self.repo.error(message).hint("fetch it where there is a network: tunesmith download"));
        }
        if missing.is_empty() { Ok(()) } else { self.download(&missing) }
    }

    #[cfg(not(feature = "hub"))]
    fn download(&self, _missing: &[&Listed]) -> Result<()> {
        Err(Error::config("this tunesmith was built without the feature `hub`, which downloads"))
    }

    /// Downloads several files at a time. After a failure, the other threads stop after their current file.
    #[cfg(feature = "hub")]
    fn download(&self, missing: &[&Listed]) -> Result<()> {
        use std::sync::{Mutex, PoisonError};
        const WORKERS: usize = 4;
        let (settings, progress) = (&self.hub.settings, self.hub.progress);
        let total = missing.iter().map(|file| file.size).sum();
        let count = match missing {
            [file] => file.path.clone(),
            files => format!("{} files", files.len()),
        };
        progress.begin(&format!("downloading {count} of {}", self.repo), total);
        let queue = Mutex::new(missing.iter());
        let failed: Mutex<Option<Error>> = Mutex::new(None);
        let work = || {
            let carrier = super::transfer::Downloader::new(settings, progress, &self.repo, &self.commit)
                .map_err(|failure| failure.into_error(settings, &self.repo, &self.revision, "the files"))?;
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let ended = failed.lock().unwrap_or_else(PoisonError::into_inner).is_some();
                match next {
                    Some(file) if !ended => carrier.fetch(file, &self.store, &self.place)?,
                    _ => return Ok(()),
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..WORKERS.min(missing.len()) {
                scope.spawn(|| {
                    if let Err(error) = work() {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                });
            }
        });
        progress.end();
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Records in the cache that the revision is this commit, after the needed files have been downloaded.
    pub fn snapshot(&self) -> Snapshot {
        #[cfg(feature = "hub")]
        if self.cache_only.is_none() && self.place == Destination::Cache {
            // If this cannot be written, the files are still usable now.
            let _ = self.store.write_ref(&self.revision, &self.commit);
        }
        Snapshot { repo: self.repo.clone(), commit: self.commit.clone(), dir: self.dir() }
    }
}

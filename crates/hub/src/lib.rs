//! Gets models and data sets from the Hugging Face Hub by name, into the cache that every Hugging Face tool shares; and
//! uploads models.
//!
//! ```text
//! settings (endpoint, cache, token, offline)  name (owner/name, hf://…)
//!   -> checkout (a repository at a commit: remote listing, or what the cache knows)
//!   -> models, datasets (which of its files are needed) -> transfer (one file, resumed, verified) -> store (the cache)
//! settings, name -> upload (a folder's files, one commit)
//! address, proxy -> client (every request to the hub)
//! public_address -> web (files of addresses that rows name, from public hosts)
//! ```
//!
//! Without the cargo feature `hub`, only the cache can be used, and nothing is downloaded.
#![cfg_attr(
    not(feature = "hub"),
    allow(dead_code, clippy::unused_self, reason = "what only downloads need stands idle")
)]
#[cfg(feature = "hub")]
mod address;
#[cfg(feature = "hub")]
mod base64;
mod checkout;
#[cfg(feature = "hub")]
mod client;
mod datasets;
#[cfg(feature = "hub")]
mod digest;
#[cfg(feature = "hub")]
mod failure;
mod models;
mod name;
#[cfg(feature = "hub")]
mod proxy;
#[cfg(feature = "hub")]
mod public_address;
#[cfg(feature = "hub")]
mod remote;
mod settings;
mod store;
#[cfg(feature = "hub")]
mod transfer;
#[cfg(feature = "hub")]
mod upload;
#[cfg(feature = "hub")]
mod web;
#[cfg(not(feature = "hub"))]
#[path = "no_web.rs"]
mod web;

pub use checkout::Snapshot;
pub use datasets::choose;
pub use models::Part;
pub use name::{Repo, RepoKind};
pub use settings::{HubSettings, HubToken, RetryPolicy, offline};
pub use web::{WebClient, WebFailure};

use std::path::{Path, PathBuf};

use name::{HubPath, is_hub_path};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{DataConfig, ModelConfig, is_hub_name};

/// Receives the progress of downloads; called from several threads.
pub trait DownloadProgress: Sync {
    /// A download of `total` bytes has begun.
    fn begin(&self, what: &str, total: u64);
    /// `by` more bytes of it have arrived.
    fn advance(&self, by: u64);
    /// The download has ended, successfully or not.
    fn end(&self);
    /// Shows a message to the user.
    fn notice(&self, text: &str);
}

/// Ignores the progress of downloads.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl DownloadProgress for NoProgress {
    fn begin(&self, _what: &str, _total: u64) {}
    fn advance(&self, _by: u64) {}
    fn end(&self) {}
    fn notice(&self, _text: &str) {}
}

/// The destination of downloaded files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// The cache that every Hugging Face tool shares (`HF_HUB_CACHE`).
    Cache,
    /// A folder of the user's. Files have the same paths there as in the repository.
    Folder(PathBuf),
}

/// The result of an upload.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pushed {
    /// The hash of the new commit.
    pub commit: String,
    /// The address of the repository's page.
    pub address: String,
    /// The number of files in the commit.
    pub sent: usize,
}

/// The entry point: the Hugging Face Hub with the settings of this machine.
pub struct Hub<'a> {
    settings: HubSettings,
    progress: &'a dyn DownloadProgress,
}

impl<'a> Hub<'a> {
    /// Uses explicit settings, for tests and other endpoints.
    pub fn new(settings: HubSettings, progress: &'a dyn DownloadProgress) -> Self {
        static WARNED: std::sync::Once = std::sync::Once::new();
        if let Some(token) = settings.token.as_ref().filter(|token| token.is_open) {
            let file = &token.source;
            WARNED
                .call_once(|| progress.notice(&format!("other users can read the token in {file}: chmod 600 {file}")));
        }
        Self { settings, progress }
    }

    /// Uses the settings of the environment.
    ///
    /// # Errors
    /// Those of [`HubSettings::from_env`].
    pub fn from_env(progress: &'a dyn DownloadProgress) -> Result<Self> {
        Ok(Self::new(HubSettings::from_env()?, progress))
    }

    /// Downloads the files of a data set and returns their local paths. `config` and `split` (by default `train`) are
    /// names that the repository defines.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: there is no such data set, or no such part of it; the message lists the existing
    /// ones; [`tunesmith_base::Kind::Io`]: the hub cannot be reached.
    pub fn dataset(
        &self,
        name: &str,
        config: Option<&str>,
        split: Option<&str>,
        revision: Option<&str>,
    ) -> Result<Vec<PathBuf>> {
        Ok(self.dataset_at(name, config, split, revision, Destination::Cache)?.1)
    }

    /// As [`Hub::dataset`], but downloads to `place`, and also returns the snapshot that the files belong to.
    ///
    /// # Errors
    /// As [`Hub::dataset`].
    pub fn dataset_at(
        &self,
        name: &str,
        config: Option<&str>,
        split: Option<&str>,
        revision: Option<&str>,
        place: Destination,
    ) -> Result<(Snapshot, Vec<PathBuf>)> {
        let checkout = self.open(Repo::new(RepoKind::Dataset, name)?, revision, place)?;
        let files = datasets::fetch(&checkout, config, split)?;
        Ok((checkout.snapshot(), files))
    }

    /// Uploads `files` (path in the repository, local path) to the model repository `name` in one commit with this
    /// message. A missing repository is created.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the name is not possible, the hub must not be used, or there is no token;
    /// [`tunesmith_base::Kind::Model`]: the hub refuses; [`tunesmith_base::Kind::Io`]: the hub cannot be reached, or a
    /// file cannot be read.
    pub fn push(&self, name: &str, files: &[(String, PathBuf)], private: bool, message: &str) -> Result<Pushed> {
        let repo = Repo::new(RepoKind::Model, name)?;
        if !name.contains('/') {
            return Err(Error::config(format!("--push {name}: expected owner/name")));
        }
        if self.settings.offline {
            return Err(Error::config(format!("push to {repo}: HF_HUB_OFFLINE is set")).hint("unset it, or --dry-run"));
        }
        if self.settings.token.is_none() {
            let host = self.settings.shown_endpoint();
            return Err(Error::config(format!("push to {repo}: there is no token"))
                .hint(format!("set HF_TOKEN to one with the role `write` from {host}/settings/tokens")));
        }
        self.send(&repo, files, private, message)
    }

    #[cfg(feature = "hub")]
    fn send(&self, repo: &Repo, files: &[(String, PathBuf)], private: bool, message: &str) -> Result<Pushed> {
        if files.is_empty() {
            // Without files, the call only checks whether the upload would be possible.
            return Ok(Pushed::default());
        }
        upload::Uploader::new(&self.settings, self.progress, repo).push(files, private, message)
    }

    #[cfg(not(feature = "hub"))]
    fn send(&self, _: &Repo, _: &[(String, PathBuf)], _: bool, _: &str) -> Result<Pushed> {
        Err(Error::config("this tunesmith was built without the feature `hub`, which uploads"))
    }

    /// Downloads the files of each `hf://…` among `paths`, and replaces it by their local paths.
    ///
    /// # Errors
    /// As [`Hub::dataset`].
    pub fn local_paths(&self, paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
        let mut local = Vec::new();
        for path in paths {
            match HubPath::parse(path)? {
                None => local.push(path.clone()),
                Some(remote) => {
                    let checkout = self.open(remote.repo, remote.revision.as_deref(), Destination::Cache)?;
                    local.extend(datasets::fetch_matching(&checkout, &remote.path)?);
                }
            }
        }
        Ok(local)
    }
}

/// Downloads the files of a data set into the cache, with the settings of the environment; see [`Hub::dataset`].
///
/// # Errors
/// Those of [`Hub::dataset`].
fn dataset_files(
    name: &str,
    config: Option<&str>,
    split: Option<&str>,
    revision: Option<&str>,
    progress: &dyn DownloadProgress,
) -> Result<Vec<PathBuf>> {
    Hub::from_env(progress)?.dataset(name, config, split, revision)
}

/// A local folder with a model, and where on the hub it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelDir {
    /// A folder on this machine.
    pub dir: PathBuf,
    /// The commit that the files belong to; `None` for a folder of the user's.
    pub snapshot: Option<Snapshot>,
}

/// The model's folder: `model.local_dir`, `model.name` if that is a folder, or else the repository of that name on the
/// hub, of which `part` is downloaded.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`] when there is no such folder or repository; those of the hub.
pub fn model_dir(model: &ModelConfig, part: Part, progress: &dyn DownloadProgress) -> Result<ModelDir> {
    match (&model.local_dir, &model.name) {
        (None, Some(name)) if is_hub_name(name) => {
            let revision = model.revision.as_deref();
            let snapshot = Hub::from_env(progress)?
                .model(name, revision, part, Destination::Cache)
                .map_err(|error| error.context(format!("model.name: {name} is no folder here, and on the hub")))?;
            Ok(ModelDir { dir: snapshot.dir.clone(), snapshot: Some(snapshot) })
        }
        _ => {
            let dir = model.dir()?;
            if model.revision.as_deref().is_some_and(|revision| revision != "main") {
                return Err(Error::config(format!(
                    "model.revision is set, but the model is the folder {}",
                    dir.display()
                ))
                .hint("a folder has no revisions; remove the key, or give model.name as owner/name"));
            }
            Ok(ModelDir { dir, snapshot: None })
        }
    }
}

/// Downloads the files of each `hf://…` among the paths of `data`, and of each source of `data.datasets` with a `name`,
/// and sets their local paths.
///
/// # Errors
/// Those of [`Hub::local_paths`].
pub fn fetch_paths(data: &mut DataConfig, progress: &dyn DownloadProgress) -> Result<()> {
    for paths in [&mut data.train_path, &mut data.val_path, &mut data.test_path] {
        if paths.iter().any(|path| is_hub_path(path)) {
            *paths = Hub::from_env(progress)?.local_paths(paths)?;
        }
    }
    for spec in &mut data.datasets {
        if let Some(name) = &spec.name {
            let (config, split) = (spec.config.as_deref(), spec.split.as_deref());
            spec.path = dataset_files(name, config, split, spec.revision.as_deref(), progress)?;
        } else if spec.path.iter().any(|path| is_hub_path(path)) {
            spec.path = Hub::from_env(progress)?.local_paths(&spec.path)?;
        }
    }
    Ok(())
}

/// The adapter's folder: `named` itself if it is a folder, or else the repository `owner/name[@revision]` on the hub.
///
/// # Errors
/// Those of the hub.
pub fn adapter_dir(named: &Path, progress: &dyn DownloadProgress) -> Result<PathBuf> {
    let Some(text) = named.to_str().filter(|_| !named.exists()) else { return Ok(named.to_owned()) };
    let (name, revision) = text.split_once('@').map_or((text, None), |(name, revision)| (name, Some(revision)));
    if !is_hub_name(name) {
        return Ok(named.to_owned());
    }
    let found = Hub::from_env(progress)?.adapter(name, revision);
    Ok(found.map_err(|error| error.context(format!("tuning.adapter: {text} is no folder here, and on the hub")))?.dir)
}

#[cfg(all(test, not(feature = "hub")))]
mod tests {
    use super::*;

    #[test]
    fn without_the_feature_one_line_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap().to_owned();
        let settings = HubSettings::from(&|name| (name == "HF_HOME").then(|| home.clone())).unwrap();
        let error =
            Hub::new(settings, &NoProgress).model("owner/name", None, Part::Whole, Destination::Cache).unwrap_err();
        assert!(error.message().contains("built without the feature `hub`"), "{error}");
    }
}

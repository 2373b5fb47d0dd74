//! What hf-hub is asked: which commit a revision is, which files it has, which revisions there are.
use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFClientSync, HFRepositorySync, RepoType, RepoTypeDataset, RepoTypeModel, split_id};

use super::failure::{Failure, Refused, patiently};
use super::name::{Kind, Repo, is_commit, is_safe_path};
use super::settings::Settings;
use super::store::Listed;
use super::{Watch, transfer};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::nearest;

/// More files than a repository that is used here has.
const MAX_FILES: usize = 50_000;

/// The hub's interface for one repository.
pub(super) struct Remote<'a> {
    settings: &'a Settings,
    watch: &'a dyn Watch,
    repo: &'a Repo,
    handle: Handle,
}

enum Handle {
    Model(HFRepositorySync<RepoTypeModel>),
    Dataset(HFRepositorySync<RepoTypeDataset>),
}

impl<'a> Remote<'a> {
    pub fn new(settings: &'a Settings, watch: &'a dyn Watch, repo: &'a Repo) -> Result<Self> {
        let failed = |error: hf_hub::HFError| Failure::from(error).into_error(settings, repo, "main", "the files");
        let client =
            transfer::client(settings, true).map_err(|error| error.into_error(settings, repo, "main", "the files"))?;
        // Retries are made here, where the hub's own wish for a pause is heard.
        let mut builder = HFClient::builder()
            .endpoint(&settings.endpoint)
            .cache_dir(&settings.cache)
            .client(client)
            .retry_max_attempts(0);
        if let Some(token) = &settings.token {
            builder = builder.token(token.secret());
        }
        let client: HFClientSync = builder.build_sync().map_err(failed)?;
        let (owner, name) = split_id(&repo.id);
        let handle = match repo.kind {
            Kind::Model => Handle::Model(client.model(owner, name)),
            Kind::Dataset => Handle::Dataset(client.dataset(owner, name)),
        };
        Ok(Self { settings, watch, repo, handle })
    }

    /// The commit that `revision` is now.
    pub fn commit(&self, revision: &str) -> Result<String, Failure> {
        let only = || Some(vec!["sha".to_owned()]);
        let found = patiently(self.settings, self.watch, || {
            Ok(match &self.handle {
                Handle::Model(repo) => repo.info().revision(revision).maybe_expand(only()).send()?.sha,
                Handle::Dataset(repo) => repo.info().revision(revision).maybe_expand(only()).send()?.sha,
            })
        })?;
        match found {
            Some(commit) if is_commit(&commit) => Ok(commit),
            Some(other) => Err(Failure::Odd(format!("{other:?} as the commit of {revision}"))),
            None => Err(Failure::Odd(format!("no commit of {revision}"))),
        }
    }

    /// The files at a commit.
    pub fn list(&self, commit: &str) -> Result<Vec<Listed>, Failure> {
        let entries = patiently(self.settings, self.watch, || match &self.handle {
            Handle::Model(repo) => tree(repo, commit),
            Handle::Dataset(repo) => tree(repo, commit),
        })?;
        let repo = self.repo;
        if entries.len() > MAX_FILES {
            let message = format!("{repo} has more than {MAX_FILES} files; that is taken for a mistake");
            return Err(Failure::Here(
                repo.error(message).hint("download the files in another way and name their folder"),
            ));
        }
        let mut files = Vec::new();
        for entry in entries {
            let RepoTreeEntry::File { path, size, .. } = entry else { continue };
            if !is_safe_path(&path) {
                let message = format!("{repo} lists a file {path:?}, which would be written outside of its folder");
                return Err(Failure::Here(repo.error(message).hint("nothing of this repository was downloaded")));
            }
            files.push(Listed { path, size });
        }
        Ok(files)
    }

    /// The error for a revision that cannot be had, with the nearest one that there is.
    pub fn explain(&self, failure: Failure, revision: &str) -> Error {
        let not_found = matches!(&failure, Failure::Status(Refused { status: 404, .. }));
        let error = failure.into_error(self.settings, self.repo, revision, "the files");
        let refs = match &self.handle {
            _ if !not_found || is_commit(revision) => return error,
            Handle::Model(repo) => repo.list_refs().send(),
            Handle::Dataset(repo) => repo.list_refs().send(),
        };
        let Ok(refs) = refs else { return error };
        let names: Vec<String> = refs.branches.into_iter().chain(refs.tags).map(|found| found.name).collect();
        let hint = match nearest(revision, names.iter().map(String::as_str)) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("there are: {}", names.iter().take(20).map(String::as_str).collect::<Vec<_>>().join(", ")),
        };
        self.repo.error(format!("{} has no revision {revision}", self.repo)).hint(self.settings.clean(&hint))
    }
}

fn tree<T: RepoType>(repo: &HFRepositorySync<T>, commit: &str) -> Result<Vec<RepoTreeEntry>, Failure> {
    Ok(repo.list_tree().revision(commit).recursive(true).limit(MAX_FILES + 1).send()?)
}

//! Asks the hub about a repository: the commit of a revision, its files, and the revisions that exist.
use hf_hub::api::sync::ApiRepo;
use serde::Deserialize;
use ureq::http::header::LINK;
use ureq::http::{HeaderMap, Method};

use super::DownloadProgress;
use super::address::joined;
use super::client::{self, HubClient, HubRequest};
use super::failure::{Failure, Refused, with_retries};
use super::name::{Repo, is_commit, is_safe_path};
use super::settings::HubSettings;
use super::store::Listed;
use tunesmith_base::error::Error;
use tunesmith_config::nearest;

/// The most files that a repository may have.
const MAX_FILES: usize = 50_000;

/// The hub's interface for one repository.
pub(super) struct Remote<'a> {
    settings: &'a HubSettings,
    progress: &'a dyn DownloadProgress,
    repo: &'a Repo,
    client: HubClient<'a>,
}

#[derive(Deserialize)]
struct Info {
    sha: Option<String>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
}

#[derive(Deserialize)]
struct Refs {
    #[serde(default)]
    branches: Vec<Named>,
    #[serde(default)]
    tags: Vec<Named>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

impl<'a> Remote<'a> {
    pub fn new(settings: &'a HubSettings, progress: &'a dyn DownloadProgress, repo: &'a Repo) -> Self {
        Self { settings, progress, repo, client: HubClient::new(settings) }
    }

    /// The current commit of `revision`.
    pub fn commit(&self, revision: &str) -> Result<String, Failure> {
        let api: ApiRepo = self.client.api(self.repo, revision)?;
        let info: Info = with_retries(self.settings, self.progress, || {
            // hf-hub's own `info` also requires the list of files, and does not tell one error status from another.
            client::json(self.client.carry(api.info_request().query("expand", "sha"))?)
        })?;
        match info.sha {
            Some(commit) if is_commit(&commit) => Ok(commit),
            Some(other) => Err(Failure::InvalidAnswer(format!("{other:?} as the commit of {revision}").into())),
            None => Err(Failure::InvalidAnswer(format!("no commit of {revision}").into())),
        }
    }

    /// The files at a commit.
    pub fn list(&self, commit: &str) -> Result<Vec<Listed>, Failure> {
        let repo = self.repo;
        let (mut files, mut count) = (Vec::new(), 0);
        let mut page = Some(self.api(&format!("tree/{commit}?recursive=true")));
        while let Some(url) = page {
            let (entries, next) = with_retries(self.settings, self.progress, || self.page(&url))?;
            // An empty page counts as one file, so that the loop ends.
            count += entries.len().max(1);
            if count > MAX_FILES {
                let message = format!("{repo} has more than {MAX_FILES} files; that is taken for a mistake");
                return Err(Failure::Local(
                    repo.error(message).hint("download the files in another way and name their folder"),
                ));
            }
            for Entry { kind, path, size } in entries {
                if kind != "file" {
                    continue;
                }
                if !is_safe_path(&path) {
                    let message = format!("{repo} lists a file {path:?}, which would be written outside of its folder");
                    return Err(Failure::Local(repo.error(message).hint("nothing of this repository was downloaded")));
                }
                files.push(Listed { path, size });
            }
            page = next;
        }
        Ok(files)
    }

    /// A page of a listing, and the address of the next one.
    fn page(&self, url: &str) -> Result<(Vec<Entry>, Option<String>), Failure> {
        let answer = self.client.send(self.client.signed(HubRequest::new(Method::GET, url)))?;
        let next = next_page(answer.headers()).and_then(|next| joined(url, next.as_bytes()));
        Ok((client::json(answer)?, next))
    }

    /// The error for a missing revision, with the nearest existing one.
    pub fn explain(&self, failure: Failure, revision: &str) -> Error {
        let not_found = matches!(&failure, Failure::Status(Refused { status: 404, .. }));
        let error = failure.into_error(self.settings, self.repo, revision, "the files");
        if !not_found || is_commit(revision) {
            return error;
        }
        let ask = self.client.signed(HubRequest::new(Method::GET, self.api("refs")));
        let Ok(refs) = self.client.send(ask).and_then(client::json::<Refs>) else { return error };
        let names: Vec<String> = refs.branches.into_iter().chain(refs.tags).map(|found| found.name).collect();
        let hint = match nearest(revision, names.iter().map(String::as_str)) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("there are: {}", names.iter().take(20).map(String::as_str).collect::<Vec<_>>().join(", ")),
        };
        self.repo.error(format!("{} has no revision {revision}", self.repo)).hint(self.settings.clean(&hint))
    }

    fn api(&self, what: &str) -> String {
        format!("{}/api/{}/{}/{what}", self.client.endpoint(), self.repo.plural(), self.repo.id)
    }
}

/// The address with `rel="next"` in `Link`.
fn next_page(headers: &HeaderMap) -> Option<String> {
    let link = headers.get(LINK)?.to_str().ok()?;
    let before = &link[..link.find("rel=\"next\"")?];
    Some(before[before.rfind('<')? + 1..].split_once('>')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_that_of_the_header() {
        let next = |link: &str| {
            let headers = HeaderMap::from_iter([(LINK, link.parse().unwrap())]);
            next_page(&headers)
        };
        assert_eq!(next("<https://h/a?cursor=x>; rel=\"next\"").as_deref(), Some("https://h/a?cursor=x"));
        assert_eq!(next("</a>; rel=\"prev\", </b>; rel=\"next\"").as_deref(), Some("/b"));
        for none in ["", "</a>; rel=\"prev\"", "rel=\"next\"", "<a rel=\"next\""] {
            assert_eq!(next(none), None, "{none}");
        }
    }
}

//! Failed requests to the hub: which of them to repeat, and what to tell the user.
use std::time::Duration;

use super::name::{Repo, RepoKind};
use super::settings::HubSettings;
use super::{DownloadProgress, RetryPolicy};
use tunesmith_base::error::Error;

#[derive(Debug)]
pub(super) enum Failure {
    /// The hub answered with an error status.
    Status(Refused),
    /// There was no connection, or it broke.
    Network(Cause),
    /// The response is malformed.
    InvalidAnswer(Cause),
    /// A local failure, such as a full disk.
    Local(Error),
}

/// The description of a failure, and the underlying error if there is one.
#[derive(Debug, Default)]
pub(super) struct Cause {
    pub text: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Cause {
    pub fn of(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self { text: error.to_string(), source: Some(Box::new(error)) }
    }

    /// `error` with this cause as its `source()`.
    pub fn attach(self, error: Error) -> Error {
        match self.source {
            Some(source) => error.with_source(source),
            None => error,
        }
    }
}

impl<T: Into<String>> From<T> for Cause {
    fn from(text: T) -> Self {
        Self { text: text.into(), source: None }
    }
}

/// A response with an error status.
#[derive(Debug, Default)]
pub(super) struct Refused {
    pub status: u16,
    /// The header `X-Error-Code`, such as `GatedRepo`.
    pub code: Option<String>,
    /// The hub's explanation: the header `X-Error-Message`, or the field `error` of the response.
    pub words: Option<String>,
    /// How long the hub asks the client to wait, from `Retry-After`.
    pub retry_after: Option<Duration>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Local(error)
    }
}

impl From<ureq::Error> for Failure {
    fn from(error: ureq::Error) -> Self {
        use ureq::Timeout;
        match error {
            // The address of a redirect is signed, so it must not get into a message.
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => Self::InvalidAnswer("an address that is none".into()),
            ureq::Error::BodyExceedsLimit(limit) => Self::InvalidAnswer(format!("more than {limit} bytes").into()),
            ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => {
                Self::Network("no connection was made in time".into())
            }
            ureq::Error::Timeout(_) => Self::Network("the connection fell silent".into()),
            ureq::Error::Io(source) => Self::Network(Cause::of(source)),
            ureq::Error::ConnectProxyFailed(why) => Self::Network(format!("the proxy refuses: {why}").into()),
            other => Self::Network(Cause::of(other)),
        }
    }
}

impl Failure {
    /// Whether the same request may succeed later.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Status(refused) => matches!(refused.status, 408 | 429 | 500 | 502 | 503 | 504),
            Self::Network(_) => true,
            Self::InvalidAnswer(_) | Self::Local(_) => false,
        }
    }

    /// Whether the hub cannot be reached, so that the cache may be used instead.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::Status(refused) => matches!(refused.status, 500 | 502 | 503 | 504),
            Self::Network(_) => true,
            Self::InvalidAnswer(_) | Self::Local(_) => false,
        }
    }

    /// The failure in a few words, for a notice before the next attempt.
    pub fn brief(&self, settings: &HubSettings) -> String {
        match self {
            Self::Status(Refused { status: 429, .. }) => "the hub was asked too often (429)".to_owned(),
            Self::Status(refused) => format!("the hub answered with status {}", refused.status),
            Self::Network(cause) => format!("the hub cannot be reached: {}", settings.clean(&cause.text)),
            Self::InvalidAnswer(cause) => settings.clean(&cause.text),
            Self::Local(error) => error.message().to_owned(),
        }
    }

    /// The error for the user, about `what` was requested of `repo` at `revision`.
    pub fn into_error(self, settings: &HubSettings, repo: &Repo, revision: &str, what: &str) -> Error {
        let host = settings.shown_endpoint();
        let about = format!("{what} of {repo} at {revision}");
        match self {
            Self::Local(error) => error,
            Self::Status(refused) => refused.into_error(settings, repo, revision, &about),
            Self::InvalidAnswer(cause) => {
                let text = settings.clean(&cause.text);
                let error = repo.error(format!("{about}: {host} gave an answer that makes no sense: {text}"));
                cause.attach(error.hint("check HF_ENDPOINT; a proxy may answer in the hub's place"))
            }
            Self::Network(cause) => {
                let local = match repo.kind {
                    RepoKind::Model => "model.name may be a folder on this machine",
                    RepoKind::Dataset => "data.train_path may be a file on this machine",
                };
                let message = format!("{about}: the hub ({host}) cannot be reached: {}", settings.clean(&cause.text));
                cause.attach(Error::new(tunesmith_base::Kind::Io, message).hint(format!(
                    "check the network, the proxy and HF_ENDPOINT, and run it again: what has arrived is kept; without a \
                     network HF_HUB_OFFLINE=1 takes what is in the cache, and {local}"
                )))
            }
        }
    }
}

impl Refused {
    fn into_error(self, settings: &HubSettings, repo: &Repo, revision: &str, about: &str) -> Error {
        let (host, page) = (settings.shown_endpoint(), repo.page());
        let words = self.words.as_deref().map(|words| settings.clean(words)).filter(|words| !words.is_empty());
        let said = words.map_or_else(String::new, |words| format!(": {words}"));
        let sent = match &settings.token {
            Some(token) => format!("the token from {} was sent", token.source),
            None => "no token was sent".to_owned(),
        };
        let create = format!("HF_TOKEN to a token from {host}/settings/tokens");
        let code = self.code.as_deref().unwrap_or_default();
        let gated = code == "GatedRepo" || said.to_lowercase().contains("gated");
        match self.status {
            401 | 403 if gated => {
                let then = match &settings.token {
                    Some(_) => "with the account of that token; some owners take days to agree".to_owned(),
                    None => format!("while logged in, and set {create} of that account"),
                };
                repo.error(format!("{about}: access is gated, and not granted ({sent}){said}"))
                    .hint(format!("accept the licence at {host}/{page} {then}"))
            }
            401 if settings.token.is_some() => repo
                .error(format!("{about}: not allowed (401; {sent}){said}"))
                .hint(format!("the token is wrong or has expired, or the repository does not exist; set {create}")),
            401 => repo
                .error(format!("{about}: there is no such repository, or it is private (401; {sent}){said}"))
                .hint(format!("check the name at {host}/{page}; for a private one set {create}")),
            403 => repo
                .error(format!("{about}: not allowed (403; {sent}){said}"))
                .hint(format!("open {host}/{page} and accept its licence, or set {create} that may read it")),
            404 if code == "RevisionNotFound" => repo
                .error(format!("{about}: there is no revision {revision}{said}"))
                .hint(format!("branches and tags are listed at {host}/{page}/tree/main")),
            404 if code == "EntryNotFound" => {
                repo.error(format!("{about}: not there{said}")).hint(format!("see {host}/{page}/tree/{revision}"))
            }
            404 => {
                let other = match repo.kind {
                    RepoKind::Model => "a data set is not a model",
                    RepoKind::Dataset => "a model is not a data set",
                };
                let token =
                    if settings.token.is_some() { String::new() } else { format!("; if it is private, set {create}") };
                repo.error(format!("{about}: the hub has no such repository or revision (404){said}"))
                    .hint(format!("check the name at {host}/{page} ({other}){token}"))
            }
            429 => {
                let pause =
                    self.retry_after.map_or_else(String::new, |time| format!("; it asks to wait {} s", time.as_secs()));
                repo.error(format!("{about}: the hub was asked too often (429){pause}{said}")).hint(format!(
                    "run it again later: what has arrived is kept; with {create} more requests are allowed ({sent})"
                ))
            }
            status => Error::new(
                tunesmith_base::Kind::Io,
                format!("{about}: the hub answered with status {status}{said}"),
            )
            .hint("run it again later: what has arrived is kept; https://status.huggingface.co says how the hub is"),
        }
    }
}

/// How long to wait after the `count`-th failure in a row before the next attempt; `None` to give up.
pub(super) fn pause(failure: &Failure, pace: &RetryPolicy, count: u32) -> Option<Duration> {
    if !failure.is_passing() || count >= pace.attempts {
        return None;
    }
    let asked = match failure {
        Failure::Status(refused) => refused.retry_after,
        _ => None,
    };
    let doubled = pace.first_pause.saturating_mul(1 << (count - 1).min(16)).min(pace.longest_pause);
    let pause = asked.unwrap_or(doubled);
    (pause <= pace.longest_pause).then_some(pause)
}

/// Repeats a request, with pauses, until it succeeds or fails for good.
pub(super) fn with_retries<T>(
    settings: &HubSettings,
    progress: &dyn DownloadProgress,
    mut ask: impl FnMut() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut count = 0;
    loop {
        let failure = match ask() {
            Ok(answer) => return Ok(answer),
            Err(failure) => failure,
        };
        count += 1;
        let Some(pause) = pause(&failure, &settings.pace, count) else { return Err(failure) };
        wait(&failure, settings, progress, pause);
    }
}

/// Tells the user why the request is repeated, and sleeps.
pub(super) fn wait(failure: &Failure, settings: &HubSettings, progress: &dyn DownloadProgress, pause: Duration) {
    progress.notice(&format!("{}; trying again in {:.0} s", failure.brief(settings), pause.as_secs_f64().ceil()));
    std::thread::sleep(pause);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_the_hubs_own_wish_goes_first() {
        let pace = RetryPolicy { attempts: 4, ..RetryPolicy::default() };
        let seconds = |failure: &Failure, count| pause(failure, &pace, count).map(|pause| pause.as_secs());
        let network = Failure::Network(Cause::default());
        assert_eq!([1, 2, 3, 4].map(|count| seconds(&network, count)), [Some(1), Some(2), Some(4), None]);
        let after = |wish| {
            Failure::Status(Refused { status: 429, retry_after: Some(Duration::from_secs(wish)), ..Refused::default() })
        };
        assert_eq!(seconds(&after(7), 1), Some(7));
        assert_eq!(seconds(&after(3_600), 1), None, "longer than anybody waits");
        assert_eq!(seconds(&Failure::Status(Refused { status: 404, ..Refused::default() }), 1), None);
    }
}

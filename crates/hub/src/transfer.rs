//! One file from the hub to the disk: hf-hub begins a cut download from its first byte and takes what arrives on trust;
//! here it goes on where it stopped, also in a later run, and is kept only when its hash is the one that was announced.
use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, RANGE};
use reqwest::redirect::Policy;
use reqwest::{Client, Method, Response};

use super::failure::{Failure, Refused, patiently, pause, wait};
use super::name::Repo;
use super::settings::Settings;
use super::store::{Listed, Store, make_parent};
use super::{Place, Watch, digest};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// So many new bytes show that the connection is worth the trouble.
const PROGRESS: u64 = 1 << 20;
/// The most of a refusal's text that is read.
const WORDS_BYTES: usize = 64 << 10;

/// A client of the hub; with `follow` it goes where redirects lead.
pub(super) fn client(settings: &Settings, follow: bool) -> Result<Client, Failure> {
    let agent = concat!("tunesmith/", env!("CARGO_PKG_VERSION"));
    let policy = if follow { Policy::default() } else { Policy::none() };
    let builder = Client::builder().user_agent(agent).redirect(policy);
    Ok(builder.connect_timeout(Duration::from_secs(20)).read_timeout(settings.pace.silence).build()?)
}

/// Fetches files of one repository at one commit, one after the other. Each thread has its own.
pub(super) struct Carrier<'a> {
    settings: &'a Settings,
    watch: &'a dyn Watch,
    repo: &'a Repo,
    commit: &'a str,
    runtime: tokio::runtime::Runtime,
    staying: Client,
    following: Client,
}

/// What the hub announces of a file.
struct Announced {
    etag: String,
    size: u64,
}

impl<'a> Carrier<'a> {
    pub fn new(settings: &'a Settings, watch: &'a dyn Watch, repo: &'a Repo, commit: &'a str) -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|source| {
            Error::new(tunesmith_base::Kind::Io, format!("no runtime for downloads: {source}"))
                .hint("raise the limits of open files and processes (ulimit -n, ulimit -u)")
        })?;
        let (staying, following) = (client(settings, false)?, client(settings, true)?);
        Ok(Self { settings, watch, repo, commit, runtime, staying, following })
    }

    /// Makes sure that the file lies in `place`, whole and with the hash that the hub announces.
    pub fn fetch(&self, file: &Listed, store: &Store, place: &Place) -> Result<()> {
        let fail = |failure: Failure| failure.into_error(self.settings, self.repo, self.commit, &file.path);
        let announced = patiently(self.settings, self.watch, || self.announced(file)).map_err(fail)?;
        let Announced { etag, size } = &announced;
        let mut seen = 0;
        let mut arrived = |position: u64| {
            self.watch.advance(position.saturating_sub(seen));
            seen = seen.max(position);
        };
        match place {
            Place::Cache => {
                let blob = store.blob(etag);
                let busy = || self.watch.notice(&format!("another process fetches {}; waiting for it", file.path));
                let _lock = store.lock(etag, busy)?;
                if fs::metadata(&blob).is_ok_and(|about| about.len() == *size) {
                    arrived(*size);
                } else {
                    let incomplete = PathBuf::from(format!("{}.incomplete", blob.display()));
                    self.bring(file, &announced, &incomplete, &blob, &mut arrived).map_err(fail)?;
                }
                store.link(self.commit, &file.path, etag)
            }
            Place::Folder(folder) => {
                let target = folder.join(&file.path);
                if target.exists() || target.is_symlink() {
                    let same_size = fs::metadata(&target).is_ok_and(|about| about.len() == *size);
                    if same_size && is_intact(etag, &target)? {
                        arrived(*size);
                        return Ok(());
                    }
                    return Err(Error::new(
                        tunesmith_base::Kind::Io,
                        format!("{} is there with another content", target.display()),
                    )
                    .hint("it is not replaced: remove it, or name another folder"));
                }
                let name = target.file_name().unwrap_or_default().to_string_lossy();
                let incomplete = target.with_file_name(format!(".{name}.{etag}.incomplete"));
                sweep_partials(&target, &incomplete);
                self.bring(file, &announced, &incomplete, &target, &mut arrived).map_err(fail)
            }
        }
    }

    /// Downloads into `incomplete`, going on with what is there, and makes it `done` when it is right.
    fn bring(
        &self,
        file: &Listed,
        announced: &Announced,
        incomplete: &Path,
        done: &Path,
        arrived: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let Announced { etag, size } = announced;
        make_parent(done)?;
        let (mut failures, mut damaged) = (0, false);
        loop {
            let io = |doing: &str, source: &std::io::Error| Error::io(doing, incomplete, source);
            let opened = files::open_to_write(incomplete, false);
            let mut partial = opened.map_err(|source| io("create", &source))?;
            if partial.try_lock().is_err() {
                self.watch.notice(&format!("another process fetches {}; waiting for it", file.path));
                partial.lock().map_err(|source| io("lock", &source))?;
            }
            if !files::is_at(&partial, incomplete) {
                // The other process has finished it.
                if done.exists() && is_intact(etag, done)? {
                    arrived(*size);
                    return Ok(());
                }
                continue;
            }
            let mut have = partial.metadata().map_err(|source| io("read", &source))?.len();
            if have > *size {
                partial.set_len(0).map_err(|source| io("shorten", &source))?;
                have = 0;
            }
            arrived(have);
            let pulled = if have < *size { self.pull(file, *size, have, &mut partial, arrived) } else { Ok(()) };
            if let Err(failure) = pulled {
                let now = partial.metadata().map_or(0, |about| about.len());
                failures = if now >= have + PROGRESS { 1 } else { failures + 1 };
                if matches!(failure, Failure::Odd(_)) {
                    let _ = fs::remove_file(incomplete);
                }
                let Some(pause) = pause(&failure, &self.settings.pace, failures) else { return Err(failure) };
                wait(&failure, self.settings, self.watch, pause);
                continue;
            }
            partial.sync_all().map_err(|source| io("write", &source))?;
            drop(partial);
            if is_intact(etag, incomplete)? {
                return Ok(fs::rename(incomplete, done).map_err(|source| Error::io("create", done, &source))?);
            }
            fs::remove_file(incomplete).map_err(|source| io("remove", &source))?;
            if damaged {
                let error = self.repo.error(format!("{} of {}: arrived damaged twice", file.path, self.repo));
                let hint = format!(
                    "its hash is not the announced {etag}; nothing of it was kept; check the network, or HF_ENDPOINT"
                );
                return Err(Failure::Here(error.hint(hint)));
            }
            damaged = true;
            self.watch.notice(&format!("{} arrived damaged: fetching it again", file.path));
        }
    }

    /// What the hub says of a file before sending it.
    fn announced(&self, file: &Listed) -> Result<Announced, Failure> {
        let mut url = self.url(&file.path);
        let mut answer = self.send(&self.staying, Method::HEAD, &url, None)?;
        // A renamed repository is a redirect on the same host; one to where large files lie has all that is asked here.
        for _ in 0..5 {
            let Some(next) = relative_redirect(&answer) else { break };
            url = format!("{}{next}", self.origin());
            answer = self.send(&self.staying, Method::HEAD, &url, None)?;
        }
        let status = answer.status();
        if !status.is_success() && !status.is_redirection() {
            return Err(Failure::Status(self.refused(answer)));
        }
        let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        if header("x-repo-commit").is_some_and(|commit| commit != self.commit) {
            return Err(Failure::Odd(format!("{} of another commit", file.path)));
        }
        let etag = header("x-linked-etag").or_else(|| header("etag")).unwrap_or_default();
        let etag = etag.trim().trim_start_matches("W/").trim_matches('"').to_owned();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if !(1..=128).contains(&etag.len()) || !etag.chars().all(is_plain) {
            return Err(Failure::Odd(format!("no usable ETag for {}", file.path)));
        }
        let size = header("x-linked-size").and_then(|size| size.trim().parse().ok()).unwrap_or(file.size);
        Ok(Announced { etag, size })
    }

    /// Appends the file's bytes from `offset` on to `partial`.
    fn pull(
        &self,
        file: &Listed,
        size: u64,
        offset: u64,
        partial: &mut File,
        arrived: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let mut answer = self.send(&self.following, Method::GET, &self.url(&file.path), Some(offset))?;
        let disk = |source: std::io::Error| {
            Error::io("write", &file.path, &source).hint("free some space, or set HF_HUB_CACHE")
        };
        let mut position = match answer.status().as_u16() {
            206 if starts_at(answer.headers(), offset) => offset,
            200 => 0,
            206 | 416 => return Err(Failure::Odd(format!("another part of {} than was asked for", file.path))),
            _ => return Err(Failure::Status(self.refused(answer))),
        };
        partial.set_len(position).and_then(|()| partial.seek(SeekFrom::Start(position))).map_err(disk)?;
        while let Some(bytes) = self.runtime.block_on(async { answer.chunk().await })? {
            if position + bytes.len() as u64 > size {
                return Err(Failure::Odd(format!("more than the announced {size} bytes of {}", file.path)));
            }
            partial.write_all(&bytes).map_err(disk)?;
            position += bytes.len() as u64;
            arrived(position);
        }
        if position < size {
            return Err(Failure::Network(format!("{} was cut after {position} of {size} bytes", file.path)));
        }
        Ok(())
    }

    fn send(&self, client: &Client, method: Method, url: &str, offset: Option<u64>) -> Result<Response, Failure> {
        let mut request = client.request(method, url).header(ACCEPT_ENCODING, "identity");
        if let Some(token) = &self.settings.token {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.secret()))
                .map_err(|_| Failure::Odd("a token that cannot be sent".to_owned()))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        if let Some(offset) = offset.filter(|&offset| offset > 0) {
            request = request.header(RANGE, format!("bytes={offset}-"));
        }
        // Its timer wants the runtime from the start.
        Ok(self.runtime.block_on(async { request.send().await })?)
    }

    /// The hub's words on why it refuses.
    fn refused(&self, answer: Response) -> Refused {
        self.runtime.block_on(refused(answer))
    }

    fn url(&self, path: &str) -> String {
        format!("{}/{}/resolve/{}/{}", self.settings.endpoint, self.repo.page(), self.commit, encoded(path))
    }

    /// Scheme and host of the hub.
    fn origin(&self) -> &str {
        let endpoint = self.settings.endpoint.as_str();
        let host = endpoint.find("://").map_or(0, |at| at + 3);
        endpoint[host..].find('/').map_or(endpoint, |slash| &endpoint[..host + slash])
    }
}

/// Removes what was fetched of other contents of `target`, and is fetched no more.
fn sweep_partials(target: &Path, incomplete: &Path) {
    let prefix = format!(".{}.", target.file_name().unwrap_or_default().to_string_lossy());
    for entry in target.parent().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let other = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".incomplete"));
        let path = entry.path();
        if other.is_some_and(|etag| !etag.contains('.')) && path != incomplete && files::temporary::is_abandoned(&path)
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// The hub's words on why it refuses.
pub(super) async fn refused(mut answer: Response) -> Refused {
    let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let retry_after = header("retry-after").and_then(|value| value.trim().parse().ok()).map(Duration::from_secs);
    let (code, mut words) = (header("x-error-code"), header("x-error-message"));
    let status = answer.status().as_u16();
    if words.is_none() {
        let mut body = Vec::new();
        while let Ok(Some(bytes)) = answer.chunk().await {
            body.extend_from_slice(&bytes);
            if body.len() > WORDS_BYTES {
                break;
            }
        }
        let json: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
        words = json.and_then(|json| Some(json.get("error")?.as_str()?.to_owned()));
    }
    Refused { status, code, words, retry_after }
}

/// Where a redirect leads that stays on the host.
fn relative_redirect(answer: &Response) -> Option<&str> {
    let location = answer.headers().get(LOCATION).filter(|_| answer.status().is_redirection())?.to_str().ok()?;
    (location.starts_with('/') && !location.starts_with("//")).then_some(location)
}

/// Whether `Content-Range` begins at `offset`.
fn starts_at(headers: &HeaderMap, offset: u64) -> bool {
    let range = headers.get("content-range").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let start =
        range.trim().strip_prefix("bytes").and_then(|rest| rest.trim_start_matches([' ', '=']).split('-').next());
    start.and_then(|start| start.parse().ok()) == Some(offset)
}

/// Whether the file's content has the hash that its `ETag` is; one that is no hash says nothing.
fn is_intact(etag: &str, path: &Path) -> Result<bool> {
    Ok(digest::of_kind(etag, path)?.is_none_or(|found| found.eq_ignore_ascii_case(etag)))
}

/// A path for an address.
fn encoded(path: &str) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}"); // a String never fails
        }
    }
    text
}

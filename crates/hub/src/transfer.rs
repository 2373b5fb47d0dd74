//! Downloads one file. hf-hub restarts an interrupted download and does not check the result. Here a download continues
//! where it stopped, even in a later run, and a file is kept only if it has the hash that the hub announced.
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use hf_hub::api::sync::ApiRepo;
use ureq::http::header::LOCATION;
use ureq::http::{HeaderMap, Method};

use super::address::joined;
use super::client::{HubClient, HubRequest, HubResponse, check_redirects, refused};
use super::failure::{Failure, pause, wait, with_retries};
use super::name::Repo;
use super::settings::HubSettings;
use super::store::{Listed, Store, make_parent};
use super::{Destination, DownloadProgress, digest};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_base::files::disk::RealDisk;

/// A connection that has delivered this many new bytes works, so the count of failed attempts starts again.
const PROGRESS: u64 = 1 << 20;
/// Bytes read at once.
const CHUNK: usize = 128 << 10;

/// Downloads files of one repository at one commit, one after the other. Each thread has its own.
pub(super) struct Downloader<'a> {
    settings: &'a HubSettings,
    progress: &'a dyn DownloadProgress,
    repo: &'a Repo,
    commit: &'a str,
    client: HubClient<'a>,
    api: ApiRepo,
}

/// What the hub says about a file before it is downloaded.
struct Announced {
    etag: String,
    size: u64,
}

impl<'a> Downloader<'a> {
    pub fn new(
        settings: &'a HubSettings,
        progress: &'a dyn DownloadProgress,
        repo: &'a Repo,
        commit: &'a str,
    ) -> Result<Self, Failure> {
        let client = HubClient::new(settings);
        let api = client.api(repo, commit)?;
        Ok(Self { settings, progress, repo, commit, client, api })
    }

    /// Ensures that `place` has the complete file with the announced hash.
    pub fn fetch(&self, file: &Listed, store: &Store, place: &Destination) -> Result<()> {
        let fail = |failure: Failure| failure.into_error(self.settings, self.repo, self.commit, &file.path);
        let announced = with_retries(self.settings, self.progress, || self.announced(file)).map_err(fail)?;
        let Announced { etag, size } = &announced;
        let mut seen = 0;
        let mut arrived = |position: u64| {
            self.progress.advance(position.saturating_sub(seen));
            seen = seen.max(position);
        };
        match place {
            Destination::Cache => {
                let blob = store.blob(etag);
                let busy = || self.progress.notice(&format!("another process fetches {}; waiting for it", file.path));
                let _lock = store.lock(etag, busy)?;
                if fs::metadata(&blob).is_ok_and(|about| about.len() == *size) {
                    arrived(*size);
                } else {
                    let incomplete = PathBuf::from(format!("{}.incomplete", blob.display()));
                    self.download(file, &announced, &incomplete, &blob, &mut arrived).map_err(fail)?;
                }
                store.link(self.commit, &file.path, etag)
            }
            Destination::Folder(folder) => {
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
                self.download(file, &announced, &incomplete, &target, &mut arrived).map_err(fail)
            }
        }
    }

    /// Downloads into `incomplete`, continues what is there, and moves it to `done` after verification.
    fn download(
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
                self.progress.notice(&format!("another process fetches {}; waiting for it", file.path));
                partial.lock().map_err(|source| io("lock", &source))?;
            }
            if !files::is_at(&partial, incomplete) {
                // The other process has finished the download.
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
            let pulled = if have < *size { self.append_rest(file, *size, have, &mut partial, arrived) } else { Ok(()) };
            if let Err(failure) = pulled {
                let now = partial.metadata().map_or(0, |about| about.len());
                failures = if now >= have + PROGRESS { 1 } else { failures + 1 };
                if matches!(failure, Failure::InvalidAnswer(_)) {
                    let _ = fs::remove_file(incomplete);
                }
                let Some(pause) = pause(&failure, &self.settings.pace, failures) else { return Err(failure) };
                wait(&failure, self.settings, self.progress, pause);
                continue;
            }
            partial.sync_all().map_err(|source| io("write", &source))?;
            drop(partial);
            if is_intact(etag, incomplete)? {
                let placed = files::atomic::rename(&RealDisk, incomplete, done);
                return Ok(placed.map_err(|source| Error::io("create", done, &source))?);
            }
            fs::remove_file(incomplete).map_err(|source| io("remove", &source))?;
            if damaged {
                let error = self.repo.error(format!("{} of {}: arrived damaged twice", file.path, self.repo));
                let hint = format!(
                    "its hash is not the announced {etag}; nothing of it was kept; check the network, or HF_ENDPOINT"
                );
                return Err(Failure::Local(error.hint(hint)));
            }
            damaged = true;
            self.progress.notice(&format!("{} arrived damaged: fetching it again", file.path));
        }
    }

    /// Asks for a file's metadata.
    fn announced(&self, file: &Listed) -> Result<Announced, Failure> {
        let ask = |url: &str| self.client.send(self.client.signed(HubRequest::new(Method::HEAD, url).staying()));
        let mut url = self.url(&file.path);
        let mut answer = ask(&url)?;
        // A renamed repository redirects on the same host, which is followed. A redirect to large-file storage is not:
        // its response has all that is needed here.
        for followed in 0.. {
            let Some(next) = relative_redirect(&answer).and_then(|next| joined(&url, next)) else { break };
            check_redirects(followed)?;
            answer = ask(&next)?;
            url = next;
        }
        let status = answer.status();
        if !status.is_success() && !status.is_redirection() {
            return Err(Failure::Status(refused(answer)));
        }
        let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        if header("x-repo-commit").is_some_and(|commit| commit != self.commit) {
            return Err(Failure::InvalidAnswer(format!("{} of another commit", file.path).into()));
        }
        let etag = header("x-linked-etag").or_else(|| header("etag")).unwrap_or_default();
        let etag = etag.trim().trim_start_matches("W/").trim_matches('"').to_owned();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if !(1..=128).contains(&etag.len()) || !etag.chars().all(is_plain) {
            return Err(Failure::InvalidAnswer(format!("no usable ETag for {}", file.path).into()));
        }
        let size = header("x-linked-size").and_then(|size| size.trim().parse().ok()).unwrap_or(file.size);
        Ok(Announced { etag, size })
    }

    /// Appends the file's bytes from `offset` on to `partial`.
    fn append_rest(
        &self,
        file: &Listed,
        size: u64,
        offset: u64,
        partial: &mut File,
        arrived: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let ask = self.client.signed(HubRequest::new(Method::GET, self.url(&file.path)));
        let ask = if offset > 0 { ask.with_foreign("range", &format!("bytes={offset}-"))? } else { ask };
        let answer = self.client.send(ask)?;
        let disk = |source: std::io::Error| {
            Error::io("write", &file.path, &source).hint("free some space, or set HF_HUB_CACHE")
        };
        let mut position = match answer.status().as_u16() {
            206 if starts_at(answer.headers(), offset) => offset,
            200 => 0,
            206 | 416 => {
                return Err(Failure::InvalidAnswer(format!("another part of {} than was asked for", file.path).into()));
            }
            _ => return Err(Failure::Status(refused(answer))),
        };
        partial.set_len(position).and_then(|()| partial.seek(SeekFrom::Start(position))).map_err(disk)?;
        let (mut reader, mut buffer) = (answer.into_body().into_reader(), vec![0; CHUNK]);
        loop {
            let count = reader.read(&mut buffer).map_err(ureq::Error::from)?;
            let bytes = &buffer[..count];
            if bytes.is_empty() {
                break;
            }
            if position + bytes.len() as u64 > size {
                return Err(Failure::InvalidAnswer(
                    format!("more than the announced {size} bytes of {}", file.path).into(),
                ));
            }
            partial.write_all(bytes).map_err(disk)?;
            position += bytes.len() as u64;
            arrived(position);
        }
        if position < size {
            return Err(Failure::Network(format!("{} was cut after {position} of {size} bytes", file.path).into()));
        }
        Ok(())
    }

    fn url(&self, path: &str) -> String {
        self.api.url(&encoded(path))
    }
}

/// Removes abandoned partial downloads of other versions of `target`.
fn sweep_partials(target: &Path, incomplete: &Path) {
    let prefix = format!(".{}.", target.file_name().unwrap_or_default().to_string_lossy());
    for entry in target.parent().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let other = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".incomplete"));
        let path = entry.path();
        if other.is_some_and(|etag| !etag.contains('.')) && path != incomplete {
            files::temporary::remove_abandoned(&path);
        }
    }
}

/// The target of a redirect that stays on the host.
fn relative_redirect(answer: &HubResponse) -> Option<&[u8]> {
    let location = answer.headers().get(LOCATION).filter(|_| answer.status().is_redirection())?.as_bytes();
    (location.starts_with(b"/") && !location.starts_with(b"//")).then_some(location)
}

/// Whether `Content-Range` begins at `offset`.
fn starts_at(headers: &HeaderMap, offset: u64) -> bool {
    let range = headers.get("content-range").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let start =
        range.trim().strip_prefix("bytes").and_then(|rest| rest.trim_start_matches([' ', '=']).split('-').next());
    start.and_then(|start| start.parse().ok()) == Some(offset)
}

/// Whether the file's content matches the hash in its `ETag`; an `ETag` that is not a hash matches anything.
fn is_intact(etag: &str, path: &Path) -> Result<bool> {
    Ok(digest::of_kind(etag, path)?.is_none_or(|found| found.eq_ignore_ascii_case(etag)))
}

/// Escapes a path for a URL.
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

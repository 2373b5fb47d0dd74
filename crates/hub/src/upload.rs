//! Uploads the files of a folder to a repository, in one commit. `preupload` says which files need large-file storage,
//! `info/lfs/objects/batch` where to upload each of them, in one piece or in parts, and the commit names all files.
//!
//! Large files are read while they are sent. A file that the hub already has is not sent again.
use std::fmt::Write as _;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use ureq::http::Method;
use ureq::http::header::{ACCEPT, CONTENT_TYPE, ETAG};

use super::client::{self, HubClient, HubRequest, HubResponse};
use super::failure::{Failure, Refused, with_retries};
use super::name::Repo;
use super::settings::HubSettings;
use super::{DownloadProgress, Pushed, base64, digest};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::files;
use tunesmith_base::words::count;

/// How many bytes from the start of a file the hub wants, to detect its type.
const SAMPLE: usize = 512;
/// The most bytes of one part, which is held in memory while a file is sent in parts.
const MAX_PART: u64 = 1 << 30;
const LFS: &str = "application/vnd.git-lfs+json";
const JSON: &str = "application/json";

struct Item {
    path: String,
    file: PathBuf,
    size: u64,
    sample: Vec<u8>,
    sha256: String,
}

#[derive(Deserialize)]
struct Modes {
    files: Vec<FileMode>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileMode {
    path: String,
    upload_mode: String,
    #[serde(default)]
    should_ignore: bool,
}

#[derive(Deserialize)]
struct BatchAnswer {
    transfer: Option<String>,
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    oid: String,
    /// `None` if the hub already has the file.
    actions: Option<Actions>,
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Committed {
    commit_oid: String,
}

/// Uploads files to one repository.
pub(super) struct Uploader<'a> {
    settings: &'a HubSettings,
    progress: &'a dyn DownloadProgress,
    repo: &'a Repo,
    client: HubClient<'a>,
}

impl<'a> Uploader<'a> {
    pub fn new(settings: &'a HubSettings, progress: &'a dyn DownloadProgress, repo: &'a Repo) -> Self {
        Self { settings, progress, repo, client: HubClient::new(settings) }
    }

    /// Creates the repository if it is missing, uploads the files, and commits them to `main`.
    pub fn push(&self, files: &[(String, PathBuf)], private: bool, message: &str) -> Result<Pushed> {
        let fail = |doing: &'static str| move |failure| explain(failure, self.settings, self.repo, doing);
        let items: Vec<Item> = files.iter().map(|(path, file)| Item::read(path, file)).collect::<Result<_>>()?;
        self.create(private).map_err(fail("make the repository"))?;
        let modes = self.again(|| self.modes(&items)).map_err(fail("ask what is to be sent"))?;
        let mode = |item: &Item| modes.iter().find(|mode| mode.path == item.path);
        let kept: Vec<&Item> = items.iter().filter(|item| !mode(item).is_some_and(|mode| mode.should_ignore)).collect();
        let is_large = |item: &Item| item.size > 0 && mode(item).is_some_and(|mode| mode.upload_mode == "lfs");
        let large: Vec<&Item> = kept.iter().copied().filter(|item| is_large(item)).collect();
        if !large.is_empty() {
            let bytes = large.iter().map(|item| item.size).sum();
            self.progress.begin(&format!("large files to {} ({})", self.repo, large.len()), bytes);
            let sent = self.send_large(&large);
            self.progress.end();
            sent.map_err(fail("send the large files"))?;
        }
        let mut lines = json!({"key": "header", "value": {"summary": message, "description": ""}}).to_string();
        for item in &kept {
            let Item { path, file, size, sha256, .. } = item;
            let entry = if is_large(item) {
                json!({"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": sha256, "size": size}})
            } else {
                let bytes = files::read(file, files::SMALL).map_err(|source| Error::io("read", file, &source))?;
                json!({"key": "file", "value": {"path": path, "content": base64::encode(&bytes), "encoding": "base64"}})
            };
            let _ = write!(lines, "\n{entry}"); // a String never fails
        }
        lines.push('\n');
        let committed: Committed = self
            .again(|| {
                let ask = self.post(self.api("commit/main")).with(CONTENT_TYPE, "application/x-ndjson");
                client::json(self.client.send(ask.bytes(lines.as_bytes()))?)
            })
            .map_err(fail("commit"))?;
        let address = format!("{}/{}", self.settings.shown_endpoint(), self.repo.page());
        Ok(Pushed { commit: self.settings.clean(&committed.commit_oid), address, sent: kept.len() })
    }

    fn create(&self, private: bool) -> Result<(), Failure> {
        let (owner, name) = self.repo.id.split_once('/').unwrap_or(("", &self.repo.id));
        let body = json!({"name": name, "organization": owner, "private": private, "type": "model"}).to_string();
        self.again(|| {
            let ask = self.post(format!("{}/api/repos/create", self.client.endpoint())).with(CONTENT_TYPE, JSON);
            match self.answer(ask.bytes(body.as_bytes())) {
                // 409: the repository exists. 403: a token for this one repository may not create any. The next request
                // shows whether the token may write to it.
                Ok(_) | Err(Failure::Status(Refused { status: 403 | 409, .. })) => Ok(()),
                Err(failure) => Err(failure),
            }
        })
    }

    fn modes(&self, items: &[Item]) -> Result<Vec<FileMode>, Failure> {
        let files: Vec<Value> = items
            .iter()
            .map(|item| json!({"path": item.path, "size": item.size, "sample": base64::encode(&item.sample)}))
            .collect();
        let body = json!({ "files": files }).to_string();
        let ask = self.post(self.api("preupload/main")).with(CONTENT_TYPE, JSON);
        let modes: Modes = client::json(self.client.send(ask.bytes(body.as_bytes()))?)?;
        Ok(modes.files)
    }

    fn send_large(&self, items: &[&Item]) -> Result<(), Failure> {
        let objects: Vec<Value> = items.iter().map(|item| json!({"oid": item.sha256, "size": item.size})).collect();
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "objects": objects, "hash_algo": "sha256",
            "ref": {"name": "main"},
        });
        let body = body.to_string();
        let batch: BatchAnswer = self.again(|| {
            let url = format!("{}/{}.git/info/lfs/objects/batch", self.client.endpoint(), self.repo.page());
            let ask = self.post(url).with(ACCEPT, LFS).with(CONTENT_TYPE, LFS);
            client::json(self.client.send(ask.bytes(body.as_bytes()))?)
        })?;
        for item in items {
            let object = batch.objects.iter().find(|object| object.oid == item.sha256);
            let object = object.ok_or_else(|| Failure::InvalidAnswer(format!("no place for {}", item.path).into()))?;
            if let Some(error) = &object.error {
                let refused = Refused { status: 422, words: Some(error.message.clone()), ..Refused::default() };
                return Err(Failure::Status(refused));
            }
            if let Some(Actions { upload: Some(upload), verify }) = &object.actions {
                if batch.transfer.as_deref() == Some("multipart") && upload.header.contains_key("chunk_size") {
                    self.send_parts(item, upload)?;
                } else {
                    self.again(|| self.send_whole(item, upload))?;
                }
                if let Some(verify) = verify {
                    let body = json!({"oid": item.sha256, "size": item.size}).to_string();
                    self.again(|| {
                        self.answer(self.post(&verify.href).with(CONTENT_TYPE, JSON).bytes(body.as_bytes()))
                    })?;
                }
            }
            self.progress.advance(item.size);
        }
        Ok(())
    }

    /// One request whose body is read from the file while it is sent.
    fn send_whole(&self, item: &Item, upload: &Action) -> Result<(), Failure> {
        let mut ask = HubRequest::new(Method::PUT, &upload.href);
        for (name, value) in &upload.header {
            if let Some(value) = value.as_str() {
                ask = ask.with_foreign(name, value)?;
            }
        }
        self.answer(ask.file(&item.file, item.size)).map(drop)
    }

    /// Sends a request for each part, and a final one that completes the upload.
    fn send_parts(&self, item: &Item, upload: &Action) -> Result<(), Failure> {
        let odd = |what: &str| Failure::InvalidAnswer(format!("{what} for the parts of {}", item.path).into());
        let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
        let part_bytes =
            upload.header.get("chunk_size").and_then(number).filter(|bytes| (1..=MAX_PART).contains(bytes));
        let part_bytes = part_bytes.ok_or_else(|| odd("no usable size"))?;
        let mut places: Vec<(u64, &str)> = Vec::new();
        for (name, value) in &upload.header {
            if let (Ok(part), Some(place)) = (name.parse(), value.as_str()) {
                places.push((part, place));
            }
        }
        places.sort_unstable();
        if places.len() as u64 != item.size.div_ceil(part_bytes) {
            return Err(odd(&count(places.len(), "place")));
        }
        let mut parts = Vec::new();
        for (at, (_, place)) in (0u64..).zip(&places) {
            let start = at * part_bytes;
            let bytes = item.part(start, part_bytes.min(item.size - start))?;
            let answer = self.again(|| self.answer(HubRequest::new(Method::PUT, *place).bytes(&bytes)))?;
            let etag =
                answer.headers().get(ETAG).and_then(|value| value.to_str().ok()).ok_or_else(|| odd("no ETag"))?;
            parts.push(json!({"partNumber": at + 1, "etag": etag}));
        }
        let body = json!({"oid": item.sha256, "parts": parts}).to_string();
        self.again(|| {
            let ask = HubRequest::new(Method::POST, &upload.href).with(ACCEPT, LFS).with(CONTENT_TYPE, LFS);
            self.answer(ask.bytes(body.as_bytes()))
        })?;
        Ok(())
    }

    fn again<T>(&self, ask: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
        with_retries(self.settings, self.progress, ask)
    }

    fn api(&self, what: &str) -> String {
        format!("{}/api/{}/{}/{what}", self.client.endpoint(), self.repo.plural(), self.repo.id)
    }

    /// Adds the token if the address is the hub's.
    fn post<'b>(&self, url: impl Into<String>) -> HubRequest<'b> {
        self.client.signed(HubRequest::new(Method::POST, url))
    }

    fn answer(&self, ask: HubRequest) -> Result<HubResponse, Failure> {
        client::succeeded(self.client.send(ask)?)
    }
}

impl Item {
    fn read(path: &str, file: &Path) -> Result<Self> {
        let failed = |source: std::io::Error| Error::io("read", file, &source);
        let size = std::fs::metadata(file).map_err(failed)?.len();
        let mut sample = Vec::with_capacity(SAMPLE);
        files::open(file).map_err(failed)?.take(SAMPLE as u64).read_to_end(&mut sample).map_err(failed)?;
        Ok(Self { path: path.to_owned(), file: file.to_owned(), size, sample, sha256: digest::sha256(file)? })
    }

    fn part(&self, start: u64, length: u64) -> Result<Vec<u8>> {
        let failed = |source: std::io::Error| Error::io("read", &self.file, &source);
        let mut file = files::open(&self.file).map_err(failed)?;
        file.seek(SeekFrom::Start(start)).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(length).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }
}

/// The error for the user after a failure.
fn explain(failure: Failure, settings: &HubSettings, repo: &Repo, doing: &str) -> Error {
    let host = settings.shown_endpoint();
    let about = format!("push to {repo}: could not {doing}");
    let source = settings.token.as_ref().map_or_else(String::new, |token| format!(" from {}", token.source));
    let tokens = format!("{host}/settings/tokens");
    let refused = match failure {
        Failure::Local(error) => return error,
        Failure::Status(refused) => refused,
        Failure::InvalidAnswer(cause) => {
            let text = settings.clean(&cause.text);
            let error = repo.error(format!("{about}: {host} gave an answer that makes no sense: {text}"));
            return cause.attach(error.hint("check HF_ENDPOINT; a proxy may answer in the hub's place"));
        }
        Failure::Network(cause) => {
            let text = settings.clean(&cause.text);
            let error = Error::new(Kind::Io, format!("{about}: the hub ({host}) cannot be reached: {text}")).hint(
                "check the network and HF_ENDPOINT, and run it again: large files that have arrived are not sent twice",
            );
            return cause.attach(error);
        }
    };
    let words = refused.words.as_deref().map(|words| settings.clean(words)).filter(|words| !words.is_empty());
    let said = words.map_or_else(String::new, |words| format!(": {words}"));
    match refused.status {
        401 => repo
            .error(format!("{about}: the token{source} is not accepted (401){said}"))
            .hint(format!("set HF_TOKEN to a token with the role `write` from {tokens}")),
        403 => repo.error(format!("{about}: the token{source} may not write there (403){said}")).hint(format!(
            "set HF_TOKEN to a token with the role `write` of an account that may write to {}, from {tokens}",
            repo.id
        )),
        404 => repo
            .error(format!("{about}: the hub has no such repository or branch (404){said}"))
            .hint(format!("check the name at {host}/{}", repo.page())),
        409 | 412 => repo
            .error(format!("{about}: the repository was changed at the same time ({}){said}", refused.status))
            .hint("run it again: large files that have arrived are not sent twice"),
        status => Error::new(Kind::Io, format!("{about}: the hub answered with status {status}{said}"))
            .hint("run it again later; https://status.huggingface.co says how the hub is"),
    }
}

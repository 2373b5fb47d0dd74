//! A hub on the loopback: the part of its protocol that downloads need (that of uploads is [`super::accept`]), with faults
//! on demand.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use ring::digest::{Digest, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::json;

use super::accept::{self, Storage};

/// Files of a listing page, so that listings have several.
const PAGE: usize = 3;

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    /// Path and query.
    pub target: String,
    pub range: Option<u64>,
    pub token: Option<String>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn is(&self, method: &str, part: &str) -> bool {
        self.method == method && self.target.contains(part)
    }
}

/// An answer.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Close the connection after so many bytes of the body.
    pub cut: Option<usize>,
}

impl Reply {
    pub fn status(status: u16, headers: &[(&str, &str)], body: &str) -> Self {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Self { status, headers, body: body.as_bytes().to_vec(), cut: None }
    }
}

/// Changes an answer, given the request and how many such requests (method and target) came before.
type Fault = Box<dyn Fn(&Request, usize, Reply) -> Reply + Send>;

#[derive(Default)]
pub struct Repo {
    pub refs: BTreeMap<String, String>,
    pub commits: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    pub private: bool,
}

#[derive(Default)]
pub struct State {
    pub repos: BTreeMap<String, Repo>,
    pub storage: Storage,
    log: Vec<Request>,
    fault: Option<Fault>,
}

/// The server; its thread ends with the process.
#[derive(Clone)]
pub struct Server {
    pub endpoint: String,
    port: u16,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Self { endpoint: format!("http://127.0.0.1:{port}"), port, state: Arc::default() };
        let shared = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = shared.clone();
                std::thread::spawn(move || server.serve(stream));
            }
        });
        server
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Adds a commit to `models/owner/name` or `datasets/owner/name` and makes `revision` that commit.
    pub fn commit(&self, repo: &str, revision: &str, files: &[(&str, &[u8])]) -> String {
        let files: BTreeMap<String, Vec<u8>> =
            files.iter().map(|(path, bytes)| ((*path).to_owned(), bytes.to_vec())).collect();
        let commit = sha1(format!("{repo} {revision} {files:?}").as_bytes());
        let mut state = self.state();
        let repo = state.repos.entry(repo.to_owned()).or_default();
        repo.refs.insert(revision.to_owned(), commit.clone());
        repo.commits.insert(commit.clone(), files);
        commit
    }

    /// From here on answers pass through `fault`.
    pub fn fault(&self, fault: impl Fn(&Request, usize, Reply) -> Reply + Send + 'static) {
        self.state().fault = Some(Box::new(fault));
    }

    pub fn heal(&self) {
        self.state().fault = None;
    }

    /// Every request so far.
    pub fn log(&self) -> Vec<Request> {
        self.state().log.clone()
    }

    pub fn count(&self, method: &str, part: &str) -> usize {
        self.log().iter().filter(|request| request.is(method, part)).count()
    }

    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut stream = stream;
        while let Some(request) = read(&mut reader) {
            let mut state = self.state();
            let same = |old: &&Request| old.method == request.method && old.target == request.target;
            let before = state.log.iter().filter(same).count();
            state.log.push(request.clone());
            let uploaded = accept::answer(&mut state, &request, &self.endpoint, self.port);
            let mut reply = uploaded.unwrap_or_else(|| self.answer(&state, &request));
            if let Some(fault) = &state.fault {
                reply = fault(&request, before, reply);
            }
            drop(state);
            if !send(&mut stream, &request, &reply) {
                return;
            }
        }
    }

    fn answer(&self, state: &State, request: &Request) -> Reply {
        let not_found = |code: &str| Reply::status(404, &[("X-Error-Code", code)], r#"{"error":"not found"}"#);
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        if let Some(sha) = path.strip_prefix("/cdn/") {
            let files = state.repos.values().flat_map(|repo| repo.commits.values()).flat_map(BTreeMap::values);
            let found = files.into_iter().find(|bytes| sha256(bytes) == sha);
            return found.map_or_else(|| not_found("EntryNotFound"), |bytes| content(request, bytes));
        }
        let (repo_name, rest) = match path.strip_prefix("/api/") {
            Some(rest) => split_at_slash(rest, 3),
            None if path.starts_with("/datasets/") => split_at_slash(&path[1..], 3),
            None => {
                let (name, rest) = split_at_slash(&path[1..], 2);
                (format!("models/{name}"), rest)
            }
        };
        let Some(repo) = state.repos.get(&repo_name) else {
            return Reply::status(
                401,
                &[("X-Error-Code", "RepoNotFound")],
                r#"{"error":"Invalid username or password."}"#,
            );
        };
        let decoded = |text: &str| text.replace("%2F", "/").replace("%20", " ");
        let commit_of = |revision: &str| {
            let revision = decoded(revision);
            repo.commits.contains_key(&revision).then(|| revision.clone()).or_else(|| repo.refs.get(&revision).cloned())
        };
        if rest == "refs" {
            let refs: Vec<_> = repo
                .refs
                .iter()
                .map(|(name, commit)| json!({ "name": name, "ref": format!("refs/heads/{name}"), "targetCommit": commit }))
                .collect();
            return Reply::status(200, &[], &json!({ "branches": refs, "tags": [] }).to_string());
        }
        if let Some(revision) = rest.strip_prefix("revision/") {
            return match commit_of(revision) {
                Some(commit) => Reply::status(200, &[], &json!({ "id": repo_name, "sha": commit }).to_string()),
                None => not_found("RevisionNotFound"),
            };
        }
        if let Some(commit) = rest.strip_prefix("tree/") {
            let Some(files) = repo.commits.get(commit) else { return not_found("RevisionNotFound") };
            let start: usize = query.split("cursor=").nth(1).map_or(0, |cursor| cursor.parse().unwrap());
            let page: Vec<_> = files.iter().skip(start).take(PAGE).map(|(path, bytes)| entry(path, bytes)).collect();
            let mut reply = Reply::status(200, &[], &json!(page).to_string());
            if start + PAGE < files.len() {
                let next = format!("<{}{path}?recursive=true&cursor={}>; rel=\"next\"", self.endpoint, start + PAGE);
                reply.headers.push(("Link".into(), next));
            }
            return reply;
        }
        let Some((commit, path)) = rest.strip_prefix("resolve/").and_then(|rest| rest.split_once('/')) else {
            return not_found("EntryNotFound");
        };
        let Some(bytes) = repo.commits.get(commit).and_then(|files| files.get(&decoded(path))) else {
            return not_found("EntryNotFound");
        };
        if !is_large(path) {
            let mut reply = content(request, bytes);
            reply.headers.push(("ETag".into(), format!("\"{}\"", git_name(bytes))));
            reply.headers.push(("X-Repo-Commit".into(), commit.into()));
            return reply;
        }
        // Large files lie on another host, whose address is signed.
        let sum = sha256(bytes);
        let headers = [
            ("Location", format!("http://localhost:{}/cdn/{sum}?signature=SIGNED", self.port)),
            ("X-Linked-ETag", format!("\"{sum}\"")),
            ("X-Linked-Size", bytes.len().to_string()),
            ("ETag", "\"of-the-redirect\"".to_owned()),
            ("X-Repo-Commit", commit.to_owned()),
        ];
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        Reply::status(302, &headers, "")
    }
}

pub fn is_large(path: &str) -> bool {
    [".safetensors", ".parquet", ".gz"].iter().any(|end| path.ends_with(end))
}

fn entry(path: &str, bytes: &[u8]) -> serde_json::Value {
    let mut entry = json!({ "type": "file", "oid": git_name(bytes), "size": bytes.len(), "path": path });
    if is_large(path) {
        entry["lfs"] = json!({ "oid": sha256(bytes), "size": bytes.len(), "pointerSize": 134 });
    }
    entry
}

fn content(request: &Request, bytes: &[u8]) -> Reply {
    match request.range {
        Some(start) if start as usize >= bytes.len() => Reply::status(416, &[], ""),
        Some(start) => {
            let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
            Reply { body: bytes[start as usize..].to_vec(), ..Reply::status(206, &[("Content-Range", &range)], "") }
        }
        None => Reply { body: bytes.to_vec(), ..Reply::status(200, &[], "") },
    }
}

fn split_at_slash(path: &str, parts: usize) -> (String, String) {
    let words: Vec<&str> = path.split('/').collect();
    (words[..parts.min(words.len())].join("/"), words.get(parts..).unwrap_or_default().join("/"))
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&count| count > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut request = Request { method, target, range: None, token: None, body: Vec::new() };
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&count| count > 0)?;
        let Some((name, value)) = line.trim().split_once(':') else {
            request.body = vec![0; length];
            reader.read_exact(&mut request.body).ok()?;
            return Some(request);
        };
        match name.to_lowercase().as_str() {
            "range" => request.range = value.trim().strip_prefix("bytes=")?.trim_end_matches('-').parse().ok(),
            "content-length" => length = value.trim().parse().ok()?,
            "authorization" => request.token = Some(value.trim().to_owned()),
            _ => {}
        }
    }
}

/// Whether the connection goes on.
fn send(stream: &mut TcpStream, request: &Request, reply: &Reply) -> bool {
    let mut head = format!("HTTP/1.1 {} Status\r\nContent-Length: {}\r\n", reply.status, reply.body.len());
    for (name, value) in &reply.headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    head += "\r\n";
    let body = if request.method == "HEAD" { &[] as &[u8] } else { &reply.body };
    let body = &body[..reply.cut.unwrap_or(body.len()).min(body.len())];
    let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).and_then(|()| stream.flush());
    if reply.cut.is_some() {
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
    sent.is_ok() && reply.cut.is_none()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes))
}

/// What `git hash-object` says.
pub fn git_name(bytes: &[u8]) -> String {
    sha1(&[format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat())
}

pub fn sha1(bytes: &[u8]) -> String {
    hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, bytes))
}

fn hex(digest: Digest) -> String {
    digest.as_ref().iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

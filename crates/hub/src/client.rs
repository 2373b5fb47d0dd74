//! Sends requests to the hub and follows its redirects, with the proxies and certificates of the environment and with
//! time limits. The token is only sent to the hub's own host and port.
//!
//! hf-hub builds the requests for a repository's commit, and the addresses of its files. It cannot list sizes, create
//! repositories or upload files. Those requests, and hf-hub's own, go over ureq, hf-hub's HTTP client.
use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, RepoType};
use serde::de::DeserializeOwned;
use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, LOCATION};
use ureq::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::typestate::WithoutBody;
use ureq::{Agent, Body, Proxy, ProxyProtocol, RequestBuilder, SendBody};

use super::address::{joined, login, origin};
use super::base64;
use super::failure::{Cause, Failure, Refused};
use super::name::{Repo, RepoKind};
use super::proxy::Proxies;
use super::settings::HubSettings;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// The value of the header `User-Agent`.
pub(super) const AGENT: &str = concat!("tunesmith/", env!("CARGO_PKG_VERSION"));
/// The time limit for establishing a connection.
const CONNECT: Duration = Duration::from_secs(20);
/// The most redirects in a row that are followed, from the hub and from other hosts.
const REDIRECTS: usize = 10;
/// The most bytes of a response that are held in memory.
const ANSWER_BYTES: u64 = 64 << 20;
/// The most bytes of an error response that are read for its explanation.
const WORDS_BYTES: u64 = 64 << 10;

pub(super) type HubResponse = Response<Body>;

/// A request that was not sent yet. It can be repeated for the target of a redirect.
#[derive(Clone)]
pub(super) struct HubRequest<'a> {
    method: Method,
    url: String,
    headers: HeaderMap,
    load: RequestBody<'a>,
    follows: bool,
}

/// The body of a request.
#[derive(Clone, Copy)]
enum RequestBody<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// A file of this size, read while it is sent.
    File(&'a Path, u64),
}

impl<'a> HubRequest<'a> {
    pub fn new(method: Method, url: impl Into<String>) -> Self {
        Self { method, url: url.into(), headers: HeaderMap::new(), load: RequestBody::Nothing, follows: true }
    }

    /// Makes the request return a redirect as its response, instead of following it.
    pub fn staying(self) -> Self {
        Self { follows: false, ..self }
    }

    pub fn with(mut self, name: HeaderName, value: &'static str) -> Self {
        self.headers.insert(name, HeaderValue::from_static(value));
        self
    }

    /// Adds a header whose name and value come from outside, such as from a response of the hub.
    pub fn with_foreign(mut self, name: &str, value: &str) -> Result<Self, Failure> {
        let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) else {
            return Err(Failure::InvalidAnswer("a header that cannot be sent".into()));
        };
        self.headers.insert(name, value);
        Ok(self)
    }

    pub fn bytes(self, bytes: &'a [u8]) -> Self {
        Self { load: RequestBody::Bytes(bytes), ..self }
    }

    pub fn file(self, path: &'a Path, size: u64) -> Self {
        Self { load: RequestBody::File(path, size), ..self }
    }

    /// The request to the target of a redirect; `None` if `answer` is not a redirect. It has no token if host or port
    /// differ.
    fn next(&self, answer: &HubResponse) -> Result<Option<Self>, Failure> {
        let status = answer.status().as_u16();
        let Some(location) = answer.headers().get(LOCATION).filter(|_| matches!(status, 301..=303 | 307 | 308)) else {
            return Ok(None);
        };
        let mut next = self.clone();
        next.url = redirected(&self.url, location)?;
        if status <= 303 && self.method != Method::GET && self.method != Method::HEAD {
            (next.method, next.load) = (Method::GET, RequestBody::Nothing);
            next.headers.remove(CONTENT_TYPE);
        }
        let host = |url: &str| origin(url).ok_or_else(nowhere);
        if host(&next.url)? != host(&self.url)? {
            next.headers.remove(AUTHORIZATION);
        }
        Ok(Some(next))
    }
}

/// Checks that one more redirect may be followed, after `followed` of them.
///
/// # Errors
/// The limit of [`REDIRECTS`] is reached.
pub(super) fn check_redirects(followed: usize) -> Result<(), Failure> {
    if followed < REDIRECTS { Ok(()) } else { Err(too_many_redirects()) }
}

fn too_many_redirects() -> Failure {
    Failure::InvalidAnswer(format!("more than {REDIRECTS} redirects").into())
}

/// The address that the `Location` of a response from `url` names.
pub(super) fn redirected(url: &str, location: &HeaderValue) -> Result<String, Failure> {
    joined(url, location.as_bytes()).ok_or_else(nowhere)
}

fn nowhere() -> Failure {
    Failure::InvalidAnswer("a redirect to no address".into())
}

/// The client for the hub. Each thread has its own.
pub(super) struct HubClient<'a> {
    settings: &'a HubSettings,
    /// The hub's address, without user name and password.
    endpoint: String,
    proxies: Proxies,
    /// HTTP clients, by whether they use TLS, and by proxy. Each is made at its first use.
    agents: RefCell<Vec<(bool, Option<Proxy>, Agent)>>,
}

impl<'a> HubClient<'a> {
    pub fn new(settings: &'a HubSettings) -> Self {
        let (endpoint, proxies) = (settings.shown_endpoint(), Proxies::from_env());
        Self { settings, endpoint, proxies, agents: RefCell::default() }
    }

    /// The hub's address, without user name and password.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// hf-hub's view of `repo` at `revision`.
    pub fn api(&self, repo: &Repo, revision: &str) -> Result<ApiRepo, Failure> {
        let kind = match repo.kind {
            RepoKind::Model => RepoType::Model,
            RepoKind::Dataset => RepoType::Dataset,
        };
        let api = ApiBuilder::from_cache(Cache::new(self.settings.cache.clone()))
            .with_endpoint(self.endpoint.clone())
            .with_token(self.settings.token.as_ref().map(|token| token.secret().to_owned()))
            .with_user_agent(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|error| Failure::InvalidAnswer(Cause::of(error)))?;
        Ok(api.repo(hf_hub::Repo::with_revision(repo.id.clone(), kind, revision.to_owned())))
    }

    /// Adds the token if the request goes to the hub, and only then.
    pub fn signed<'b>(&self, mut ask: HubRequest<'b>) -> HubRequest<'b> {
        let is_at_home = ask.url.strip_prefix(&self.endpoint).is_some_and(|rest| rest.starts_with('/'));
        if let Some(value) = self.authorization().filter(|_| is_at_home) {
            ask.headers.insert(AUTHORIZATION, value);
        }
        ask
    }

    /// The value of `Authorization`: the token, or the user name and password in the hub's address.
    fn authorization(&self) -> Option<HeaderValue> {
        let text = match &self.settings.token {
            Some(token) => format!("Bearer {}", token.secret()),
            None => format!("Basic {}", base64::encode(&login(&self.settings.endpoint)?)),
        };
        let mut value = HeaderValue::try_from(text).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// Sends a request that hf-hub has built.
    pub fn carry(&self, request: RequestBuilder<WithoutBody>) -> Result<HubResponse, Failure> {
        let url = request.uri_ref().map(ToString::to_string).unwrap_or_default();
        let ask = HubRequest {
            headers: request.headers_ref().cloned().unwrap_or_default(),
            ..HubRequest::new(Method::GET, url)
        };
        let agent = self.agent(&ask.url)?;
        let (config, times) = (agent.config(), agent.config().timeouts());
        let mut request = request
            .config()
            .http_status_as_error(config.http_status_as_error())
            .max_redirects(config.max_redirects())
            .user_agent(AGENT)
            .accept_encoding("identity")
            .proxy(config.proxy().cloned())
            .tls_config(config.tls_config().clone())
            .timeout_resolve(times.resolve)
            .timeout_connect(times.connect)
            .timeout_per_read(config.timeout_per_read())
            .timeout_per_write(config.timeout_per_write())
            .build();
        // Without a token, the hub's address may have a password.
        let ask = if ask.headers.contains_key(AUTHORIZATION) { ask } else { self.signed(ask) };
        if let (Some(headers), Some(value)) = (request.headers_mut(), ask.headers.get(AUTHORIZATION)) {
            headers.insert(AUTHORIZATION, value.clone());
        }
        self.follow(ask, request.call()?)
    }

    /// The response, whatever its status.
    pub fn send(&self, ask: HubRequest) -> Result<HubResponse, Failure> {
        let answer = self.once(&ask)?;
        if ask.follows { self.follow(ask, answer) } else { Ok(answer) }
    }

    /// Follows redirects from the response to `ask`.
    fn follow(&self, mut ask: HubRequest, mut answer: HubResponse) -> Result<HubResponse, Failure> {
        for _ in 0..REDIRECTS {
            let Some(next) = ask.next(&answer)? else { return Ok(answer) };
            drop(answer);
            answer = self.once(&next)?;
            ask = next;
        }
        if ask.next(&answer)?.is_none() { Ok(answer) } else { Err(too_many_redirects()) }
    }

    fn once(&self, ask: &HubRequest) -> Result<HubResponse, Failure> {
        let agent = self.agent(&ask.url)?;
        let mut request = Request::builder().method(ask.method.clone()).uri(ask.url.as_str());
        for (name, value) in &ask.headers {
            request = request.header(name, value);
        }
        Ok(match ask.load {
            RequestBody::Nothing => agent.run(request.body(()).map_err(ureq::Error::from)?)?,
            RequestBody::Bytes(bytes) => agent.run(request.body(bytes).map_err(ureq::Error::from)?)?,
            RequestBody::File(path, size) => {
                let file = files::open(path).map_err(|source| Error::io("read", path, &source))?;
                let body = SendBody::from_owned_reader(SizedReader { file, left: size });
                agent.run(request.header(CONTENT_LENGTH, size).body(body).map_err(ureq::Error::from)?)?
            }
        })
    }

    /// The client for an address.
    fn agent(&self, url: &str) -> Result<Agent, Failure> {
        let (is_https, host, _) =
            origin(url).ok_or_else(|| Failure::InvalidAnswer("an address that is none".into()))?;
        let proxy = self.proxies.to(is_https, &host)?;
        let mut agents = self.agents.borrow_mut();
        if let Some((.., agent)) = agents.iter().find(|(tls, to, _)| *tls == is_https && *to == proxy) {
            return Ok(agent.clone());
        }
        let mut config = Agent::config_builder()
            .user_agent(AGENT)
            .accept_encoding("identity")
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(proxy.clone())
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(self.settings.pace.silence))
            .timeout_per_write(Some(self.settings.pace.silence));
        if is_https || proxy.as_ref().is_some_and(|proxy| proxy.protocol() == ProxyProtocol::Https) {
            config = config.tls_config(TlsConfig::builder().root_certs(roots()?).build());
        }
        let agent = Agent::new_with_config(config.build());
        agents.push((is_https, proxy, agent.clone()));
        Ok(agent)
    }
}

/// The trusted certificates: those of `SSL_CERT_FILE` and `SSL_CERT_DIR`, else the system's, else Mozilla's.
pub(super) fn roots() -> Result<RootCerts> {
    static ROOTS: OnceLock<Option<RootCerts>> = OnceLock::new();
    let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().find(|name| std::env::var_os(name).is_some());
    let roots = ROOTS.get_or_init(|| {
        let found = rustls_native_certs::load_native_certs().certs;
        (!found.is_empty()).then(|| found.iter().map(|der| Certificate::from_der(der).to_owned()).into())
    });
    match (roots, named) {
        (Some(roots), _) => Ok(roots.clone()),
        (None, None) => Ok(RootCerts::WebPki),
        (None, Some(name)) => {
            Err(Error::config(format!("env {name}: no certificate was found there")).hint("name a file of PEM format"))
        }
    }
}

/// Reads as many bytes of a file as were announced. It is an error if the file has become shorter.
struct SizedReader {
    file: File,
    left: u64,
}

impl Read for SizedReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.file.read(&mut buffer[..most])?;
        if count == 0 && most > 0 {
            return Err(io::Error::other("the file became shorter while it was sent"));
        }
        self.left -= count as u64;
        Ok(count)
    }
}

/// The response, if its status is success.
pub(super) fn succeeded(answer: HubResponse) -> Result<HubResponse, Failure> {
    if answer.status().is_success() { Ok(answer) } else { Err(Failure::Status(refused(answer))) }
}

/// The body of a successful response.
pub(super) fn json<T: DeserializeOwned>(answer: HubResponse) -> Result<T, Failure> {
    let bytes = succeeded(answer)?.into_body().into_with_config().limit(ANSWER_BYTES).read_to_vec()?;
    serde_json::from_slice(&bytes).map_err(|error| Failure::InvalidAnswer(Cause::of(error)))
}

/// The hub's explanation of a refusal.
pub(super) fn refused(answer: HubResponse) -> Refused {
    let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let retry_after = header("retry-after").and_then(|value| value.trim().parse().ok()).map(Duration::from_secs);
    let (code, mut words) = (header("x-error-code"), header("x-error-message"));
    let status = answer.status().as_u16();
    if words.is_none() {
        let mut body = Vec::new();
        // The response may break off; what came before may explain enough.
        let _ = answer.into_body().into_reader().take(WORDS_BYTES).read_to_end(&mut body);
        let json: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
        words = json.and_then(|json| Some(json.get("error")?.as_str()?.to_owned()));
    }
    Refused { status, code, words, retry_after }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_grows_or_shrinks_is_not_sent_otherwise_than_announced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        let read = |left: u64| {
            let mut text = String::new();
            SizedReader { file: files::open(&path).unwrap(), left }.read_to_string(&mut text).map(|_| text)
        };
        assert_eq!(read(3).unwrap(), "123");
        assert_eq!(read(5).unwrap(), "12345");
        assert!(read(6).unwrap_err().to_string().contains("became shorter"));
    }

    #[test]
    fn an_upload_may_take_longer_than_a_silence() {
        const BYTES: usize = 48 << 20;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![0; BYTES]).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let silence = Duration::from_millis(1_500);
        let settings = HubSettings {
            endpoint: format!("http://{}", listener.local_addr().unwrap()),
            cache: folder.path().to_owned(),
            token: None,
            offline: false,
            pace: crate::RetryPolicy { silence, ..Default::default() },
        };
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut head, mut byte) = (Vec::new(), [0]);
            while !head.ends_with(b"\r\n\r\n") {
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            let mut part = vec![0; 256 << 10];
            for _ in 0..BYTES / part.len() {
                stream.read_exact(&mut part).unwrap();
                std::thread::sleep(Duration::from_millis(10));
            }
            io::Write::write_all(&mut stream, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
            String::from_utf8(head).unwrap().to_lowercase()
        });
        let ask = HubRequest::new(Method::PUT, format!("{}/file", settings.endpoint)).file(&path, BYTES as u64);
        let began = std::time::Instant::now();
        assert_eq!(HubClient::new(&settings).send(ask).unwrap().status(), 200);
        assert!(began.elapsed() > silence);
        let head = server.join().unwrap();
        assert!(head.contains(&format!("content-length: {BYTES}")) && !head.contains("transfer-encoding"), "{head}");
    }
}

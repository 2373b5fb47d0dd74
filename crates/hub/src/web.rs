//! Fetches files from web addresses that rows name, from public hosts only.
//!
//! Whoever wrote the rows chose the address, so nothing about it is trusted. The IP addresses of its host are checked
//! where the connection is made, and again for each redirect ([`super::public_address`]). No credentials and no cookies
//! are sent. The size of what is read is limited, whatever the response claims. Proxies are not used, because they
//! would resolve the host by themselves, unchecked.
use std::fmt;
use std::io::Read as _;
use std::net::SocketAddr;
use std::time::Duration;

use ureq::Agent;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::http::header::LOCATION;
use ureq::tls::TlsConfig;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

use super::address::{login, origin};
use super::client::{AGENT, HubResponse, check_redirects, redirected, refused, roots};
use super::failure::{Cause, Failure, pause};
use super::public_address::is_public;
use super::settings::RetryPolicy;
use tunesmith_base::error::Result;

/// The time limit of one request, including its response. A redirect starts a new request.
const WHOLE: Duration = Duration::from_secs(300);
/// How many attempts a file gets, with which pauses, and how long to wait for a silent host.
const PACE: RetryPolicy = RetryPolicy {
    attempts: 3,
    first_pause: Duration::from_secs(1),
    longest_pause: Duration::from_secs(60),
    silence: Duration::from_secs(30),
};
/// The time limit for resolving a host, and again for connecting to it.
const CONNECT: Duration = Duration::from_secs(10);
/// The variable with a host and port that may be reached although it is not public, such as `127.0.0.1:8000`. For
/// tests.
const TEST_HOST: &str = "TUNESMITH_TEST_IMAGE_HOST";

/// Why a file was not fetched. The text does not have the address, because its query may hold a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebFailure {
    /// The reason, for messages.
    pub text: String,
    /// Whether another attempt may succeed later.
    pub is_passing: bool,
}

/// A client for files at web addresses that rows name. One client serves all threads.
#[derive(Debug)]
pub struct WebClient {
    agent: Agent,
    pace: RetryPolicy,
}

impl WebClient {
    /// Makes a client with the certificates of the environment.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: `SSL_CERT_FILE` or `SSL_CERT_DIR` names no certificate.
    pub fn new() -> Result<Self> {
        let allowed = std::env::var(TEST_HOST).ok().and_then(|host| host.parse().ok());
        Self::allowing(allowed, PACE)
    }

    fn allowing(allowed: Option<SocketAddr>, pace: RetryPolicy) -> Result<Self> {
        let config = Agent::config_builder()
            .user_agent(AGENT)
            .accept_encoding("identity")
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(pace.silence))
            .timeout_per_write(Some(pace.silence))
            .timeout_global(Some(WHOLE))
            .tls_config(TlsConfig::builder().root_certs(roots()?).build());
        let resolver = PublicHosts { allowed, names: DefaultResolver::default() };
        Ok(Self { agent: Agent::with_parts(config.build(), DefaultConnector::default(), resolver), pace })
    }

    /// Fetches a file of at most `most` bytes. Repeats the request, after pauses, where that may help.
    ///
    /// # Errors
    /// The file cannot be fetched, or is larger than `most`. No failure of this machine, such as a full disk, occurs
    /// here.
    pub fn fetch(&self, url: &str, most: u64) -> Result<Vec<u8>, WebFailure> {
        let mut count = 0;
        loop {
            let failure = match self.once(url, most) {
                Ok(bytes) => return Ok(bytes),
                Err(failure) => failure,
            };
            count += 1;
            match pause(&failure, &self.pace, count) {
                Some(pause) => std::thread::sleep(pause),
                None => return Err(WebFailure { is_passing: failure.is_passing(), text: text(failure) }),
            }
        }
    }

    fn once(&self, url: &str, most: u64) -> Result<Vec<u8>, Failure> {
        let (mut url, mut followed) = (url.to_owned(), 0);
        loop {
            let answer = self.ask(&url)?;
            let status = answer.status();
            if let Some(location) = answer.headers().get(LOCATION).filter(|_| status.is_redirection()) {
                check_redirects(followed)?;
                followed += 1;
                url = redirected(&url, location)?;
                continue;
            }
            if !status.is_success() {
                return Err(Failure::Status(refused(answer)));
            }
            let mut bytes = Vec::new();
            let read = answer.into_body().into_reader().take(most + 1).read_to_end(&mut bytes);
            read.map_err(ureq::Error::from)?;
            if bytes.len() as u64 > most {
                return Err(Failure::InvalidAnswer(format!("more than {} MiB", most >> 20).into()));
            }
            return Ok(bytes);
        }
    }

    fn ask(&self, url: &str) -> Result<HubResponse, Failure> {
        if origin(url).is_none() {
            return Err(Failure::InvalidAnswer("the address is not valid, or not of http or https".into()));
        }
        if login(url).is_some() {
            return Err(Failure::InvalidAnswer("the address has a user name or a password, which are not sent".into()));
        }
        self.agent.get(url).call().map_err(|error| match error {
            ureq::Error::Other(inner) if inner.is::<NotPublic>() => Failure::InvalidAnswer(Cause::of(NotPublic)),
            ureq::Error::HostNotFound => Failure::Network("the host is not known".into()),
            other => other.into(),
        })
    }
}

fn text(failure: Failure) -> String {
    let text = match failure {
        Failure::Status(refused) => format!("the host answered with status {}", refused.status),
        Failure::Network(cause) | Failure::InvalidAnswer(cause) => cause.text,
        Failure::Local(error) => error.message().to_owned(),
    };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

/// Resolves hosts, and keeps only their public addresses. The connection is made to an address that was checked here,
/// so a second lookup with another answer cannot redirect it.
#[derive(Debug)]
struct PublicHosts {
    allowed: Option<SocketAddr>,
    names: DefaultResolver,
}

impl Resolver for PublicHosts {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let mut public = self.empty();
        for address in &*self.names.resolve(uri, config, timeout)? {
            if is_public(address.ip()) || self.allowed == Some(*address) {
                public.push(*address);
            }
        }
        if public.is_empty() { Err(ureq::Error::Other(Box::new(NotPublic))) } else { Ok(public) }
    }
}

#[derive(Debug)]
struct NotPublic;

impl fmt::Display for NotPublic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the host is not on the public internet, and only such hosts are asked")
    }
}

impl std::error::Error for NotPublic {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    /// A server that gives each request the answer for its path, and keeps what was asked.
    fn serve(answer: impl Fn(&str, usize) -> String + Send + Sync + 'static) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let (log, count) = (Arc::clone(&asked), AtomicUsize::new(0));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                let path = head.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned();
                log.lock().unwrap().push(head.join("\n"));
                let _ = stream.write_all(answer(&path, count.fetch_add(1, Ordering::Relaxed)).as_bytes());
            }
        });
        (address, asked)
    }

    fn ok(body: &str) -> String {
        format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    }

    fn to(location: &str) -> String {
        format!("HTTP/1.1 302 Found\r\nConnection: close\r\nContent-Length: 0\r\nLocation: {location}\r\n\r\n")
    }

    fn client(allowed: Option<SocketAddr>) -> WebClient {
        let pace = RetryPolicy { first_pause: Duration::from_millis(1), silence: Duration::from_millis(300), ..PACE };
        WebClient::allowing(allowed, pace).unwrap()
    }

    #[test]
    fn no_request_reaches_a_host_that_is_not_public() {
        let (address, asked) = serve(|_, _| ok("secret"));
        let port = address.port();
        for host in [
            format!("127.0.0.1:{port}"),
            format!("localhost:{port}"),
            format!("[::ffff:127.0.0.1]:{port}"),
            format!("[::ffff:7f00:1]:{port}"),
            format!("[::1]:{port}"),
            format!("0.0.0.0:{port}"),
            format!("2130706433:{port}"), // 127.0.0.1 as one number
            format!("0x7f.1:{port}"),
            "169.254.169.254".to_owned(),
            "10.0.0.1".to_owned(),
            "[fd00:ec2::254]".to_owned(),
        ] {
            let failure = client(None).fetch(&format!("http://{host}/a.png"), 10).unwrap_err();
            assert!(!failure.is_passing || failure.text.contains("not known"), "{host}: {failure:?}");
            assert!(
                ["public internet", "not known", "lookup"].iter().any(|part| failure.text.contains(part)),
                "{host}: {failure:?}"
            );
        }
        assert!(asked.lock().unwrap().is_empty(), "{asked:?}");
    }

    #[test]
    fn redirects_are_checked_and_limited() {
        let (closed, never) = serve(|_, _| ok("secret"));
        let targets = move |path: &str| match path {
            "/loopback" => format!("http://{closed}/"),
            "/name" => format!("http://localhost:{}/", closed.port()),
            "/mapped" => format!("http://[::ffff:127.0.0.1]:{}/", closed.port()),
            "/metadata" => "http://169.254.169.254/latest/meta-data/".to_owned(),
            "/file" => "file:///etc/passwd".to_owned(),
            "/login" => "http://me:word@example.org/".to_owned(),
            "/again" => "/again".to_owned(),
            _ => "/there".to_owned(),
        };
        let (open, _) = serve(move |path, _| if path == "/there" { ok("png") } else { to(&targets(path)) });
        let fetch = |path: &str| client(Some(open)).fetch(&format!("http://{open}{path}"), 10);
        assert_eq!(fetch("/moved").unwrap(), b"png");
        for (path, part) in [
            ("/loopback", "public internet"),
            ("/name", "public internet"),
            ("/mapped", "public internet"),
            ("/metadata", "public internet"),
            ("/file", "not of http or https"),
            ("/login", "user name or a password"),
            ("/again", "more than 10 redirects"),
        ] {
            let failure = fetch(path).unwrap_err();
            assert!(failure.text.contains(part) && !failure.is_passing, "{path}: {failure:?}");
            assert!(!failure.text.contains("word@"), "{failure:?}");
        }
        assert!(never.lock().unwrap().is_empty(), "{never:?}");
    }

    #[test]
    fn what_passes_is_asked_again_and_what_is_read_is_limited() {
        let (server, asked) = serve(|path, count| match path {
            "/busy" if count < 2 => "HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".to_owned(),
            "/gone" => "HTTP/1.1 404 Gone\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".to_owned(),
            // Claims nothing, and goes on.
            "/endless" => format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", "x".repeat(1000)),
            "/liar" => "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 999999999999\r\n\r\nx".to_owned(),
            "/silent" => {
                std::thread::sleep(Duration::from_secs(5));
                ok("png")
            }
            _ => ok("png"),
        });
        let fetch = |path: &str, most: u64| client(Some(server)).fetch(&format!("http://{server}{path}"), most);
        assert_eq!(fetch("/busy", 3).unwrap(), b"png");
        assert_eq!(asked.lock().unwrap().len(), 3);
        let gone = fetch("/gone", 3).unwrap_err();
        assert!(gone.text.contains("404") && !gone.is_passing, "{gone:?}");
        assert_eq!(asked.lock().unwrap().len(), 4, "what is gone is asked for once");
        assert!(fetch("/endless", 999).unwrap_err().text.contains("more than"));
        assert_eq!(fetch("/endless", 1000).unwrap().len(), 1000);
        let liar = fetch("/liar", 10).unwrap_err();
        assert!(liar.is_passing, "{liar:?}");
        // A silent host is not waited for longer than that, three times.
        let began = std::time::Instant::now();
        let silent = fetch("/silent", 10).unwrap_err();
        assert!(silent.is_passing && began.elapsed() < Duration::from_secs(3), "{silent:?}");
        let all = asked.lock().unwrap().join("\n").to_lowercase();
        assert!(
            !all.contains("authorization") && !all.contains("cookie") && all.contains("user-agent: tunesmith/"),
            "{all}"
        );
    }
}

//! Where ranks of several processes meet: a map from names to small values, held by one process (the launcher, or rank
//! 0) and asked by all over TCP. Both sides prove that they know the run's token before anything else is said; the token
//! itself never travels. The host knows which ranks' connections have ended, so that a dead rank can be named.
//!
//! A request is `op u8, length u32, name, length u32, value`; an answer `length u32, value` and the numbers of ranks
//! that are gone. All numbers are little-endian.
use std::collections::{BTreeSet, HashMap};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// The longest name or value: nothing larger is ever made room for.
const LONGEST: usize = 1 << 20;
/// Who has connected must prove itself within this time.
const GREETING: Duration = Duration::from_secs(5);
/// How long the host may take to answer; it only looks into a map.
const ANSWER: Duration = Duration::from_secs(5);
/// What the host proves to a rank that it takes in, and to one that comes after the run's end.
const HOST: &str = "host";
const OVER: &str = "over";
const SET: u8 = 1;
const GET: u8 = 2;
/// How it looks when the other side hangs up.
const CLOSED: [std::io::ErrorKind; 2] = [std::io::ErrorKind::UnexpectedEof, std::io::ErrorKind::ConnectionReset];
/// Says that no value has been set.
const NOTHING: u32 = u32::MAX;

/// What the ranks of a run know and nobody else.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A token that someone has chosen.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: it is shorter than 16 characters.
    pub fn given(text: &str) -> Result<Self> {
        match text.len() {
            16..=1024 => Ok(Self(text.to_owned())),
            length => {
                Err(Error::config(format!("env {}: {length} characters, expected 16 to 1024", super::env::TOKEN))
                    .hint(super::env::MAKE_TOKEN))
            }
        }
    }

    /// A fresh one, of the system's random numbers.
    ///
    /// # Errors
    /// [`crate::Kind::Io`]: the system gives none.
    pub fn fresh() -> Result<Self> {
        Ok(Self(blake3::Hash::from(random()?).to_hex().to_string()))
    }

    /// Its text, for the environment of a rank.
    pub fn text(&self) -> &str {
        &self.0
    }

    fn proof(&self, side: &str, of: &[u8]) -> [u8; 32] {
        let key = blake3::derive_key("tunesmith rendezvous 1", self.0.as_bytes());
        *blake3::keyed_hash(&key, &[side.as_bytes(), of].concat()).as_bytes()
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let source = "/dev/urandom";
    let read = std::fs::File::open(source).and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Error::io("read", source, &error))?;
    Ok(bytes)
}

#[derive(Debug, Default)]
struct Shelf {
    values: HashMap<String, Vec<u8>>,
    /// Connections of each rank.
    present: HashMap<u32, usize>,
    /// Ranks that were there and have no connection left.
    gone: BTreeSet<u32>,
}

/// The host. It serves for the rest of the process's life.
#[derive(Debug)]
pub struct Host {
    address: SocketAddr,
}

impl Host {
    /// Serves on `address` (port 0: a free one).
    ///
    /// # Errors
    /// [`crate::Kind::Peer`]: the address cannot be listened on.
    pub fn serve(address: SocketAddr, token: Token) -> Result<Self> {
        let fail = |error: std::io::Error| {
            Error::peer(format!("cannot listen on {address} for the other ranks: {error}"))
                .hint("another run may hold the port: set another one, or none for a free one")
        };
        let listener = TcpListener::bind(address).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let shelf: Arc<Mutex<Shelf>> = Arc::default();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (shelf, token) = (Arc::clone(&shelf), token.clone());
                // A visitor that says something else than it should is left alone: nobody is to be told.
                std::thread::spawn(move || drop(receive(stream, &token, &shelf)));
            }
        });
        Ok(Self { address })
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

/// One visitor, from its greeting to the end of its connection.
fn receive(mut stream: TcpStream, token: &Token, shelf: &Mutex<Shelf>) -> std::io::Result<()> {
    let refuse = || std::io::Error::from(std::io::ErrorKind::PermissionDenied);
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING))?;
    let ours = random().map_err(|_| refuse())?;
    stream.write_all(&ours)?;
    let (mut theirs, mut proof) = ([0; 36], [0; 32]);
    stream.read_exact(&mut theirs)?;
    stream.read_exact(&mut proof)?;
    // blake3's own type compares in constant time.
    if blake3::Hash::from(token.proof("rank", &[&ours[..], &theirs[..]].concat())) != blake3::Hash::from(proof) {
        return Err(refuse());
    }
    let rank = u32::from_le_bytes([theirs[32], theirs[33], theirs[34], theirs[35]]);
    let lock = || shelf.lock().unwrap_or_else(PoisonError::into_inner);
    // A run that has lost a rank is over: who comes now has been started again, and is early for the next one.
    let over = {
        let mut shelf = lock();
        let over = !shelf.gone.is_empty();
        if !over {
            *shelf.present.entry(rank).or_default() += 1;
        }
        over
    };
    let answer = stream.write_all(&token.proof(if over { OVER } else { HOST }, &[&theirs[..], &ours[..]].concat()));
    if over {
        return answer;
    }
    let served = answer.and_then(|()| stream.set_read_timeout(None)).and_then(|()| serve(&mut stream, &lock));
    let mut shelf = lock();
    let left = shelf.present.entry(rank).or_default();
    *left -= 1;
    if *left == 0 {
        shelf.gone.insert(rank);
    }
    served
}

fn serve<'a>(stream: &mut TcpStream, lock: &impl Fn() -> MutexGuard<'a, Shelf>) -> std::io::Result<()> {
    loop {
        let mut operation = [0];
        stream.read_exact(&mut operation)?;
        let name = String::from_utf8_lossy(&read_bytes(stream)?).into_owned();
        let value = read_bytes(stream)?;
        let mut shelf = lock();
        if operation[0] == SET {
            shelf.values.insert(name.clone(), value);
        }
        let mut answer = Vec::new();
        match shelf.values.get(&name).filter(|_| operation[0] == GET) {
            Some(value) => write_bytes(&mut answer, value),
            None => answer.extend(NOTHING.to_le_bytes()),
        }
        let gone: Vec<u8> = shelf.gone.iter().flat_map(|rank| rank.to_le_bytes()).collect();
        write_bytes(&mut answer, &gone);
        drop(shelf);
        stream.write_all(&answer)?;
    }
}

fn write_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

fn read_length(stream: &mut impl Read) -> std::io::Result<u32> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    Ok(u32::from_le_bytes(length))
}

fn read_sized(stream: &mut impl Read, length: u32) -> std::io::Result<Vec<u8>> {
    if length as usize > LONGEST {
        return Err(std::io::Error::from(std::io::ErrorKind::InvalidData));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_bytes(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let length = read_length(stream)?;
    read_sized(stream, length)
}

/// A value, if it has been set, and the ranks that are gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// The value.
    pub value: Option<Vec<u8>>,
    /// Ranks whose connections have ended.
    pub gone: Vec<usize>,
}

/// Why a rank has not been taken in.
#[derive(Debug)]
pub enum Refused {
    /// Nobody listens there, or the way is broken.
    Unreachable(Error),
    /// Who listens there does not know this run's token.
    Stranger(Error),
    /// The run there has lost a rank: it is one before a restart.
    Over(Error),
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        let (Refused::Unreachable(error) | Refused::Stranger(error) | Refused::Over(error)) = refused;
        error
    }
}

/// A rank's connection to the host.
#[derive(Debug)]
pub struct Store {
    stream: Mutex<TcpStream>,
    rank: usize,
    host: SocketAddr,
    here: IpAddr,
}

impl Store {
    /// Connects as `rank`, once.
    ///
    /// # Errors
    /// Why not.
    pub fn connect(host: SocketAddr, token: &Token, rank: usize) -> std::result::Result<Self, Refused> {
        let fail = |error: std::io::Error| {
            Refused::Unreachable(Error::peer(format!("rank {rank}: no way to the rendezvous at {host}: {error}")))
        };
        let mut stream = TcpStream::connect_timeout(&host, GREETING).map_err(fail)?;
        let mut greet = || -> std::io::Result<Option<&str>> {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(ANSWER))?;
            let mut theirs = [0; 32];
            stream.read_exact(&mut theirs)?;
            let refused = |_| std::io::Error::from(std::io::ErrorKind::PermissionDenied);
            let ours = [&random().map_err(refused)?[..], &(rank as u32).to_le_bytes()[..]].concat();
            let mut greeting = ours.clone();
            greeting.extend(token.proof("rank", &[&theirs[..], &ours[..]].concat()));
            stream.write_all(&greeting)?;
            let mut proof = [0; 32];
            stream.read_exact(&mut proof)?;
            let expected = |side: &str| blake3::Hash::from(token.proof(side, &[&ours[..], &theirs[..]].concat()));
            Ok([HOST, OVER].into_iter().find(|side| expected(side) == blake3::Hash::from(proof)))
        };
        match greet() {
            Ok(Some(HOST)) => {}
            Ok(Some(_)) => return Err(Refused::Over(over(rank, host))),
            Ok(None) => return Err(Refused::Stranger(stranger(rank, host))),
            Err(error) if CLOSED.contains(&error.kind()) => return Err(Refused::Stranger(stranger(rank, host))),
            Err(error) => return Err(fail(error)),
        }
        let here = stream.local_addr().map_err(fail)?.ip();
        Ok(Self { stream: Mutex::new(stream), rank, host, here })
    }

    /// Where the host listens.
    pub const fn host(&self) -> SocketAddr {
        self.host
    }

    /// This rank's own address, as the host's network sees it.
    pub const fn here(&self) -> IpAddr {
        self.here
    }

    fn ask(&self, operation: u8, name: &str, value: &[u8]) -> Result<Look> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let mut request = vec![operation];
        write_bytes(&mut request, name.as_bytes());
        write_bytes(&mut request, value);
        let mut talk = || -> std::io::Result<Look> {
            stream.write_all(&request)?;
            let value = match read_length(&mut *stream)? {
                NOTHING => None,
                length => Some(read_sized(&mut *stream, length)?),
            };
            let gone = read_bytes(&mut *stream)?;
            let rank = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
            Ok(Look { value, gone: gone.chunks_exact(4).map(rank).collect() })
        };
        talk().map_err(|error| {
            let what = match error.kind() {
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => "does not answer".to_owned(),
                _ => format!("is gone ({error})"),
            };
            Error::peer(format!("rank {}: the rendezvous at {} {what}", self.rank, self.host))
                .hint("its process, its machine or the way there is lost")
        })
    }

    /// Sets a value.
    ///
    /// # Errors
    /// [`crate::Kind::Peer`]: the host is gone.
    pub fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.ask(SET, name, value).map(drop)
    }

    /// Looks, without waiting.
    ///
    /// # Errors
    /// As [`Store::set`].
    pub fn look(&self, name: &str) -> Result<Look> {
        self.ask(GET, name, &[])
    }

    /// Waits for a value (`limit`: no longer than this) while no rank has gone.
    ///
    /// # Errors
    /// [`crate::Kind::Peer`]: time is up, a rank has ended, or the host is gone.
    pub fn wait(&self, name: &str, limit: Option<Duration>) -> Result<Vec<u8>> {
        let (began, mut pause) = (Instant::now(), Duration::from_millis(1));
        loop {
            let look = self.look(name)?;
            if let Some(value) = look.value {
                return Ok(value);
            }
            let what = || format!("rank {}: waiting for `{name}`", self.rank);
            if let Some(rank) = look.gone.first() {
                return Err(Error::peer(format!("{}: rank {rank} has ended", what())));
            }
            if limit.is_some_and(|limit| began.elapsed() > limit) {
                return Err(Error::peer(format!("{}: nothing within {:.1} s", what(), began.elapsed().as_secs_f64())));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }
}

fn over(rank: usize, host: SocketAddr) -> Error {
    Error::peer(format!("rank {rank}: the run at {host} has lost a rank already"))
}

fn stranger(rank: usize, host: SocketAddr) -> Error {
    Error::config(format!("rank {rank}: whoever listens at {host} does not know this run's token"))
        .hint("every rank needs the same token; another run may hold the port")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(token: &Token) -> Host {
        Host::serve(SocketAddr::from(([127, 0, 0, 1], 0)), token.clone()).unwrap()
    }

    #[test]
    fn values_reach_the_others_and_the_dead_are_known() {
        let token = Token::fresh().unwrap();
        let host = local(&token);
        let first = Store::connect(host.address(), &token, 0).unwrap();
        let second = Store::connect(host.address(), &token, 1).unwrap();
        assert_eq!(first.look("name").unwrap(), Look { value: None, gone: vec![] });
        second.set("name", b"value").unwrap();
        second.set("empty", b"").unwrap();
        assert_eq!(first.wait("name", None).unwrap(), b"value");
        assert_eq!(first.wait("empty", None).unwrap(), b"");
        let late = first.wait("never", Some(Duration::from_millis(20))).unwrap_err();
        assert!(late.message().starts_with("rank 0: waiting for `never`: nothing within"), "{late}");
        drop(second);
        assert_eq!(first.wait("never", None).unwrap_err().message(), "rank 0: waiting for `never`: rank 1 has ended");
        // Started again, it belongs to another run.
        let early = Store::connect(host.address(), &token, 1).unwrap_err();
        assert!(matches!(early, Refused::Over(_)), "{early:?}");
    }

    #[test]
    fn who_does_not_know_the_token_gets_nothing() {
        let token = Token::fresh().unwrap();
        let host = local(&token);
        let other = Token::given("not the token of this run").unwrap();
        let error = Error::from(Store::connect(host.address(), &other, 0).unwrap_err());
        assert!(error.message().contains("does not know this run's token"), "{error}");
        assert_eq!(error.kind(), crate::Kind::Config);
        assert_eq!(Token::given("short").unwrap_err().kind(), crate::Kind::Config);
        // Nor does a host that only repeats what it is told pass for the right one.
        let mirror = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = mirror.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = mirror.accept().unwrap();
            stream.write_all(&[7; 32]).unwrap();
            let mut greeting = [0; 68];
            stream.read_exact(&mut greeting).unwrap();
            stream.write_all(&greeting[36..]).unwrap();
        });
        assert!(Store::connect(address, &token, 0).is_err());
    }

    #[test]
    fn noise_neither_ends_the_host_nor_makes_it_take_memory() {
        let token = Token::fresh().unwrap();
        let host = local(&token);
        let mut noise = TcpStream::connect(host.address()).unwrap();
        noise.write_all(&[0xff; 4096]).unwrap();
        let store = Store::connect(host.address(), &token, 0).unwrap();
        let mut stream = store.stream.lock().unwrap();
        stream.write_all(&[SET, 0xff, 0xff, 0xff, 0x7f]).unwrap();
        drop(stream);
        assert!(store.look("x").is_err(), "a length beyond the limit ends the connection");
        // The host answers all the same.
        assert!(matches!(Store::connect(host.address(), &token, 0), Err(Refused::Over(_))));
    }
}

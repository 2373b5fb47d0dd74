//! The client of the rendezvous: a map from names to small values that one process holds ([`super::host`]: the launcher, or
//! rank 0) and all ranks use over TCP. First, both sides prove that they know the run's token, without sending it. The host knows
//! which ranks have connected and whose connections have ended, so that errors can name them.
//!
//! ```text
//! host   magic [8], challenge [32]
//! rank   magic [8], nonce [32], rank u32, claim (JSON), proof [32] over challenge, nonce, rank and claim
//! host   status u8, text, proof [32] over nonce, challenge, status and text
//! rank   operation u8, name, value                          as often as it likes
//! host   value (length u32::MAX: none), the ranks that are gone
//! ```
//!
//! A text is its length (u32) and its bytes. All numbers are little-endian.
use std::io::{ErrorKind, Read, Result as IoResult, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::host::{DISPUTE, FULL, GET, GREETING, IN, LONGEST, MAGIC, MEMBERS, MembersReply, NOTHING, OVER, SET};
use super::membership::{Claim, LONGEST_CLAIM};
use super::token::{RunToken, random};
use super::wire::{DeadlineStream, Sent, is_late, notice_loss, put_bytes, read_bytes, read_exactly, read_u32};
use super::{LOST, NO_WAY};
use tunesmith_base::error::{Error, Result};

/// How long the host may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoreReply {
    /// The value, if it has been set.
    pub value: Option<Vec<u8>>,
    /// Ranks whose connections have ended.
    pub gone: Vec<usize>,
}

/// Why the host did not accept a rank.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// Nobody listens there, or the network fails.
    Unreachable(Error),
    /// The process that listens there is not this run's rendezvous: it sends nothing, speaks another protocol, has another
    /// token, or all ranks of its run are connected.
    Foreign(Error),
    /// The run there has lost a rank: this rank belongs to a restart.
    RunEnded(Error),
    /// The ranks disagree; the message says on what.
    Dispute(Error),
}

impl From<ConnectError> for Error {
    fn from(refused: ConnectError) -> Self {
        let (ConnectError::Unreachable(error)
        | ConnectError::Foreign(error)
        | ConnectError::RunEnded(error)
        | ConnectError::Dispute(error)) = refused;
        error
    }
}

/// The hint if ranks disagree.
const ALIKE: &str = "start every rank with the same program, command, configuration and variables, each rank once";

/// A rank's connection to the host.
#[derive(Debug)]
pub struct Store {
    stream: Mutex<TcpStream>,
    rank: usize,
    host: SocketAddr,
    here: IpAddr,
}

/// A host's answer to a greeting.
enum Handshake {
    /// A status, and the text of a refusal.
    Answer(u8, String),
    /// The host does not know the token.
    WrongToken,
    /// The process there speaks another protocol.
    OtherProtocol,
}

/// Proves to each side that the other knows the token, and asks to join as `claim` says.
fn handshake(stream: &mut (impl Read + Write), token: &RunToken, claim: &Claim) -> IoResult<Handshake> {
    let (mut magic, mut theirs) = ([0; 8], [0; 32]);
    stream.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Ok(Handshake::OtherProtocol);
    }
    stream.read_exact(&mut theirs)?;
    let ours = random().map_err(|_| ErrorKind::PermissionDenied)?;
    let (rank, text) = (claim.rank.to_le_bytes(), serde_json::to_vec(claim)?);
    let mut greeting = [&MAGIC[..], &ours, &rank].concat();
    put_bytes(&mut greeting, &text);
    greeting.extend(token.proof("rank", &[&theirs, &ours, &rank, &text]).as_bytes());
    stream.write_all(&greeting)?;
    let (mut status, mut proof) = ([0], [0; 32]);
    let answered = stream.read_exact(&mut status).and_then(|()| {
        let said = read_bytes(stream, LONGEST_CLAIM)?;
        stream.read_exact(&mut proof).map(|()| said)
    });
    let said = match answered {
        Ok(said) => said,
        // A host closes the connection to a rank that does not know its token.
        Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
            return Ok(Handshake::WrongToken);
        }
        Err(error) => return Err(error),
    };
    if token.proof("host", &[&ours, &theirs, &status, &said]) != blake3::Hash::from(proof) {
        return Ok(Handshake::WrongToken);
    }
    Ok(Handshake::Answer(status[0], String::from_utf8_lossy(&said).into_owned()))
}

/// Sends a request and reads its answer.
fn exchange(stream: &mut (impl Read + Write), request: &[u8]) -> IoResult<StoreReply> {
    stream.write_all(request)?;
    let value = match read_u32(stream)? {
        NOTHING => None,
        length => Some(read_exactly(stream, length.into(), LONGEST)?),
    };
    let gone = read_bytes(stream, LONGEST)?;
    let rank = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
    Ok(StoreReply { value, gone: gone.chunks_exact(4).map(rank).collect() })
}

impl Store {
    /// Connects as the rank in `claim`. Tries once.
    ///
    /// # Errors
    /// Why the host did not accept this rank.
    pub(crate) fn connect(
        host: SocketAddr,
        token: &RunToken,
        claim: &Claim,
    ) -> std::result::Result<Self, ConnectError> {
        let rank = claim.rank as usize;
        let me = format!("rank {rank} ({})", claim.who);
        let unreachable = |error: std::io::Error| {
            let message = format!("{me}: cannot reach the rendezvous at {host}");
            ConnectError::Unreachable(Error::peer(message).caused_by(error).hint(NO_WAY))
        };
        let foreign = |what: &str| {
            ConnectError::Foreign(
                Error::peer(format!("{me}: the process that listens at {host} {what}"))
                    .hint("another program may hold the port, or MASTER_ADDR and MASTER_PORT name another place"),
            )
        };
        let stream = TcpStream::connect_timeout(&host, GREETING).map_err(unreachable)?;
        stream.set_nodelay(true).map_err(unreachable)?;
        notice_loss(&stream);
        match handshake(&mut DeadlineStream::new(&stream, GREETING), token, claim) {
            Ok(Handshake::Answer(IN, _)) => {}
            Ok(Handshake::Answer(OVER, _)) => {
                let text = format!("rank {rank}: the run at {host} has lost a rank already");
                return Err(ConnectError::RunEnded(Error::peer(text).hint(LOST)));
            }
            Ok(Handshake::Answer(FULL, text)) => return Err(foreign(&format!("accepts no more ranks: {text}"))),
            Ok(Handshake::Answer(DISPUTE, text)) => return Err(ConnectError::Dispute(dispute(rank, &text))),
            Ok(Handshake::Answer(status, _)) => return Err(foreign(&format!("sends the unknown status {status}"))),
            Ok(Handshake::WrongToken) => return Err(ConnectError::Foreign(wrong_token(&me, host))),
            Ok(Handshake::OtherProtocol) => {
                return Err(foreign("speaks another protocol: another program, or another version of this one"));
            }
            Err(error) if is_late(&error) => return Err(foreign("sends nothing, or sends too slowly")),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return Err(foreign("closes the connection at once"));
            }
            Err(error) if error.kind() == ErrorKind::InvalidData => return Err(foreign(&error.to_string())),
            Err(error) => return Err(unreachable(error)),
        }
        let here = stream.local_addr().map_err(unreachable)?.ip();
        Ok(Self { stream: Mutex::new(stream), rank, host, here })
    }

    /// The address at which the host listens.
    pub const fn host(&self) -> SocketAddr {
        self.host
    }

    /// This rank's own address, as the host's network sees it.
    pub const fn here(&self) -> IpAddr {
        self.here
    }

    fn ask(&self, operation: u8, name: &str, value: &[u8]) -> Result<StoreReply> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let mut request = vec![operation];
        put_bytes(&mut request, name.as_bytes());
        put_bytes(&mut request, value);
        exchange(&mut DeadlineStream::new(&stream, ANSWER), &request).map_err(|error| {
            let what = if is_late(&error) { "does not answer" } else { "is gone" };
            Error::peer(format!("rank {}: the rendezvous at {} {what}", self.rank, self.host))
                .caused_by(error)
                .hint("its process, its machine or the way there is lost")
        })
    }

    /// Sets a value.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: the host is gone.
    pub fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.ask(SET, name, value).map(drop)
    }

    /// Looks a value up, without waiting.
    ///
    /// # Errors
    /// As [`Store::set`].
    pub(crate) fn get(&self, name: &str) -> Result<StoreReply> {
        self.ask(GET, name, &[])
    }

    /// The ranks that have connected, and those whose connections have ended.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the ranks disagree; as [`Store::set`].
    pub(crate) fn members(&self) -> Result<(Vec<usize>, Vec<usize>)> {
        let StoreReply { value, gone } = self.ask(MEMBERS, "", &[])?;
        let called: MembersReply = serde_json::from_slice(&value.unwrap_or_default()).unwrap_or_default();
        match called.dispute {
            Some(text) => Err(dispute(self.rank, &text)),
            None => Ok((called.present.into_iter().map(|rank| rank as usize).collect(), gone)),
        }
    }

    /// Waits for a value, at most for `limit`, and only as long as no rank's connection has ended.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: time is up, a rank has ended, or the host is gone.
    pub fn wait(&self, name: &str, limit: Option<Duration>) -> Result<Vec<u8>> {
        let (began, mut pause) = (Instant::now(), Duration::from_millis(1));
        loop {
            let look = self.get(name)?;
            if let Some(value) = look.value {
                return Ok(value);
            }
            let what = || format!("rank {}: waiting for `{name}`", self.rank);
            if let Some(rank) = look.gone.first() {
                return Err(Error::peer(format!("{}: rank {rank} has ended", what())).hint(LOST));
            }
            if limit.is_some_and(|limit| began.elapsed() > limit) {
                let waited = began.elapsed().as_secs_f64();
                return Err(Error::peer(format!("{}: nothing within {waited:.1} s", what())).hint(LOST));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }
}

fn dispute(rank: usize, text: &str) -> Error {
    Error::config(format!("rank {rank}: {text}")).hint(ALIKE)
}

fn wrong_token(me: &str, host: SocketAddr) -> Error {
    Error::config(format!("{me}: the process that listens at {host} does not have this run's token"))
        .hint("every rank needs the same token; another run may hold the port")
}

/// Reads `bytes` as if a new connection, a rank and a host had sent them: for fuzzing. Every read is bounded, and none
/// panics.
pub fn read_anything(bytes: &[u8]) {
    let Ok(token) = RunToken::given("the token of a fuzzed run") else { return };
    let state = Mutex::default();
    let from = IpAddr::from([127, 0, 0, 1]);
    let taken = super::host::admit(&mut Sent(bytes), &token, &state, from);
    debug_assert!(!matches!(taken, Ok(Some(_))), "nobody who does not know the token is taken in");
    let mut frames = Sent(bytes);
    let mut operation = [0];
    while frames.read_exact(&mut operation).is_ok()
        && super::host::answer(operation[0] % 4, &mut frames, &state, 1).is_ok()
    {}
    let claim = Claim { rank: 0, size: 2, who: String::new(), facts: super::membership::Facts::new() };
    // The results do not matter.
    let _ = handshake(&mut Sent(bytes), &token, &claim);
    let _ = handshake(&mut Sent(&[&MAGIC[..], bytes].concat()), &token, &claim);
    let _ = exchange(&mut Sent(bytes), &[]);
    let _ = serde_json::from_slice::<Claim>(bytes);
    let _ = serde_json::from_slice::<MembersReply>(bytes);
}

#[cfg(test)]
mod tests;

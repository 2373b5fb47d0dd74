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

use super::host::{Called, DISPUTE, FULL, GET, GREETING, IN, LONGEST, MAGIC, NOTHING, OVER, ROLL, SET};
use super::membership::{Claim, LONGEST_CLAIM};
use super::token::{Token, random};
use super::wire::{Sent, Until, is_late, notice_loss, put_bytes, read_bytes, read_exactly, read_u32};
use super::{LOST, NO_WAY};
use tunesmith_base::error::{Error, Result};

/// How long the host may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// The value, if it has been set.
    pub value: Option<Vec<u8>>,
    /// Ranks whose connections have ended.
    pub gone: Vec<usize>,
}

/// Why the host did not accept a rank.
#[derive(Debug)]
pub enum Refused {
    /// Nobody listens there, or the network fails.
    Unreachable(Error),
    /// The process that listens there is not this run's rendezvous: it sends nothing, speaks another protocol, has another
    /// token, or all ranks of its run are connected.
    Foreign(Error),
    /// The run there has lost a rank: this rank belongs to a restart.
    Over(Error),
    /// The ranks disagree.
    Dispute(Error),
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        let (Refused::Unreachable(error) | Refused::Foreign(error) | Refused::Over(error) | Refused::Dispute(error)) =
            refused;
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
enum Greeted {
    /// Its status and text.
    Answer(u8, String),
    /// It does not know the token.
    Stranger,
    /// It speaks another protocol.
    Other,
}

/// Greets a host as `claim` says.
fn greet(stream: &mut (impl Read + Write), token: &Token, claim: &Claim) -> IoResult<Greeted> {
    let (mut magic, mut theirs) = ([0; 8], [0; 32]);
    stream.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Ok(Greeted::Other);
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
        // A host hangs up on who does not know its token.
        Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
            return Ok(Greeted::Stranger);
        }
        Err(error) => return Err(error),
    };
    if token.proof("host", &[&ours, &theirs, &status, &said]) != blake3::Hash::from(proof) {
        return Ok(Greeted::Stranger);
    }
    Ok(Greeted::Answer(status[0], String::from_utf8_lossy(&said).into_owned()))
}

/// Sends a request and reads its answer.
fn exchange(stream: &mut (impl Read + Write), request: &[u8]) -> IoResult<Look> {
    stream.write_all(request)?;
    let value = match read_u32(stream)? {
        NOTHING => None,
        length => Some(read_exactly(stream, length.into(), LONGEST)?),
    };
    let gone = read_bytes(stream, LONGEST)?;
    let rank = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
    Ok(Look { value, gone: gone.chunks_exact(4).map(rank).collect() })
}

impl Store {
    /// Connects as the rank in `claim`. Tries once.
    ///
    /// # Errors
    /// Why the host did not accept this rank.
    pub fn connect(host: SocketAddr, token: &Token, claim: &Claim) -> std::result::Result<Self, Refused> {
        let rank = claim.rank as usize;
        let me = format!("rank {rank} ({})", claim.who);
        let unreachable = |error: std::io::Error| {
            Refused::Unreachable(Error::peer(format!("{me}: no way to the rendezvous at {host}: {error}")).hint(NO_WAY))
        };
        let foreign = |what: &str| {
            Refused::Foreign(
                Error::peer(format!("{me}: the process that listens at {host} {what}"))
                    .hint("another program may hold the port, or MASTER_ADDR and MASTER_PORT name another place"),
            )
        };
        let stream = TcpStream::connect_timeout(&host, GREETING).map_err(unreachable)?;
        stream.set_nodelay(true).map_err(unreachable)?;
        notice_loss(&stream);
        match greet(&mut Until::after(&stream, GREETING), token, claim) {
            Ok(Greeted::Answer(IN, _)) => {}
            Ok(Greeted::Answer(OVER, _)) => {
                let text = format!("rank {rank}: the run at {host} has lost a rank already");
                return Err(Refused::Over(Error::peer(text).hint(LOST)));
            }
            Ok(Greeted::Answer(FULL, text)) => return Err(foreign(&format!("accepts no more ranks: {text}"))),
            Ok(Greeted::Answer(DISPUTE, text)) => return Err(Refused::Dispute(dispute(rank, &text))),
            Ok(Greeted::Answer(status, _)) => return Err(foreign(&format!("sends the unknown status {status}"))),
            Ok(Greeted::Stranger) => return Err(Refused::Foreign(stranger(&me, host))),
            Ok(Greeted::Other) => {
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

    /// Where the host listens.
    pub const fn host(&self) -> SocketAddr {
        self.host
    }

    /// This rank's own address, as the host's network sees it.
    pub const fn here(&self) -> IpAddr {
        self.here
    }

    fn ask(&self, operation: u8, name: &str, value: &[u8]) -> Result<Look> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let mut request = vec![operation];
        put_bytes(&mut request, name.as_bytes());
        put_bytes(&mut request, value);
        exchange(&mut Until::after(&stream, ANSWER), &request).map_err(|error| {
            let what = if is_late(&error) { "does not answer".to_owned() } else { format!("is gone ({error})") };
            Error::peer(format!("rank {}: the rendezvous at {} {what}", self.rank, self.host))
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
    pub fn look(&self, name: &str) -> Result<Look> {
        self.ask(GET, name, &[])
    }

    /// The ranks that have connected, and those whose connections have ended.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the ranks disagree; as [`Store::set`].
    pub fn roll(&self) -> Result<(Vec<usize>, Vec<usize>)> {
        let Look { value, gone } = self.ask(ROLL, "", &[])?;
        let called: Called = serde_json::from_slice(&value.unwrap_or_default()).unwrap_or_default();
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
            let look = self.look(name)?;
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

fn stranger(me: &str, host: SocketAddr) -> Error {
    Error::config(format!("{me}: the process that listens at {host} does not have this run's token"))
        .hint("every rank needs the same token; another run may hold the port")
}

/// What other processes may send in place of a visitor, a rank, and a host: for fuzzing. Every read is bounded, and none
/// panics, whatever the bytes are.
pub fn read_anything(bytes: &[u8]) {
    let Ok(token) = Token::given("the token of a fuzzed run") else { return };
    let shelf = Mutex::default();
    let from = IpAddr::from([127, 0, 0, 1]);
    let taken = super::host::admit(&mut Sent(bytes), &token, &shelf, from);
    debug_assert!(!matches!(taken, Ok(Some(_))), "nobody who does not know the token is taken in");
    let mut frames = Sent(bytes);
    let mut operation = [0];
    while frames.read_exact(&mut operation).is_ok()
        && super::host::answer(operation[0] % 4, &mut frames, &shelf, 1).is_ok()
    {}
    let claim = Claim { rank: 0, size: 2, who: String::new(), facts: super::membership::Facts::new() };
    // What comes of them is of no interest.
    let _ = greet(&mut Sent(bytes), &token, &claim);
    let _ = greet(&mut Sent(&[&MAGIC[..], bytes].concat()), &token, &claim);
    let _ = exchange(&mut Sent(bytes), &[]);
    let _ = serde_json::from_slice::<Claim>(bytes);
    let _ = serde_json::from_slice::<Called>(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::World;
    use crate::host::Host;
    use crate::membership::Facts;
    use std::net::TcpListener;

    fn local(token: &Token) -> Host {
        Host::serve(SocketAddr::from(([127, 0, 0, 1], 0)), token.clone()).unwrap()
    }

    fn claim(rank: usize) -> Claim {
        Claim::of(World { rank, size: 2, local_rank: rank, local_size: 2 }, Facts::new())
    }

    #[test]
    fn values_reach_the_others_and_the_dead_are_known() {
        let token = Token::fresh().unwrap();
        let host = local(&token);
        let first = Store::connect(host.address(), &token, &claim(0)).unwrap();
        let second = Store::connect(host.address(), &token, &claim(1)).unwrap();
        assert_eq!(first.look("name").unwrap(), Look { value: None, gone: vec![] });
        second.set("name", b"value").unwrap();
        second.set("empty", b"").unwrap();
        assert_eq!(first.wait("name", None).unwrap(), b"value");
        assert_eq!(first.wait("empty", None).unwrap(), b"");
        assert_eq!(first.roll().unwrap(), (vec![0, 1], vec![]));
        let late = first.wait("never", Some(Duration::from_millis(20))).unwrap_err();
        assert!(late.message().starts_with("rank 0: waiting for `never`: nothing within"), "{late}");
        drop(second);
        assert_eq!(first.wait("never", None).unwrap_err().message(), "rank 0: waiting for `never`: rank 1 has ended");
        // Started again, it belongs to another run.
        let early = Store::connect(host.address(), &token, &claim(1)).unwrap_err();
        assert!(matches!(early, Refused::Over(_)), "{early:?}");
    }

    #[test]
    fn who_does_not_know_the_token_gets_nothing() {
        let token = Token::fresh().unwrap();
        let host = local(&token);
        let other = Token::given("not the token of this run").unwrap();
        let error = Error::from(Store::connect(host.address(), &other, &claim(0)).unwrap_err());
        assert!(error.message().contains("does not have this run's token"), "{error}");
        assert_eq!(error.kind(), tunesmith_base::Kind::Config);
        assert_eq!(Token::given("short").unwrap_err().kind(), tunesmith_base::Kind::Config);
        // Nor does a host that only repeats what it is told pass for the right one.
        let mirror = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = mirror.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = mirror.accept().unwrap();
            stream.write_all(&[&MAGIC[..], &[7; 32]].concat()).unwrap();
            let mut heard = [0; 512];
            let count = stream.read(&mut heard).unwrap();
            stream.write_all(&heard[..count]).unwrap();
        });
        assert!(matches!(Store::connect(address, &token, &claim(0)), Err(Refused::Foreign(_))));
    }

    /// What a visitor that knows the token says, recorded.
    struct Recorded<'a> {
        stream: &'a TcpStream,
        said: Vec<u8>,
    }

    impl Read for Recorded<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
            self.stream.read(buffer)
        }
    }

    impl Write for Recorded<'_> {
        fn write(&mut self, buffer: &[u8]) -> IoResult<usize> {
            self.said.extend(buffer);
            self.stream.write(buffer)
        }
        fn flush(&mut self) -> IoResult<()> {
            Ok(())
        }
    }

    #[test]
    fn a_greeting_that_is_said_again_opens_nothing() {
        let token = Token::fresh().unwrap();
        let host = local(&token);
        let stream = TcpStream::connect(host.address()).unwrap();
        let mut recorded = Recorded { stream: &stream, said: Vec::new() };
        assert!(matches!(greet(&mut recorded, &token, &claim(0)), Ok(Greeted::Answer(IN, _))));
        // The same rank of another run of the same token would be welcome; a recording is not.
        for _ in 0..20 {
            let mut again = TcpStream::connect(host.address()).unwrap();
            again.write_all(&recorded.said).unwrap();
            let mut heard = Vec::new();
            let ended = again.read_to_end(&mut heard);
            assert!(heard.len() <= 40, "the challenge and nothing else: {ended:?}, {} bytes", heard.len());
        }
        let second = Store::connect(host.address(), &token, &claim(1)).unwrap();
        assert_eq!(second.roll().unwrap().0, [0, 1], "the run is as it was");
    }

    #[test]
    fn noise_neither_ends_the_host_nor_makes_it_take_memory() {
        let token = Token::fresh().unwrap();
        let host = local(&token);
        let mut noise = TcpStream::connect(host.address()).unwrap();
        noise.write_all(&[0xff; 4096]).unwrap();
        // Connections that say nothing, more than are greeted at a time.
        let mute: Vec<_> = (0..200).map(|_| TcpStream::connect(host.address()).unwrap()).collect();
        let store = Store::connect(host.address(), &token, &claim(0)).unwrap();
        drop(mute);
        let mut stream = store.stream.lock().unwrap();
        let mut frame = vec![SET];
        frame.extend(1u32.to_le_bytes());
        frame.push(b'x');
        frame.extend(0x7fff_ffffu32.to_le_bytes());
        stream.write_all(&frame).unwrap();
        drop(stream);
        assert!(store.look("x").is_err(), "a length beyond the limit ends the connection");
        // The host answers all the same.
        assert!(matches!(Store::connect(host.address(), &token, &claim(0)), Err(Refused::Over(_))));
    }

    #[test]
    fn who_listens_and_does_not_speak_the_protocol_is_told_from_who_is_away() {
        let token = Token::fresh().unwrap();
        let speaks = |act: fn(&mut TcpStream)| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            std::thread::spawn(move || act(&mut listener.accept().unwrap().0));
            match Store::connect(address, &token, &claim(1)) {
                Err(Refused::Foreign(error)) => error.message().to_owned(),
                other => panic!("{other:?}"),
            }
        };
        assert!(speaks(|_| ()).contains("closes the connection at once"));
        assert!(speaks(|stream| stream.write_all(&[b'S'; 60]).unwrap()).contains("speaks another protocol"));
        let mute = speaks(|_| std::thread::sleep(Duration::from_secs(6)));
        assert!(mute.contains("rank 1 (process") && mute.contains("sends nothing"), "{mute}");
        // Nobody: the port is closed again.
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(matches!(Store::connect(closed, &token, &claim(1)), Err(Refused::Unreachable(_))));
    }
}

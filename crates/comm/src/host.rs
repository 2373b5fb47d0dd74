//! The host of a run's rendezvous, in the launcher or in rank 0: a map from names to small values, and the `Membership` of the
//! ranks. [`super::store`] describes the protocol.
use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Result as IoResult, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::membership::{Admission, Claim, LONGEST_CLAIM, Membership};
use super::token::{RunToken, random};
use super::wire::{DeadlineStream, notice_loss, put_bytes, read_bytes, read_u32};
use tunesmith_base::error::{Error, Result};

/// The first bytes of both sides: the protocol and its version.
pub(super) const MAGIC: [u8; 8] = *b"tsmith02";
/// Bytes of the longest name.
const LONGEST_NAME: usize = 1 << 10;
/// Bytes of the longest value.
pub(super) const LONGEST: usize = 1 << 20;
/// The most bytes of all values together.
const ALL_VALUES: usize = 64 << 20;
/// How long a visitor may take to prove that it knows the token.
pub(super) const GREETING: Duration = Duration::from_secs(3);
/// How long a request, once begun, and its answer may take.
const REQUEST: Duration = Duration::from_secs(10);
/// The most visitors without proof at a time. A new one pushes out the oldest.
const VISITORS: usize = 128;
/// How long the host stays to tell late ranks that the ranks disagree.
const LINGER: Duration = Duration::from_secs(4);

pub(super) const SET: u8 = 1;
pub(super) const GET: u8 = 2;
pub(super) const MEMBERS: u8 = 3;
/// The length that stands for a value that is not set.
pub(super) const NOTHING: u32 = u32::MAX;

/// The status in the host's answer to a greeting.
pub(super) const IN: u8 = 0;
pub(super) const OVER: u8 = 1;
pub(super) const FULL: u8 = 2;
pub(super) const DISPUTE: u8 = 3;

/// The answer to [`MEMBERS`], as JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct MembersReply {
    pub present: Vec<u32>,
    pub dispute: Option<String>,
}

/// The values that ranks have set, and the ranks themselves.
#[derive(Debug, Default)]
pub(super) struct ServerState {
    values: HashMap<String, Vec<u8>>,
    /// Bytes of the values and their names.
    bytes: usize,
    members: Membership,
}

/// The host. It serves for the rest of the process's life.
#[derive(Debug)]
pub struct Host {
    address: SocketAddr,
    state: Arc<Mutex<ServerState>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// Serves on `address` (port 0: a free one).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: the address cannot be listened on.
    pub fn serve(address: SocketAddr, token: RunToken) -> Result<Self> {
        let fail = |error: std::io::Error| {
            Error::peer(format!("cannot listen on {address} for the other ranks"))
                .caused_by(error)
                .hint("another run may hold the port: set another one, or none for a free one")
        };
        let listener = TcpListener::bind(address).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let state: Arc<Mutex<ServerState>> = Arc::default();
        let served = Arc::clone(&state);
        let accept = move || {
            let visitors: Arc<Mutex<Visitors>> = Arc::default();
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    // For example, no file descriptor is left. Either that passes, or the others run into their
                    // timeouts.
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                };
                let (state, token, visitors) = (Arc::clone(&served), token.clone(), Arc::clone(&visitors));
                let number = lock(&visitors).enter(&stream);
                // If a visitor breaks the protocol, it is dropped, and nobody has to be told.
                let receive = move || drop(receive(&stream, &token, &state, || lock(&visitors).leave(number)));
                // If the system has no thread left, the visitor is turned away, because its connection is dropped.
                drop(std::thread::Builder::new().name("visitor".into()).spawn(receive));
            }
        };
        std::thread::Builder::new()
            .name("rendezvous".into())
            .spawn(accept)
            .map_err(|error| Error::no_thread(&error))?;
        Ok(Self { address, state })
    }

    /// The address that it listens on, with the port that the system chose.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until all ranks have learned of a disagreement, at most four seconds.
    pub(crate) fn linger(&self) {
        let began = Instant::now();
        while began.elapsed() < LINGER && !lock(&self.state).members.all_notified() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Connections without proof yet, the oldest first.
#[derive(Debug, Default)]
struct Visitors {
    waiting: VecDeque<(u64, TcpStream)>,
    next: u64,
}

impl Visitors {
    fn enter(&mut self, stream: &TcpStream) -> u64 {
        self.next += 1;
        if let Ok(stream) = stream.try_clone() {
            self.waiting.push_back((self.next, stream));
        }
        if self.waiting.len() > VISITORS
            && let Some((_, oldest)) = self.waiting.pop_front()
        {
            // It may have gone by itself.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        self.next
    }

    fn leave(&mut self, number: u64) {
        self.waiting.retain(|(other, _)| *other != number);
    }
}

/// Serves one visitor, from its greeting to the end of its connection.
fn receive(stream: &TcpStream, token: &RunToken, state: &Mutex<ServerState>, greeted: impl FnOnce()) -> IoResult<()> {
    let from = stream.peer_addr().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |from| from.ip());
    stream.set_nodelay(true)?;
    notice_loss(stream);
    let admitted = admit(&mut DeadlineStream::new(stream, GREETING), token, state, from);
    greeted();
    let Some(rank) = admitted? else { return Ok(()) };
    let served = serve(stream, state, rank);
    lock(state).members.leave(rank);
    served
}

/// Greets a visitor. Returns its rank, if it is accepted.
pub(super) fn admit(
    stream: &mut (impl Read + Write),
    token: &RunToken,
    state: &Mutex<ServerState>,
    from: IpAddr,
) -> IoResult<Option<u32>> {
    let refuse = |_| std::io::Error::from(ErrorKind::PermissionDenied);
    let ours = random().map_err(refuse)?;
    stream.write_all(&[&MAGIC[..], &ours].concat())?;
    let (mut magic, mut theirs, mut proof) = ([0; 8], [0; 32], [0; 32]);
    stream.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Err(ErrorKind::InvalidData.into());
    }
    stream.read_exact(&mut theirs)?;
    let rank = read_u32(stream)?;
    let claim = read_bytes(stream, LONGEST_CLAIM)?;
    stream.read_exact(&mut proof)?;
    // blake3's own type compares in constant time.
    if token.proof("rank", &[&ours, &theirs, &rank.to_le_bytes(), &claim]) != blake3::Hash::from(proof) {
        lock(state).members.wrong_token(rank, from, Instant::now());
        return Err(ErrorKind::PermissionDenied.into());
    }
    let claim: Claim = serde_json::from_slice(&claim)?;
    if claim.rank != rank {
        return Err(ErrorKind::InvalidData.into());
    }
    let (status, text) = match lock(state).members.join(claim, from) {
        Admission::Accepted => (IN, String::new()),
        Admission::RunEnded => (OVER, String::new()),
        Admission::Full(text) => (FULL, text),
        Admission::Dispute(text) => (DISPUTE, text),
    };
    let mut answer = vec![status];
    put_bytes(&mut answer, text.as_bytes());
    answer.extend(token.proof("host", &[&theirs, &ours, &[status], text.as_bytes()]).as_bytes());
    let answered = stream.write_all(&answer);
    if status != IN {
        return answered.map(|()| None);
    }
    if answered.is_err() {
        lock(state).members.leave(rank);
    }
    answered.map(|()| Some(rank))
}

fn serve(stream: &TcpStream, state: &Mutex<ServerState>, rank: u32) -> IoResult<()> {
    loop {
        let mut operation = [0];
        stream.set_read_timeout(None)?;
        (&mut &*stream).read_exact(&mut operation)?;
        answer(operation[0], &mut DeadlineStream::new(stream, REQUEST), state, rank)?;
    }
}

/// Answers one request, of which the operation has been read.
pub(super) fn answer(
    operation: u8,
    stream: &mut (impl Read + Write),
    state: &Mutex<ServerState>,
    rank: u32,
) -> IoResult<()> {
    let name = String::from_utf8_lossy(&read_bytes(stream, LONGEST_NAME)?).into_owned();
    let value = read_bytes(stream, LONGEST)?;
    let mut state = lock(state);
    let found = match operation {
        SET => {
            let new = name.len() + value.len();
            let old = state.values.get(&name).map_or(0, |old| name.len() + old.len());
            if state.bytes - old + new > ALL_VALUES {
                return Err(ErrorKind::InvalidData.into());
            }
            state.bytes = state.bytes - old + new;
            state.values.insert(name, value);
            None
        }
        GET => state.values.get(&name).cloned(),
        MEMBERS => {
            let dispute = state.members.dispute(rank, Instant::now());
            Some(serde_json::to_vec(&MembersReply { present: state.members.present(), dispute })?)
        }
        _ => return Err(ErrorKind::InvalidData.into()),
    };
    let mut answer = Vec::new();
    match found {
        Some(value) => put_bytes(&mut answer, &value),
        None => answer.extend(NOTHING.to_le_bytes()),
    }
    let gone: Vec<u8> = state.members.gone().flat_map(u32::to_le_bytes).collect();
    drop(state);
    put_bytes(&mut answer, &gone);
    stream.write_all(&answer)
}

//! Connects the ranks of several processes to one store, whatever the launcher. Also lets the first rank of a machine work before
//! the others ([`LocalMainFirst`]), and finds out which rank has failed.
use std::cell::Cell;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::c10d::Agent;
use super::env::{Endpoint, Launch};
use super::host::Host;
use super::membership::{Claim, Facts};
use super::store::{ConnectError, Store};
use super::token::RunToken;
use super::{LOST, NO_WAY, World};
use tunesmith_base::error::{Error, Result};

/// How long ranks wait for each other at the start, if nothing else is set.
const GATHERING: Duration = Duration::from_secs(300);
/// After this time, a rank reports which ranks it waits for.
const SILENCE: Duration = Duration::from_secs(5);
/// How long another process, such as an earlier run that is about to end, may hold the address. With the last attempt
/// (three seconds) that is ten seconds.
const FOREIGN: Duration = Duration::from_secs(7);
/// After an operation has failed: how long the others may take to say that they have noticed.
const FAILURE_REPORTS: Duration = Duration::from_secs(2);
/// The name of rank 0's endpoint in torchrun's store.
const ENDPOINT: &str = "tunesmith/endpoint";

/// Lets the first rank of a machine do something before the others, such as filling a cache: Accelerate's
/// `local_main_process_first`.
pub trait LocalMainFirst: Send + Sync {
    /// Lets the others go on; the first rank calls it when it is done.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: the others cannot be told.
    fn release(&self) -> Result<()>;
    /// Waits until the first rank is done, without a time limit.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: the first rank has ended.
    fn wait(&self) -> Result<()>;
}

/// How ranks wait for each other at the start.
#[derive(Clone, Copy)]
pub struct Wait<'a> {
    /// The time limit; by default five minutes.
    pub limit: Duration,
    /// Called once with the ranks that are missing, if waiting takes longer than five seconds.
    pub say: &'a dyn Fn(&str),
}

impl Default for Wait<'_> {
    fn default() -> Self {
        Self { limit: GATHERING, say: &|_| () }
    }
}

struct Waiting<'a> {
    wait: Wait<'a>,
    began: Instant,
    said: Cell<bool>,
}

impl<'a> Waiting<'a> {
    fn new(wait: Wait<'a>) -> Self {
        Self { wait, began: Instant::now(), said: Cell::new(false) }
    }

    fn is_over(&self) -> bool {
        self.began.elapsed() >= self.wait.limit
    }

    fn left(&self) -> Duration {
        self.wait.limit.saturating_sub(self.began.elapsed())
    }

    /// Reports once which ranks this rank waits for, and at which address.
    fn tell(&self, missing: &[usize], address: &dyn Display) {
        if self.began.elapsed() >= SILENCE && !self.said.replace(true) {
            (self.wait.say)(&format!("waiting for {} at {address}", ranks(missing)));
        }
    }
}

/// A rank's connection to the store that all ranks share.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// The rank's number and the number of ranks.
    pub world: World,
    /// The rank's connection to the store.
    pub store: Arc<Store>,
}

impl Rendezvous {
    /// Connects to the other ranks and waits for all of them. All must have equal `facts`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the ranks disagree, or have different tokens; both sides learn that within 15 seconds.
    /// [`tunesmith_base::Kind::Peer`]: another program listens at the address, or ranks do not come in time.
    pub fn join(launch: &Launch, facts: Facts, wait: Wait<'_>) -> Result<Self> {
        let waiting = Waiting::new(wait);
        let world = launch.world;
        let claim = Claim::of(world, facts);
        let token = || launch.token.clone().map_or_else(RunToken::fresh, Ok);
        let mut server = None;
        let store = match &launch.endpoint {
            Endpoint::Launcher(address) => connect(address, &token()?, &claim, true, &waiting),
            Endpoint::RankZero(address) => {
                let token = token()?;
                match world.rank {
                    0 => {
                        connect(&local_address(server.insert(serve(address, &token)?)), &token, &claim, true, &waiting)
                    }
                    _ => connect(address, &token, &claim, false, &waiting),
                }
            }
            Endpoint::TorchStore(address) => {
                let mut agent = Agent::connect(address, waiting.left())?;
                if world.rank == 0 {
                    let token = token()?;
                    let host = server.insert(Host::serve(SocketAddr::new(own_address(address)?, 0), token.clone())?);
                    agent.set(ENDPOINT, &format!("{} {}", host.address(), token.text()))?;
                    connect(&local_address(host), &token, &claim, true, &waiting)
                } else {
                    through_agent(&mut agent, &claim, &waiting)
                }
            }
        };
        let gathered = store.and_then(|store| gather(&store, world, &waiting).map(|()| store));
        if let (Err(error), Some(host)) = (&gathered, &server)
            && error.kind() == tunesmith_base::Kind::Config
        {
            host.linger();
        }
        Ok(Self { world, store: Arc::new(gathered?) })
    }

    /// Tells the other ranks that `operation` has failed here, and returns the cause as text: the ranks that have ended, or
    /// that do not report the failure themselves.
    pub(crate) fn find_failed(&self, operation: &str) -> String {
        let name = |rank: usize| format!("fault/{rank}");
        let host_is_gone =
            |error: &Error| error.message().split_once(": ").map_or(error.message(), |(_, what)| what).to_owned();
        if let Err(error) = self.store.set(&name(self.world.rank), operation.as_bytes()) {
            return host_is_gone(&error);
        }
        let began = Instant::now();
        let mut silent: Vec<usize> = (0..self.world.size).filter(|&rank| rank != self.world.rank).collect();
        loop {
            let mut ended = Vec::new();
            let mut still = Vec::new();
            for &rank in &silent {
                match self.store.get(&name(rank)) {
                    Err(error) => return host_is_gone(&error),
                    Ok(look) if look.value.is_some() => {}
                    Ok(look) if look.gone.contains(&rank) => ended.push(rank),
                    Ok(_) => still.push(rank),
                }
            }
            silent = [ended.clone(), still.clone()].concat();
            match (ended.is_empty(), still.is_empty()) {
                (false, true) => return format!("{} ended", ranks(&ended)),
                (true, true) => return "the connection broke, but every rank is alive".to_owned(),
                _ if began.elapsed() < FAILURE_REPORTS => std::thread::sleep(Duration::from_millis(20)),
                (false, false) => return format!("{} ended", ranks(&ended)),
                (true, false) => return format!("{} did not answer", ranks(&still)),
            }
        }
    }

    /// The key in the store that the first rank of this machine sets.
    fn release_key(&self) -> String {
        // The ranks of a machine have successive numbers.
        format!("prepared/{}", self.world.rank - self.world.local_rank.min(self.world.rank))
    }
}

impl LocalMainFirst for Rendezvous {
    fn release(&self) -> Result<()> {
        self.store.set(&self.release_key(), b"1")
    }

    fn wait(&self) -> Result<()> {
        self.store.wait(&self.release_key(), None).map(drop)
    }
}

/// `rank 1`, `ranks 1 and 2`, `ranks 1, 2 and 5`.
pub fn ranks(numbers: &[usize]) -> String {
    let text: Vec<String> = numbers.iter().map(usize::to_string).collect();
    match text.split_last() {
        None => "no rank".to_owned(),
        Some((only, [])) => format!("rank {only}"),
        Some((last, before)) => format!("ranks {} and {last}", before.join(", ")),
    }
}

/// Waits until all ranks have come.
fn gather(store: &Store, world: World, waiting: &Waiting<'_>) -> Result<()> {
    let mut pause = Duration::from_millis(2);
    loop {
        let (present, gone) = store.members()?;
        if present.len() >= world.size {
            return Ok(());
        }
        let World { rank, size, .. } = world;
        if !gone.is_empty() {
            return Err(Error::peer(format!(
                "rank {rank}: {} ended before all {size} ranks had connected",
                ranks(&gone)
            ))
            .hint(LOST));
        }
        let missing: Vec<usize> = (0..size).filter(|rank| !present.contains(rank)).collect();
        waiting.tell(&missing, &store.host());
        if waiting.is_over() {
            let waited = waiting.wait.limit.as_secs();
            return Err(Error::peer(format!(
                "rank {rank}: {} did not connect to {} within {waited} s",
                ranks(&missing),
                store.host()
            ))
            .hint("check that every rank has started and can reach this address"));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Decides whether a rank that was not accepted tries again.
struct Retries<'a> {
    waiting: &'a Waiting<'a>,
    /// Another process listens there: since when, at which address, and the error of the last try.
    foreign: Option<(Instant, String, Error)>,
    /// The store is this run's alone: if it has lost a rank, no restart will use it.
    own: bool,
}

impl<'a> Retries<'a> {
    const fn new(own: bool, waiting: &'a Waiting<'a>) -> Self {
        Self { waiting, foreign: None, own }
    }

    /// Waits before the next try at `address`.
    ///
    /// # Errors
    /// `refused`, if another try is useless or time is up.
    fn try_again(&mut self, address: &str, refused: ConnectError) -> Result<()> {
        let mut pause = Duration::from_millis(50);
        // Another address is a new start.
        self.foreign.take_if(|(_, place, _)| place != address);
        match refused {
            ConnectError::Dispute(error) => return Err(error),
            ConnectError::RunEnded(error) if self.own => return Err(error),
            ConnectError::Foreign(error) => {
                let since = self.foreign.take().map_or_else(Instant::now, |(since, ..)| since);
                self.foreign = Some((since, address.to_owned(), error));
                // Slower, because the host counts tries that go on.
                pause = Duration::from_millis(500);
            }
            ConnectError::RunEnded(error) | ConnectError::Unreachable(error) if self.waiting.is_over() => {
                let waited = self.waiting.wait.limit.as_secs();
                return Err(error
                    .with_more(&format!("rank 0 did not come within {waited} s"))
                    .hint("check that rank 0 has started, and that MASTER_ADDR and MASTER_PORT name its machine"));
            }
            // The host knows the token, so whoever listened there before is gone.
            ConnectError::RunEnded(_) => self.foreign = None,
            ConnectError::Unreachable(_) => self.waiting.tell(&[0], &address),
        }
        if let Some((_, _, error)) = self.foreign.take_if(|(since, ..)| since.elapsed() >= FOREIGN) {
            return Err(error);
        }
        std::thread::sleep(pause);
        Ok(())
    }
}

/// Connects to a host that may not have started yet.
fn connect(address: &str, token: &RunToken, claim: &Claim, own: bool, waiting: &Waiting<'_>) -> Result<Store> {
    let mut retries = Retries::new(own, waiting);
    loop {
        let tried = resolve(address).map_err(ConnectError::Unreachable);
        match tried.and_then(|address| Store::connect(address, token, claim)) {
            Ok(store) => return Ok(store),
            Err(refused) => retries.try_again(address, refused)?,
        }
    }
}

/// Starts the host at `address`, or on all interfaces if the address is not this machine's, such as a service's.
fn serve(address: &str, token: &RunToken) -> Result<Host> {
    let wanted = resolve(address)?;
    let everywhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), wanted.port());
    let is_ours = UdpSocket::bind(SocketAddr::new(wanted.ip(), 0)).is_ok();
    Host::serve(if is_ours { wanted } else { everywhere }, token.clone())
}

/// The address at which this process reaches its own host.
fn local_address(host: &Host) -> String {
    let address = host.address();
    let local = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), address.port());
    if address.ip().is_unspecified() { local.to_string() } else { address.to_string() }
}

/// Connects through torchrun's store. The endpoint there may be that of a rank 0 before a restart, which no longer answers or whose
/// run is over; then it is read again.
fn through_agent(agent: &mut Agent, claim: &Claim, waiting: &Waiting<'_>) -> Result<Store> {
    let mut retries = Retries::new(false, waiting);
    loop {
        let endpoint = agent.get(ENDPOINT)?;
        let refused = match endpoint.as_deref().and_then(|endpoint| endpoint.split_once(' ')) {
            None => {
                let missing = format!("rank {}: rank 0 has not said where it is", claim.rank);
                ConnectError::Unreachable(Error::peer(missing).hint(LOST))
            }
            Some((address, token)) => match Store::connect(resolve(address)?, &RunToken::given(token)?, claim) {
                Ok(store) => return Ok(store),
                Err(refused) => refused,
            },
        };
        retries.try_again(endpoint.as_deref().unwrap_or_default(), refused)?;
    }
}

fn resolve(address: &str) -> Result<SocketAddr> {
    let fail = || Error::peer(format!("no address for {address}")).hint(NO_WAY);
    let mut found = address.to_socket_addrs().map_err(|error| fail().caused_by(error))?;
    found.next().ok_or_else(fail)
}

/// This machine's address on the way to `other`, which may be itself.
fn own_address(other: &str) -> Result<IpAddr> {
    let other = resolve(other)?;
    if other.ip().is_loopback() {
        return Ok(other.ip());
    }
    let any: IpAddr =
        if other.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { std::net::Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a datagram socket sends nothing; it only chooses the way.
    let found = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(other)?;
        socket.local_addr()
    });
    found
        .map(|address| address.ip())
        .map_err(|error| Error::peer(format!("cannot reach {other}")).caused_by(error).hint(NO_WAY))
}

#[cfg(test)]
mod tests;

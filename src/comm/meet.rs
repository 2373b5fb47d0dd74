//! How the ranks of several processes come together: at one store, whatever the launcher; in turn, so that what one
//! rank of a machine prepares the others find; and how a rank that does not answer is named.
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::World;
use super::c10d::Agent;
use super::env::{Launch, Place};
use super::store::{Host, Refused, Store, Token};
use crate::error::{Error, Result};

/// How long ranks wait for each other at the start.
const GATHERING: Duration = Duration::from_secs(300);
/// How long a stranger may hold the place: an earlier run that is about to end.
const STRANGER: Duration = Duration::from_secs(15);
/// After an operation has failed: how long the others may take to say that they have noticed.
const ROLL_CALL: Duration = Duration::from_secs(2);
/// The name of rank 0's endpoint in torchrun's store.
const ENDPOINT: &str = "tunesmith/endpoint";

/// Lets the first rank of a machine go through something before the others.
pub trait Door: Send + Sync {
    /// The first is through.
    ///
    /// # Errors
    /// [`crate::Kind::Peer`]: the others cannot be told.
    fn open(&self) -> Result<()>;
    /// Waits until the first is through, however long that takes, unless it ends.
    ///
    /// # Errors
    /// [`crate::Kind::Peer`]: it has ended.
    fn wait(&self) -> Result<()>;
}

/// The store that a run's ranks share.
#[derive(Debug, Clone)]
pub struct Meeting {
    /// This rank's place.
    pub world: World,
    /// Its connection.
    pub store: Arc<Store>,
}

impl Meeting {
    /// Finds the others.
    ///
    /// # Errors
    /// [`crate::Kind::Peer`]: they cannot be found in five minutes; [`crate::Kind::Config`]: a stranger is where they should be.
    pub fn join(launch: &Launch) -> Result<Self> {
        let (world, rank) = (launch.world, launch.world.rank);
        let token = || launch.token.clone().map_or_else(Token::fresh, Ok);
        let store = match &launch.place {
            Place::Held(address) => connect(address, &token()?, rank, true)?,
            Place::First(address) => {
                let token = token()?;
                match rank {
                    0 => connect(&hold(address, &token)?.to_string(), &token, rank, true)?,
                    _ => connect(address, &token, rank, false)?,
                }
            }
            Place::Agent(address) => {
                let mut agent = Agent::connect(address, GATHERING)?;
                if rank == 0 {
                    let token = token()?;
                    let host = Host::serve(SocketAddr::new(own_address(address)?, 0), token.clone())?;
                    agent.set(ENDPOINT, &format!("{} {}", host.address(), token.text()))?;
                    connect(&host.address().to_string(), &token, rank, true)?
                } else {
                    through_agent(&mut agent, rank)?
                }
            }
        };
        Ok(Self { world, store: Arc::new(store) })
    }

    /// Says that `operation` has failed here, and finds out which ranks do not say the same: those are the cause.
    pub fn roll_call(&self, operation: &str) -> String {
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
                match self.store.look(&name(rank)) {
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
                _ if began.elapsed() < ROLL_CALL => std::thread::sleep(Duration::from_millis(20)),
                (false, false) => return format!("{} ended", ranks(&ended)),
                (true, false) => return format!("{} did not answer", ranks(&still)),
            }
        }
    }

    fn door(&self) -> String {
        // Ranks of a machine are numbered one behind the other.
        format!("prepared/{}", self.world.rank - self.world.local_rank.min(self.world.rank))
    }
}

impl Door for Meeting {
    fn open(&self) -> Result<()> {
        self.store.set(&self.door(), b"1")
    }

    fn wait(&self) -> Result<()> {
        self.store.wait(&self.door(), None).map(drop)
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

/// Connects to a host that may not stand yet. A launcher's is of this run alone (`own`): where that is over, nothing comes after it.
fn connect(address: &str, token: &Token, rank: usize, own: bool) -> Result<Store> {
    let began = Instant::now();
    loop {
        let tried = resolve(address).map_err(Refused::Unreachable);
        let refused = match tried.and_then(|address| Store::connect(address, token, rank)) {
            Ok(store) => return Ok(store),
            Err(refused) => refused,
        };
        let patience = match refused {
            Refused::Stranger(_) => STRANGER,
            Refused::Over(_) if own => Duration::ZERO,
            Refused::Over(_) | Refused::Unreachable(_) => GATHERING,
        };
        if began.elapsed() >= patience {
            return Err(refused.into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Holds the rendezvous at `address`; where that is not this machine's own (a service's, say), at every address.
fn hold(address: &str, token: &Token) -> Result<SocketAddr> {
    let wanted = resolve(address)?;
    let everywhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), wanted.port());
    let is_ours = UdpSocket::bind(SocketAddr::new(wanted.ip(), 0)).is_ok();
    let held = Host::serve(if is_ours { wanted } else { everywhere }, token.clone())?.address();
    Ok(if is_ours { held } else { SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), held.port()) })
}

/// The endpoint in torchrun's store may be of a rank 0 before a restart: then nobody answers there, or one whose run is over.
fn through_agent(agent: &mut Agent, rank: usize) -> Result<Store> {
    let began = Instant::now();
    let mut last = Error::peer(format!("rank {rank}: rank 0 has not said where it is"));
    while began.elapsed() < GATHERING {
        let endpoint = agent.get(ENDPOINT)?;
        if let Some((address, token)) = endpoint.as_deref().and_then(|endpoint| endpoint.split_once(' ')) {
            match Store::connect(resolve(address)?, &Token::given(token)?, rank) {
                Ok(store) => return Ok(store),
                Err(refused) => last = refused.into(),
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(last)
}

fn resolve(address: &str) -> Result<SocketAddr> {
    let fail = |why: String| Error::peer(format!("no address for {address}: {why}"));
    let mut found = address.to_socket_addrs().map_err(|error| fail(error.to_string()))?;
    found.next().ok_or_else(|| fail("the name has none".to_owned()))
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
    found.map(|address| address.ip()).map_err(|error| Error::peer(format!("no way to {other}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meeting(size: usize) -> (Host, Vec<Meeting>) {
        let token = Token::fresh().unwrap();
        let host = Host::serve(SocketAddr::from(([127, 0, 0, 1], 0)), token.clone()).unwrap();
        let join = |rank| {
            let world = World { rank, size, local_rank: rank, local_size: size };
            let place = Place::Held(host.address().to_string());
            Meeting::join(&Launch { launcher: "test", world, place, token: Some(token.clone()) }).unwrap()
        };
        let ranks = (0..size).map(join).collect();
        (host, ranks)
    }

    #[test]
    fn a_roll_call_names_who_has_ended_and_who_is_silent() {
        let (_host, mut all) = meeting(3);
        let last = all.pop().unwrap();
        let second = all.pop().unwrap();
        let first = all.pop().unwrap();
        let other = std::thread::spawn(move || second.roll_call("all_gather"));
        assert_eq!(first.roll_call("all_gather"), "rank 2 did not answer");
        assert_eq!(other.join().unwrap(), "rank 2 did not answer");
        drop(last);
        let began = Instant::now();
        assert_eq!(first.roll_call("all_gather"), "rank 2 ended");
        assert!(began.elapsed() < ROLL_CALL);
    }

    #[test]
    fn the_first_of_a_machine_goes_first() {
        let (_host, all) = meeting(2);
        let [first, second] = <[Meeting; 2]>::try_from(all).unwrap();
        let through = std::thread::spawn(move || second.wait().is_ok());
        std::thread::sleep(Duration::from_millis(30));
        assert!(!through.is_finished());
        first.open().unwrap();
        assert!(through.join().unwrap());
        assert_eq!(ranks(&[1, 2, 5]), "ranks 1, 2 and 5");
    }

    #[test]
    fn rank_0_holds_the_rendezvous_where_the_launcher_only_names_a_port() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let token = Token::fresh().unwrap();
        let launch = |rank| {
            let world = World { rank, size: 2, local_rank: rank, local_size: 2 };
            Launch { launcher: "test", world, place: Place::First(free.to_string()), token: Some(token.clone()) }
        };
        let (first, second) = (launch(0), launch(1));
        let second = std::thread::spawn(move || Meeting::join(&second).unwrap());
        let first = Meeting::join(&first).unwrap();
        first.store.set("x", b"y").unwrap();
        assert_eq!(second.join().unwrap().store.wait("x", None).unwrap(), b"y");
    }
}

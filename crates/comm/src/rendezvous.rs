//! Connects the ranks of several processes to one store, whatever the launcher. Also lets the first rank of a machine work before
//! the others ([`Door`]), and finds out which rank has failed.
use std::cell::Cell;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::c10d::Agent;
use super::env::{Launch, Place};
use super::host::Host;
use super::membership::{Claim, Facts};
use super::store::{Refused, Store};
use super::token::Token;
use super::{LOST, NO_WAY, World};
use tunesmith_base::error::{Error, Result};

/// How long ranks wait for each other at the start, if nothing else is set.
const GATHERING: Duration = Duration::from_secs(300);
/// After this time a rank says for whom it waits.
const SILENCE: Duration = Duration::from_secs(5);
/// How long another process may hold the place: an earlier run that is about to end. With the last attempt (three seconds)
/// that is ten seconds.
const FOREIGN: Duration = Duration::from_secs(7);
/// After an operation has failed: how long the others may take to say that they have noticed.
const ROLL_CALL: Duration = Duration::from_secs(2);
/// The name of rank 0's endpoint in torchrun's store.
const ENDPOINT: &str = "tunesmith/endpoint";

/// Lets the first rank of a machine do something before the others, such as filling a cache.
pub trait Door: Send + Sync {
    /// Called by the first rank when it is done.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: the others cannot be told.
    fn open(&self) -> Result<()>;
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
    /// Is told for whom the rank waits, if that takes longer than five seconds.
    pub say: &'a dyn Fn(&str),
}

impl Default for Wait<'_> {
    fn default() -> Self {
        Self { limit: GATHERING, say: &|_| () }
    }
}

/// A wait that has begun.
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

    /// The time left.
    fn left(&self) -> Duration {
        self.wait.limit.saturating_sub(self.began.elapsed())
    }

    /// Says once for whom this rank waits, and where.
    fn tell(&self, missing: &[usize], address: &dyn Display) {
        if self.began.elapsed() >= SILENCE && !self.said.replace(true) {
            (self.wait.say)(&format!("waiting for {} at {address}", ranks(missing)));
        }
    }
}

/// A rank's connection to the store that all ranks share.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// This rank's place.
    pub world: World,
    /// Its connection.
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
        let token = || launch.token.clone().map_or_else(Token::fresh, Ok);
        let mut held = None;
        let store = match &launch.place {
            Place::Held(address) => connect(address, &token()?, (&claim, true), &waiting),
            Place::First(address) => {
                let token = token()?;
                match world.rank {
                    0 => connect(&hold(held.insert(serve(address, &token)?)), &token, (&claim, true), &waiting),
                    _ => connect(address, &token, (&claim, false), &waiting),
                }
            }
            Place::Agent(address) => {
                let mut agent = Agent::connect(address, waiting.left())?;
                if world.rank == 0 {
                    let token = token()?;
                    let host = held.insert(Host::serve(SocketAddr::new(own_address(address)?, 0), token.clone())?);
                    agent.set(ENDPOINT, &format!("{} {}", host.address(), token.text()))?;
                    connect(&hold(host), &token, (&claim, true), &waiting)
                } else {
                    through_agent(&mut agent, &claim, &waiting)
                }
            }
        };
        let gathered = store.and_then(|store| gather(&store, world, &waiting).map(|()| store));
        if let (Err(error), Some(host)) = (&gathered, &held)
            && error.kind() == tunesmith_base::Kind::Config
        {
            host.linger();
        }
        Ok(Self { world, store: Arc::new(gathered?) })
    }

    /// Reports that `operation` has failed here, and finds the cause: the ranks that do not report a failure.
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

impl Door for Rendezvous {
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

/// Waits until all ranks have come.
fn gather(store: &Store, world: World, waiting: &Waiting<'_>) -> Result<()> {
    let mut pause = Duration::from_millis(2);
    loop {
        let (present, gone) = store.roll()?;
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

/// Decides how long a refused rank tries again.
struct Patience<'a> {
    waiting: &'a Waiting<'a>,
    /// Since when someone else is there, where, and what came of the last try.
    foreign: Option<(Instant, String, Error)>,
    /// The host is of this run alone: where that is over, nothing comes after it.
    own: bool,
}

impl<'a> Patience<'a> {
    const fn new(own: bool, waiting: &'a Waiting<'a>) -> Self {
        Self { waiting, foreign: None, own }
    }

    /// Waits a moment before the next try at `address`.
    ///
    /// # Errors
    /// There shall be none.
    fn try_again(&mut self, address: &str, refused: Refused) -> Result<()> {
        let mut pause = Duration::from_millis(50);
        // Somewhere else is a new start.
        self.foreign.take_if(|(_, place, _)| place != address);
        match refused {
            Refused::Dispute(error) => return Err(error),
            Refused::Over(error) if self.own => return Err(error),
            Refused::Foreign(error) => {
                let since = self.foreign.take().map_or_else(Instant::now, |(since, ..)| since);
                self.foreign = Some((since, address.to_owned(), error));
                // The host counts tries that go on.
                pause = Duration::from_millis(500);
            }
            Refused::Over(error) | Refused::Unreachable(error) if self.waiting.is_over() => {
                let waited = self.waiting.wait.limit.as_secs();
                return Err(error
                    .with_more(&format!("rank 0 did not come within {waited} s"))
                    .hint("check that rank 0 has started, and that MASTER_ADDR and MASTER_PORT name its machine"));
            }
            // Its host has the token: whoever was there before is gone.
            Refused::Over(_) => self.foreign = None,
            Refused::Unreachable(_) => self.waiting.tell(&[0], &address),
        }
        if let Some((_, _, error)) = self.foreign.take_if(|(since, ..)| since.elapsed() >= FOREIGN) {
            return Err(error);
        }
        std::thread::sleep(pause);
        Ok(())
    }
}

/// Connects to a host that may not have started yet.
fn connect(address: &str, token: &Token, (claim, own): (&Claim, bool), waiting: &Waiting<'_>) -> Result<Store> {
    let mut patience = Patience::new(own, waiting);
    loop {
        let tried = resolve(address).map_err(Refused::Unreachable);
        match tried.and_then(|address| Store::connect(address, token, claim)) {
            Ok(store) => return Ok(store),
            Err(refused) => patience.try_again(address, refused)?,
        }
    }
}

/// Starts the host at `address`, or on all interfaces if the address is not this machine's, such as a service's.
fn serve(address: &str, token: &Token) -> Result<Host> {
    let wanted = resolve(address)?;
    let everywhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), wanted.port());
    let is_ours = UdpSocket::bind(SocketAddr::new(wanted.ip(), 0)).is_ok();
    Host::serve(if is_ours { wanted } else { everywhere }, token.clone())
}

/// Where a host of this process is reached from within.
fn hold(host: &Host) -> String {
    let address = host.address();
    let local = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), address.port());
    if address.ip().is_unspecified() { local.to_string() } else { address.to_string() }
}

/// Connects through torchrun's store. The endpoint there may be that of a rank 0 before a restart, which no longer answers or whose
/// run is over; then it is read again.
fn through_agent(agent: &mut Agent, claim: &Claim, waiting: &Waiting<'_>) -> Result<Store> {
    let mut patience = Patience::new(false, waiting);
    loop {
        let endpoint = agent.get(ENDPOINT)?;
        let refused = match endpoint.as_deref().and_then(|endpoint| endpoint.split_once(' ')) {
            None => {
                let missing = format!("rank {}: rank 0 has not said where it is", claim.rank);
                Refused::Unreachable(Error::peer(missing).hint(LOST))
            }
            Some((address, token)) => match Store::connect(resolve(address)?, &Token::given(token)?, claim) {
                Ok(store) => return Ok(store),
                Err(refused) => refused,
            },
        };
        patience.try_again(endpoint.as_deref().unwrap_or_default(), refused)?;
    }
}

fn resolve(address: &str) -> Result<SocketAddr> {
    let fail = |why: String| Error::peer(format!("no address for {address}: {why}")).hint(NO_WAY);
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
    found.map(|address| address.ip()).map_err(|error| Error::peer(format!("no way to {other}: {error}")).hint(NO_WAY))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(rank: usize, size: usize, place: Place, token: &Token) -> Launch {
        let world = World { rank, size, local_rank: rank, local_size: size };
        Launch { launcher: "test", world, place, token: Some(token.clone()) }
    }

    fn host() -> (Host, Token) {
        let token = Token::fresh().unwrap();
        (Host::serve(SocketAddr::from(([127, 0, 0, 1], 0)), token.clone()).unwrap(), token)
    }

    fn held(host: &Host) -> Place {
        Place::Held(host.address().to_string())
    }

    /// What comes of ranks that come at the same time.
    fn joined(launches: Vec<(Launch, Facts)>) -> Vec<Result<Rendezvous>> {
        let join = |(launch, facts)| std::thread::spawn(move || Rendezvous::join(&launch, facts, Wait::default()));
        let running: Vec<_> = launches.into_iter().map(join).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    fn rendezvous(size: usize) -> (Host, Vec<Rendezvous>) {
        let (host, token) = host();
        let launches = (0..size).map(|rank| (launch(rank, size, held(&host), &token), Facts::new())).collect();
        (host, joined(launches).into_iter().map(Result::unwrap).collect())
    }

    /// A free port, for rank 0 to listen on.
    fn free() -> String {
        std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
    }

    #[test]
    fn ranks_that_do_not_fit_together_all_hear_of_both_sides() {
        let token = Token::fresh().unwrap();
        let facts = |version: &str| Facts::from([("version".to_owned(), version.to_owned())]);
        let both = |launches: Vec<(Launch, Facts)>, named: &[&str]| {
            let began = Instant::now();
            for (rank, joined) in joined(launches).into_iter().enumerate() {
                let error = joined.unwrap_err();
                assert_eq!(error.kind(), tunesmith_base::Kind::Config, "{error}");
                for part in named {
                    assert!(error.message().contains(part), "rank {rank}: {error}");
                }
            }
            assert!(began.elapsed() < Duration::from_secs(14), "{:?}", began.elapsed());
        };
        // The world's size, whoever holds the rendezvous.
        let place = Place::First(free());
        let sizes = [(0, 2), (1, 3), (2, 3)];
        let launches = sizes.map(|(rank, size)| (launch(rank, size, place.clone(), &token), Facts::new()));
        both(launches.to_vec(), &["world size: ", "2 on rank 0", "3 on rank "]);
        let (host, held_token) = host();
        let versions = ["1.0", "1.0", "2.0"];
        let launches = (0..3).map(|rank| (launch(rank, 3, held(&host), &held_token), facts(versions[rank])));
        both(launches.collect(), &["version: ", "1.0 on rank ", "2.0 on rank 2"]);
        // One that has been started twice.
        let place = Place::First(free());
        let launches = [0, 1, 1].map(|rank| (launch(rank, 3, place.clone(), &token), Facts::new()));
        both(launches.to_vec(), &["rank 1 connected twice: rank 1 (process "]);
        // Another token: the one that has it and those that wait for it.
        let other = Token::fresh().unwrap();
        let place = Place::First(free());
        let launches = [(0, &token), (1, &other), (2, &token)]
            .map(|(rank, token)| (launch(rank, 3, place.clone(), token), Facts::new()));
        both(launches.to_vec(), &["token", "rank 1"]);
    }

    #[test]
    fn a_roll_call_names_who_has_ended_and_who_is_silent() {
        let (_host, mut all) = rendezvous(3);
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
        let (_host, all) = rendezvous(2);
        let [first, second] = <[Rendezvous; 2]>::try_from(all).unwrap();
        let through = std::thread::spawn(move || second.wait().is_ok());
        std::thread::sleep(Duration::from_millis(30));
        assert!(!through.is_finished());
        first.open().unwrap();
        assert!(through.join().unwrap());
        assert_eq!(ranks(&[1, 2, 5]), "ranks 1, 2 and 5");
    }

    #[test]
    fn rank_0_holds_the_rendezvous_where_the_launcher_only_names_a_port() {
        let (token, place) = (Token::fresh().unwrap(), Place::First(free()));
        let launches = [1, 0].map(|rank| (launch(rank, 2, place.clone(), &token), Facts::new()));
        let ranks: Vec<Rendezvous> = joined(launches.to_vec()).into_iter().map(Result::unwrap).collect();
        ranks[1].store.set("x", b"y").unwrap();
        assert_eq!(ranks[0].store.wait("x", None).unwrap(), b"y");
    }

    #[test]
    fn a_rank_of_an_earlier_run_finds_a_complete_one_and_changes_nothing() {
        let (host, token) = host();
        let all = joined((0..2).map(|rank| (launch(rank, 2, held(&host), &token), Facts::new())).collect());
        let began = Instant::now();
        let late = Rendezvous::join(&launch(1, 2, held(&host), &token), Facts::new(), Wait::default()).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(14));
        assert!(late.message().contains("all 2 ranks of its run are connected, including rank 1 (process"), "{late}");
        assert!(all[0].as_ref().unwrap().store.roll().unwrap().1.is_empty(), "nobody has gone");
    }

    #[test]
    fn whoever_is_missing_is_named_when_the_time_is_over() {
        let (token, place) = (Token::fresh().unwrap(), Place::First(free()));
        for (rank, missing) in [(1, "rank 0 did not come within 6 s"), (0, "rank 1 did not connect to 127.0.0.1:")] {
            let told = std::cell::RefCell::new(Vec::new());
            let say = |text: &str| told.borrow_mut().push(text.to_owned());
            let wait = Wait { limit: Duration::from_secs(6), say: &say };
            let began = Instant::now();
            let error = Rendezvous::join(&launch(rank, 2, place.clone(), &token), Facts::new(), wait).unwrap_err();
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
            assert!(error.kind() == tunesmith_base::Kind::Peer && error.message().contains(missing), "{error}");
            let told = told.borrow();
            assert_eq!(told.len(), 1, "{told:?}");
            assert!(told[0].starts_with(&format!("waiting for rank {} at 127.0.0.1:", 1 - rank)), "{told:?}");
        }
    }

    #[test]
    fn who_holds_the_port_and_says_nothing_is_named_within_a_quarter_of_a_minute() {
        let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let place = Place::First(mute.local_addr().unwrap().to_string());
        let token = Token::fresh().unwrap();
        let began = Instant::now();
        let busy = Rendezvous::join(&launch(0, 2, place.clone(), &token), Facts::new(), Wait::default()).unwrap_err();
        assert!(busy.message().contains("cannot listen on 127.0.0.1:") && began.elapsed() < Duration::from_secs(5));
        let error = Rendezvous::join(&launch(1, 2, place, &token), Facts::new(), Wait::default()).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(14), "{:?}", began.elapsed());
        assert_eq!(error.kind(), tunesmith_base::Kind::Peer);
        assert!(error.message().contains("sends nothing"), "{error}");
    }
}

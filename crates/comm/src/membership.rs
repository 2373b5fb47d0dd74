//! Records which ranks have connected to a run's rendezvous, and checks that they agree: on rank numbers, world size, and facts
//! that must be equal on all ranks (version, engine, settings that decide which collectives run). [`super::host`] calls it.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::World;

/// Facts that must be equal on all ranks: name to value.
pub type Facts = BTreeMap<String, String>;

/// What a rank sends when it connects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// The rank that it claims to be.
    pub rank: u32,
    /// The world size it expects.
    pub size: u32,
    /// Its process id and machine, for messages.
    pub who: String,
    /// What must be equal on all ranks.
    pub facts: Facts,
}

/// The longest claim, in bytes.
pub(crate) const LONGEST_CLAIM: usize = 32 << 10;
/// How long a peer with a wrong token must keep retrying as a missing rank before the run fails. A single attempt, or a
/// replayed greeting, fails nothing.
const INSISTS: Duration = Duration::from_secs(5);
/// The longest pause between its attempts, and since the last one.
const RECENT: Duration = Duration::from_secs(2);
/// The most differences that a message lists.
const SHOWN: usize = 8;

impl Claim {
    /// The claim that this process makes: its rank, the world size, and its facts.
    pub fn of(world: World, facts: Facts) -> Self {
        let host = tunesmith_base::files::system("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() { "this machine" } else { host.trim() };
        let who = format!("process {} on {host}", std::process::id());
        Self { rank: world.rank as u32, size: world.size as u32, who, facts }
    }

    /// The facts, with the world size as one of them.
    fn all_facts(&self) -> BTreeMap<&str, String> {
        let size = ("world size", self.size.to_string());
        self.facts.iter().map(|(key, value)| (key.as_str(), value.clone())).chain([size]).collect()
    }
}

/// The answer to a peer with the right token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Admission {
    /// The peer is a rank of this run.
    Accepted,
    /// The run has lost a rank; the peer belongs to a restart.
    RunEnded,
    /// All ranks are connected already.
    Full(String),
    /// The ranks disagree, in the words of this message.
    Dispute(String),
}

#[derive(Debug)]
struct Seen {
    claim: Claim,
    from: IpAddr,
}

impl Seen {
    fn name(&self) -> String {
        format!("rank {} ({}, at {})", self.claim.rank, self.claim.who, self.from)
    }
}

#[derive(Debug)]
struct WrongToken {
    from: IpAddr,
    first: Instant,
    last: Instant,
}

/// The ranks that have connected.
#[derive(Debug, Default)]
pub(crate) struct Membership {
    /// In the order in which they connected.
    seen: Vec<Seen>,
    gone: BTreeSet<u32>,
    wrong_tokens: BTreeMap<u32, WrongToken>,
    dispute: Option<String>,
    /// Ranks that have received the dispute.
    notified: BTreeSet<u32>,
}

impl Membership {
    /// Registers a peer with the right token.
    pub fn join(&mut self, claim: Claim, from: IpAddr) -> Admission {
        let rank = claim.rank;
        if let Some(dispute) = self.dispute.clone() {
            self.notified.insert(rank);
            return Admission::Dispute(dispute);
        }
        if !self.gone.is_empty() {
            return Admission::RunEnded;
        }
        let new = Seen { claim, from };
        if self.is_complete() {
            let there = self.seen.iter().find(|seen| seen.claim.rank == rank).map_or(String::new(), Seen::name);
            let size = self.seen.len();
            let there = if there.is_empty() { there } else { format!(", including {there}") };
            return Admission::Full(format!("all {size} ranks of its run are connected{there}"));
        }
        let dispute = self.against(&new);
        self.seen.push(new);
        if let Some(dispute) = dispute {
            self.notified.insert(rank);
            self.dispute = Some(dispute.clone());
            return Admission::Dispute(dispute);
        }
        Admission::Accepted
    }

    /// Why `new` cannot join the connected ranks.
    fn against(&self, new: &Seen) -> Option<String> {
        let Claim { rank, size, .. } = new.claim;
        if rank >= size {
            return Some(format!("{} has a world size of {size}: its number must be smaller", new.name()));
        }
        if let Some(there) = self.seen.iter().find(|seen| seen.claim.rank == rank) {
            return Some(format!("rank {rank} connected twice: {} and {}", there.name(), new.name()));
        }
        let first = self.seen.first()?;
        let (ours, theirs) = (first.claim.all_facts(), new.claim.all_facts());
        let keys: BTreeSet<&str> = ours.keys().chain(theirs.keys()).copied().collect();
        let differing: Vec<&str> = keys.into_iter().filter(|key| ours.get(key) != theirs.get(key)).collect();
        if differing.is_empty() {
            return None;
        }
        let mut text = format!("{} and {} disagree:", first.name(), new.name());
        for key in differing.iter().take(SHOWN) {
            let side = |facts: &BTreeMap<&str, String>| facts.get(key).map_or("nothing", String::as_str).to_owned();
            // A String never fails.
            let _ = write!(
                text,
                "\n    {key}: {} on rank {}, {} on rank {rank}",
                side(&ours),
                first.claim.rank,
                side(&theirs)
            );
        }
        if let Some(more) = differing.len().checked_sub(SHOWN).filter(|&more| more > 0) {
            let _ = write!(text, "\n    and {more} more");
        }
        Some(text)
    }

    /// Registers a peer that claims to be `rank` and has a wrong token.
    pub(crate) fn wrong_token(&mut self, rank: u32, from: IpAddr, now: Instant) {
        // At most one entry for each rank of the world.
        let awaited = self.seen.first().map_or(1, |first| first.claim.size);
        if rank < awaited && !self.is_complete() {
            let wrong = self.wrong_tokens.entry(rank).or_insert(WrongToken { from, first: now, last: now });
            // A long pause starts the count again.
            let first = if now - wrong.last > RECENT { now } else { wrong.first };
            *wrong = WrongToken { from, first, last: now };
        }
    }

    /// Notes that a rank's connection has ended.
    pub fn leave(&mut self, rank: u32) {
        self.gone.insert(rank);
    }

    /// Ranks whose connections have ended.
    pub fn gone(&self) -> impl Iterator<Item = u32> + '_ {
        self.gone.iter().copied()
    }

    /// Ranks that have connected, also those whose connections have ended.
    pub fn present(&self) -> Vec<u32> {
        self.seen.iter().map(|seen| seen.claim.rank).collect()
    }

    fn is_complete(&self) -> bool {
        self.dispute.is_none() && self.seen.first().is_some_and(|first| self.seen.len() == first.claim.size as usize)
    }

    /// Why the ranks disagree; `None` if they do not. Notes that `rank` has received the dispute.
    pub fn dispute(&mut self, rank: u32, now: Instant) -> Option<String> {
        if self.dispute.is_none() && !self.is_complete() {
            self.dispute = self.insistent(now);
        }
        if self.dispute.is_some() {
            self.notified.insert(rank);
        }
        self.dispute.clone()
    }

    fn insistent(&self, now: Instant) -> Option<String> {
        let first = self.seen.first()?;
        let here = |rank: &u32| self.seen.iter().any(|seen| seen.claim.rank == *rank);
        let insists = |(rank, wrong): &(&u32, &WrongToken)| {
            !here(rank) && wrong.last - wrong.first >= INSISTS && now - wrong.last <= RECENT
        };
        let (rank, wrong) = self.wrong_tokens.iter().find(insists)?;
        Some(format!("rank {rank} (at {}) does not have the token of {}", wrong.from, first.name()))
    }

    /// Whether every rank has received the dispute.
    pub(crate) fn all_notified(&self) -> bool {
        let most = self.seen.iter().map(|seen| seen.claim.size).max().unwrap_or(0);
        self.notified.len() >= most as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn claim(rank: u32, size: u32, facts: &[(&str, &str)]) -> Claim {
        let facts = facts.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        Claim { rank, size, who: format!("process {rank}"), facts }
    }

    fn said(welcome: Admission) -> String {
        match welcome {
            Admission::Dispute(text) | Admission::Full(text) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn those_that_do_not_fit_are_named_with_both_sides() {
        let facts = |version| [("version", version), ("engine", "gloo")];
        let mut members = Membership::default();
        assert_eq!(members.join(claim(0, 2, &facts("1")), HERE), Admission::Accepted);
        let text = said(members.join(claim(1, 3, &facts("2")), HERE));
        for side in ["rank 0 (process 0", "rank 1 (process 1", "world size: 2 on rank 0, 3 on rank 1"] {
            assert!(text.contains(side), "{text}");
        }
        assert!(text.contains("version: 1 on rank 0, 2 on rank 1") && !text.contains("engine"), "{text}");
        // Everybody hears the same, also who comes later.
        assert_eq!(members.dispute(0, Instant::now()).unwrap(), text);
        assert_eq!(said(members.join(claim(2, 3, &facts("1")), HERE)), text);
        assert!(members.all_notified());

        let mut members = Membership::default();
        members.join(claim(1, 3, &[]), HERE);
        assert!(said(members.join(claim(1, 3, &[]), HERE)).contains("rank 1 connected twice"));
        assert!(said(Membership::default().join(claim(3, 3, &[]), HERE)).contains("rank 3"));
    }

    #[test]
    fn a_run_that_is_complete_lets_nobody_in_and_nothing_disturbs_it() {
        let mut members = Membership::default();
        for rank in 0..2 {
            assert_eq!(members.join(claim(rank, 2, &[]), HERE), Admission::Accepted);
        }
        let text = said(members.join(claim(1, 4, &[]), HERE));
        assert!(text.contains("all 2 ranks") && text.contains("rank 1 (process 1"), "{text}");
        let now = Instant::now();
        for second in 0..9 {
            members.wrong_token(1, HERE, now + Duration::from_secs(second));
        }
        assert_eq!(members.dispute(0, now + Duration::from_secs(9)), None);
        members.leave(1);
        assert_eq!(members.join(claim(1, 2, &[]), HERE), Admission::RunEnded);
    }

    #[test]
    fn only_who_keeps_trying_with_another_token_ends_a_run() {
        let now = Instant::now();
        let after = |milliseconds| now + Duration::from_millis(milliseconds);
        let mut members = Membership::default();
        members.join(claim(0, 2, &[]), HERE);
        members.wrong_token(1, HERE, now);
        members.wrong_token(7, HERE, now);
        assert_eq!(members.dispute(0, after(60_000)), None, "once is not enough");
        for try_at in (0..6000).step_by(500) {
            members.wrong_token(1, HERE, after(60_000 + try_at));
        }
        let text = members.dispute(0, after(66_000)).unwrap();
        assert!(text.contains("rank 1 (at 127.0.0.1) does not have the token of rank 0 (process 0"), "{text}");
        let mut members = Membership::default();
        members.join(claim(0, 2, &[]), HERE);
        for try_at in (0..6000).step_by(500) {
            members.wrong_token(1, HERE, after(try_at));
        }
        assert_eq!(members.join(claim(1, 2, &[]), HERE), Admission::Accepted);
        assert_eq!(members.dispute(0, after(6000)), None, "the right one came");
    }
}

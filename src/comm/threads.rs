//! Ranks as threads of one process. Every operation is a meeting: each rank lays down a copy of what it gives, and when
//! all have, each takes what it needs. A rank that is dropped (its thread returned or panicked) ends the others'
//! meetings at once.
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::meet::Door;
use super::{Among, Collectives, Limits, World};
use crate::error::{Error, Result};

/// What a rank lays down.
#[derive(Debug)]
struct Gift {
    operation: &'static str,
    /// Bytes of the operation on every rank, to notice ranks that do different things.
    size: usize,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct State {
    gifts: Vec<Option<Arc<Gift>>>,
    /// Ranks that have taken this meeting's gifts.
    taken: usize,
    /// Ranks that will not come any more.
    gone: Vec<bool>,
    /// Rank 0 has opened the door.
    open: bool,
}

#[derive(Debug)]
struct Table {
    state: Mutex<State>,
    changed: Condvar,
}

/// One rank of a world of threads.
#[derive(Debug)]
pub struct Threads {
    world: World,
    limits: Limits,
    table: Arc<Table>,
    /// Where all ranks, and those of its machine, meet beside it; none for a rank of such a world.
    beside: Option<[Arc<Table>; 2]>,
}

/// All ranks of a world of `size` threads.
pub fn world(size: usize, limits: Limits) -> Vec<Threads> {
    machines(&[size], limits)
}

/// As [`world`], as if the ranks were on several machines, so many on each.
pub fn machines(sizes: &[usize], limits: Limits) -> Vec<Threads> {
    let table = |size: usize| {
        let state = State { gifts: vec![None; size], taken: 0, gone: vec![false; size], open: false };
        Arc::new(Table { state: Mutex::new(state), changed: Condvar::new() })
    };
    let size = sizes.iter().sum();
    let (all, again) = (table(size), table(size));
    let places = sizes.iter().flat_map(|&local_size| {
        let machine = table(local_size);
        (0..local_size).map(move |local_rank| (local_rank, local_size, Arc::clone(&machine)))
    });
    let rank = |(rank, (local_rank, local_size, machine))| Threads {
        world: World { rank, size, local_rank, local_size },
        limits,
        table: Arc::clone(&all),
        beside: Some([Arc::clone(&again), machine]),
    };
    places.enumerate().map(rank).collect()
}

impl Threads {
    fn state(&self) -> MutexGuard<'_, State> {
        self.table.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, operation: &str, what: impl std::fmt::Display) -> Error {
        Error::peer(format!("rank {}: {operation}: {what}", self.world.rank))
    }

    /// Waits until `ready`, unless a rank that `missing` names is gone or time is up.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        operation: &str,
        ready: impl Fn(&State) -> bool,
        missing: impl Fn(&State, usize) -> bool,
    ) -> Result<MutexGuard<'a, State>> {
        let deadline = Instant::now() + self.limits.timeout;
        loop {
            if ready(&state) {
                return Ok(state);
            }
            let absent: Vec<usize> = (0..self.world.size).filter(|&rank| missing(&state, rank)).collect();
            if let Some(rank) = absent.iter().find(|&&rank| state.gone[rank]) {
                return Err(self.error(operation, format_args!("rank {rank} has ended")));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let seconds = self.limits.timeout.as_secs_f64();
                let late = super::meet::ranks(&absent);
                return Err(self.error(operation, format_args!("no answer from {late} within {seconds} s")));
            }
            state = self.table.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lays `bytes` down and returns what every rank has laid down.
    fn meet(&self, operation: &'static str, size: usize, bytes: Vec<u8>) -> Result<Vec<Arc<Gift>>> {
        let rank = self.world.rank;
        let gift = Arc::new(Gift { operation, size, bytes });
        // The meeting before may not be over for all.
        let missing = |state: &State, other: usize| state.gifts[other].is_none();
        let not_taken = |_: &State, other: usize| other != rank;
        let mut state = self.wait(self.state(), operation, |state| state.gifts[rank].is_none(), not_taken)?;
        state.gifts[rank] = Some(gift);
        self.table.changed.notify_all();
        let all_there = |state: &State| state.gifts.iter().all(Option::is_some);
        let mut state = self.wait(state, operation, all_there, missing)?;
        let gifts: Vec<Arc<Gift>> = state.gifts.iter().flatten().cloned().collect();
        state.taken += 1;
        if state.taken == self.world.size {
            state.taken = 0;
            state.gifts.fill(None);
            self.table.changed.notify_all();
        }
        drop(state);
        let differs = gifts.iter().position(|gift| (gift.operation, gift.size) != (operation, size));
        match differs {
            None => Ok(gifts),
            Some(other) => {
                let Gift { operation: theirs, size: bytes, .. } = &*gifts[other];
                Err(self
                    .error(operation, format_args!("of {size} bytes meets {theirs} of {bytes} bytes of rank {other}")))
            }
        }
    }
}

impl Collectives for Threads {
    fn world(&self) -> World {
        self.world
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn name(&self) -> &'static str {
        "threads"
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn all_to_all_bytes(&self, send: &[u8], parts: &[Range<usize>], receive: &mut [u8]) -> Result<()> {
        let gifts = self.meet("all_to_all", send.len(), send.to_vec())?;
        let own = parts[self.world.rank].clone();
        for (gift, part) in gifts.iter().zip(receive.chunks_exact_mut(own.len().max(1))) {
            part.copy_from_slice(&gift.bytes[own.clone()]);
        }
        Ok(())
    }

    fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        let gifts = self.meet("all_gather", data.len(), data[parts[self.world.rank].clone()].to_vec())?;
        for (gift, part) in gifts.iter().zip(parts) {
            data[part.clone()].copy_from_slice(&gift.bytes);
        }
        Ok(())
    }

    fn broadcast_bytes(&self, data: &mut [u8], root: usize) -> Result<()> {
        let gives = if self.world.rank == root { data.to_vec() } else { Vec::new() };
        let gifts = self.meet("broadcast", data.len(), gives)?;
        data.copy_from_slice(&gifts[root].bytes);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.meet("barrier", 0, Vec::new()).map(drop)
    }

    fn beside(&self, who: Among) -> Result<Box<dyn Collectives>> {
        let Some(tables) = &self.beside else {
            return Err(self.error("beside", "this world is beside another already"));
        };
        let table = Arc::clone(&tables[who as usize]);
        Ok(Box::new(Self { world: self.world.among(who), limits: self.limits, table, beside: None }))
    }
}

impl Door for Threads {
    fn open(&self) -> Result<()> {
        self.state().open = true;
        self.table.changed.notify_all();
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        let mut state = self.state();
        while !state.open {
            if state.gone[0] {
                return Err(self.error("prepare", "rank 0 has ended"));
            }
            state = self.table.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.state().gone[self.world.rank] = true;
        self.table.changed.notify_all();
        for (table, rank) in self.beside.iter().flatten().zip([self.world.rank, self.world.local_rank]) {
            table.state.lock().unwrap_or_else(PoisonError::into_inner).gone[rank] = true;
            table.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_rank_that_is_gone_or_late_is_named() {
        let limits = Limits { timeout: Duration::from_millis(50), ..Limits::default() };
        let mut ranks = world(3, limits);
        let last = ranks.pop().unwrap();
        let waiting = std::thread::spawn(move || {
            let late = ranks[0].barrier().unwrap_err();
            drop(last);
            let gone = ranks[1].barrier().unwrap_err();
            (late, gone)
        });
        let (late, gone) = waiting.join().unwrap();
        assert_eq!(late.kind(), crate::Kind::Peer);
        assert_eq!(late.message(), "rank 0: barrier: no answer from ranks 1 and 2 within 0.05 s");
        assert_eq!(gone.message(), "rank 1: barrier: rank 2 has ended");
    }

    #[test]
    fn ranks_that_do_different_things_are_told() {
        let mut ranks = world(2, Limits::default());
        let second = ranks.pop().unwrap();
        let other = std::thread::spawn(move || second.broadcast_bytes(&mut [1, 2, 3], 0).unwrap_err());
        let error = ranks[0].barrier().unwrap_err();
        assert!(error.message().contains("of 0 bytes meets broadcast of 3 bytes of rank 1"), "{error}");
        assert!(other.join().unwrap().message().contains("meets barrier"));
    }
}

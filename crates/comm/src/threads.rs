//! Ranks as threads of one process. In every operation each rank shares its buffers. When all have, each reads what it needs
//! from the others, and none leaves before all have read. So values are copied once, into their final place. When a rank is
//! dropped (its thread returned or panicked), the operations of the others fail at once.
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::bytes;
use super::partitioned_collectives::Piece;
use super::rendezvous::LocalMainFirst;
use super::shared_buffer::SharedBuffer;
use super::{Collectives, Group, LOST, Limits, World};
use tunesmith_base::error::{Error, Result};
use tunesmith_device::HostMut;

/// What a rank contributes to an operation.
#[derive(Debug)]
struct Contribution {
    operation: &'static str,
    /// Bytes of the operation, compared to notice ranks that run different operations.
    size: usize,
    /// Every rank's parts of every piece, to notice ranks that would write where others read.
    parts: Vec<Range<usize>>,
    buffers: Vec<SharedBuffer>,
    /// The rank has given up, and its memory may be freed.
    withdrawn: bool,
}

#[derive(Debug)]
struct State {
    /// By rank; `None` until the rank has come.
    contributions: Vec<Option<Arc<Contribution>>>,
    /// How many ranks have read what they need from this exchange.
    taken: usize,
    /// Ranks that have ended, by rank.
    gone: Vec<bool>,
    /// Rank 0 has called [`LocalMainFirst::release`].
    released: bool,
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
    /// Held during an exchange: one thread at a time acts for this rank.
    turn: Mutex<()>,
    table: Arc<Table>,
    /// The tables of new groups: of all ranks, and of this machine's. `None` in such a group.
    groups: Option<[Arc<Table>; 2]>,
}

/// All ranks of a world of `size` threads.
pub fn world(size: usize, limits: Limits) -> Vec<Threads> {
    machines(&[size], limits)
}

/// As [`world`], but as if the ranks were spread over machines with `sizes` ranks each.
pub fn machines(sizes: &[usize], limits: Limits) -> Vec<Threads> {
    let table = |size: usize| {
        let state = State { contributions: vec![None; size], taken: 0, gone: vec![false; size], released: false };
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
        turn: Mutex::new(()),
        table: Arc::clone(&all),
        groups: Some([Arc::clone(&again), machine]),
    };
    places.enumerate().map(rank).collect()
}

impl Threads {
    fn state(&self) -> MutexGuard<'_, State> {
        self.table.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, operation: &str, what: impl std::fmt::Display) -> Error {
        Error::peer(format!("rank {}: {operation}: {what}", self.world.rank)).hint(LOST)
    }

    /// Waits until all ranks share something. Fails if a missing rank has ended, or at the timeout.
    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>, operation: &str) -> (MutexGuard<'a, State>, Result<()>) {
        let deadline = Instant::now() + self.limits.timeout;
        loop {
            let absent: Vec<usize> = (0..self.world.size).filter(|&rank| state.contributions[rank].is_none()).collect();
            let gone = absent.iter().find(|&&rank| state.gone[rank]);
            let given_up =
                || state.contributions.iter().position(|shown| shown.as_ref().is_some_and(|shown| shown.withdrawn));
            let left = deadline.saturating_duration_since(Instant::now());
            let ended = match (absent.is_empty(), gone) {
                (true, _) => match given_up() {
                    None => Ok(()),
                    Some(rank) => Err(self.error(operation, format_args!("rank {rank} has given up"))),
                },
                (false, Some(rank)) => Err(self.error(operation, format_args!("rank {rank} has ended"))),
                (false, None) if left.is_zero() => {
                    let seconds = self.limits.timeout.as_secs_f64();
                    let late = super::rendezvous::ranks(&absent);
                    Err(self.error(operation, format_args!("no answer from {late} within {seconds} s")))
                }
                (false, None) => {
                    state = self.table.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
            };
            return (state, ended);
        }
    }

    /// Contributes `buffers`, and gives `take` the contributions of all ranks, in rank order. `take` runs only if all ranks
    /// came with the same operation, `size` and `parts`. After the return no other rank reads `buffers`.
    fn exchange(
        &self,
        operation: &'static str,
        size: usize,
        parts: Vec<Range<usize>>,
        buffers: Vec<SharedBuffer>,
        take: impl FnOnce(&[Arc<Contribution>]),
    ) -> Result<()> {
        let rank = self.world.rank;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let own = Arc::new(Contribution { operation, size, parts, buffers, withdrawn: false });
        let mut state = self.state();
        state.contributions[rank] = Some(Arc::clone(&own));
        self.table.changed.notify_all();
        let (mut state, all_there) = self.wait(state, operation);
        if let Err(error) = all_there {
            // Nobody reads the buffers before all ranks have come, and from now on nobody will.
            let (parts, buffers) = (Vec::new(), Vec::new());
            state.contributions[rank] =
                Some(Arc::new(Contribution { operation, size, parts, buffers, withdrawn: true }));
            self.table.changed.notify_all();
            return Err(error);
        }
        let shown: Vec<Arc<Contribution>> = state.contributions.iter().flatten().cloned().collect();
        drop(state);
        // Runs even if `take` panics: other ranks must not read memory that has been freed.
        let leaving = LeaveGuard(self);
        let what = |shown: &Contribution| (shown.operation, shown.size, &shown.parts) == (operation, size, &own.parts);
        let differs = shown.iter().position(|other| !what(other));
        if differs.is_none() {
            take(&shown);
        }
        drop(leaving);
        let Some(other) = differs else { return Ok(()) };
        let Contribution { operation: theirs, size: bytes, .. } = &*shown[other];
        if (*theirs, *bytes) == (operation, size) {
            return Err(self.error(operation, format_args!("its parts are not those of rank {other}")));
        }
        Err(self.error(operation, format_args!("of {size} bytes meets {theirs} of {bytes} bytes of rank {other}")))
    }

    /// Replaces this rank's part of each piece by its sum over ranks, rank 0 first.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone or late.
    pub(crate) fn sum_parts(&self, pieces: &mut [Piece<'_>]) -> Result<()> {
        let rank = self.world.rank;
        let size = pieces.iter().map(Piece::bytes).sum();
        let (mut values, parts) = on_host(pieces);
        let buffers = values.iter_mut().map(|values| SharedBuffer::to_change(bytes::of_mut(values))).collect();
        self.exchange("reduce_scatter", size, together(parts.iter().copied()), buffers, |all| {
            for (index, parts) in parts.iter().enumerate() {
                let of_ranks: Vec<SharedBuffer> = all.iter().map(|shown| shown.buffers[index]).collect();
                // SAFETY: all ranks are in this exchange, which none leaves before all have looked; they came with the
                // same parts, as `exchange` has compared, which do not overlap: this rank's part of everybody's memory is
                // left to this thread.
                unsafe { SharedBuffer::sum(&of_ranks, rank, &parts[rank]) };
            }
        })
    }

    /// Fills in the parts of the other ranks.
    ///
    /// # Errors
    /// As [`Threads::sum_parts`].
    pub(crate) fn fill_parts(&self, pieces: &mut [Piece<'_>]) -> Result<()> {
        let size = pieces.iter().map(Piece::bytes).sum();
        let (mut values, parts) = on_host(pieces);
        let buffers = values.iter_mut().map(|values| SharedBuffer::to_change(bytes::of_mut(values))).collect();
        let width = size_of::<f32>();
        let parts = parts.iter().map(|parts| parts.iter().map(|part| part.start * width..part.end * width));
        let parts: Vec<Vec<Range<usize>>> = parts.map(Iterator::collect).collect();
        let parts: Vec<&[Range<usize>]> = parts.iter().map(Vec::as_slice).collect();
        let shown = together(parts.iter().copied());
        self.exchange("all_gather", size, shown, buffers, |all| self.fill(all, &parts))
    }

    /// Copies the other ranks' parts of all buffers to the same places here. `parts` are in bytes.
    fn fill(&self, all: &[Arc<Contribution>], parts: &[&[Range<usize>]]) {
        let rank = self.world.rank;
        for (other, shown) in all.iter().enumerate().filter(|(other, _)| *other != rank) {
            for (index, parts) in parts.iter().enumerate() {
                // SAFETY: all ranks are in this exchange, which none leaves before all have looked; they came with the
                // same parts, as `exchange` has compared, which do not overlap. Others read this rank's part here; it
                // writes only theirs, where nobody else looks.
                unsafe { all[rank].buffers[index].copy(shown.buffers[index], &parts[other]) };
            }
        }
    }
}

/// The values of pieces on the host, which other ranks look at until these are dropped, and the ranks' parts of each.
fn on_host<'a>(pieces: &'a mut [Piece<'_>]) -> (Vec<HostMut<'a, f32>>, Vec<&'a [Range<usize>]>) {
    pieces.iter_mut().map(|Piece { values, parts }| (values.reborrow().on_host(), parts.as_slice())).unzip()
}

/// The ranks' parts of all pieces, one after the other.
///
/// # Panics
/// If two ranks' parts of a piece overlap: one would write where the other reads.
fn together<'a>(pieces: impl Iterator<Item = &'a [Range<usize>]>) -> Vec<Range<usize>> {
    let mut all = Vec::new();
    for parts in pieces {
        let mut sorted: Vec<&Range<usize>> = parts.iter().filter(|part| !part.is_empty()).collect();
        sorted.sort_by_key(|part| part.start);
        assert!(sorted.windows(2).all(|pair| pair[0].end <= pair[1].start), "ranks' parts lie apart");
        all.extend_from_slice(parts);
    }
    all
}

/// Ends a rank's part in an exchange when dropped: waits until all other ranks have read its buffers.
struct LeaveGuard<'a>(&'a Threads);

impl Drop for LeaveGuard<'_> {
    fn drop(&mut self) {
        let Threads { world, table, .. } = self.0;
        let mut state = self.0.state();
        state.taken += 1;
        if state.taken == world.size {
            state.taken = 0;
            state.contributions.fill(None);
            table.changed.notify_all();
        }
        // Other ranks are still copying, which ends soon.
        while state.contributions[world.rank].is_some() {
            state = table.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
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

    fn shared_memory(&self) -> Option<&Threads> {
        Some(self)
    }

    fn all_to_all_bytes(&self, send: &[u8], parts: &[Range<usize>], receive: &mut [u8]) -> Result<()> {
        let own = &parts[self.world.rank];
        self.exchange("all_to_all", send.len(), Vec::new(), vec![SharedBuffer::to_read(send)], |all| {
            for (shown, into) in all.iter().zip(receive.chunks_exact_mut(own.len().max(1))) {
                // SAFETY: the owner is in this exchange, which it does not leave before all have looked. It shares `send`
                // for reading, so that nobody writes there.
                unsafe { shown.buffers[0].read(own, into) };
            }
        })
    }

    fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        let shown = together(std::iter::once(parts));
        self.exchange("all_gather", data.len(), shown, vec![SharedBuffer::to_change(data)], |all| {
            self.fill(all, &[parts]);
        })
    }

    fn broadcast_bytes(&self, data: &mut [u8], root: usize) -> Result<()> {
        let gives = self.world.rank == root;
        let buffers = if gives { vec![SharedBuffer::to_read(data)] } else { Vec::new() };
        self.exchange("broadcast", data.len(), Vec::new(), buffers, |all| {
            if !gives {
                // SAFETY: the root is in this exchange, which it does not leave before all have looked. It shares its data
                // for reading, so that nobody writes there.
                unsafe { all[root].buffers[0].read(&(0..data.len()), data) };
            }
        })
    }

    fn barrier(&self) -> Result<()> {
        self.exchange("barrier", 0, Vec::new(), Vec::new(), |_| ())
    }

    fn new_group(&self, group: Group) -> Result<Box<dyn Collectives>> {
        let Some(tables) = &self.groups else {
            return Err(self.error("new_group", "this is such a group already"));
        };
        let table = Arc::clone(&tables[group as usize]);
        Ok(Box::new(Self {
            world: self.world.within(group),
            limits: self.limits,
            turn: Mutex::new(()),
            table,
            groups: None,
        }))
    }
}

impl LocalMainFirst for Threads {
    fn release(&self) -> Result<()> {
        self.state().released = true;
        self.table.changed.notify_all();
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        let mut state = self.state();
        while !state.released {
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
        for (table, rank) in self.groups.iter().flatten().zip([self.world.rank, self.world.local_rank]) {
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
        assert_eq!(late.kind(), tunesmith_base::Kind::Peer);
        assert_eq!(late.message(), "rank 0: barrier: no answer from ranks 1 and 2 within 0.05 s");
        assert_eq!(gone.message(), "rank 1: barrier: rank 2 has ended");
    }

    #[test]
    fn ranks_with_different_parts_are_told() {
        let mut ranks = world(2, Limits::default());
        let second = ranks.pop().unwrap();
        let other = std::thread::spawn(move || second.all_gather_bytes(&mut [0; 4], &[0..1, 1..4]).unwrap_err());
        let error = ranks[0].all_gather_bytes(&mut [0; 4], &[0..2, 2..4]).unwrap_err();
        assert_eq!(error.message(), "rank 0: all_gather: its parts are not those of rank 1");
        assert_eq!(other.join().unwrap().message(), "rank 1: all_gather: its parts are not those of rank 0");
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

//! Ranks as threads of one process. In every operation each rank shares its buffers. When all have, each reads what it needs
//! from the others, and none leaves before all have read. So values are copied once, into their final place. When a rank is
//! dropped (its thread returned or panicked), the operations of the others fail at once.
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::bytes;
use super::partitioned_collectives::Piece;
use super::rendezvous::Door;
use super::shared_buffer::SharedBuffer;
use super::{Among, Collectives, LOST, Limits, World};
use tunesmith_base::error::{Error, Result};

/// What a rank shares in an operation.
#[derive(Debug)]
struct Shown {
    operation: &'static str,
    /// Bytes of the operation, compared to notice ranks that run different operations.
    size: usize,
    /// Every rank's parts of every piece, to notice ranks that would write where others read.
    parts: Vec<Range<usize>>,
    lent: Vec<SharedBuffer>,
    /// It waits no longer, and its memory may be gone.
    withdrawn: bool,
}

#[derive(Debug)]
struct State {
    shown: Vec<Option<Arc<Shown>>>,
    /// Number of ranks that have read what they need.
    taken: usize,
    /// Ranks that have ended, by rank.
    gone: Vec<bool>,
    /// Rank 0 has opened the [`Door`].
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
    /// Held by the thread that is in a meeting for this rank: what a rank shows is one thread's.
    turn: Mutex<()>,
    table: Arc<Table>,
    /// The tables for second worlds: of all ranks, and of this machine's. `None` in a second world.
    beside: Option<[Arc<Table>; 2]>,
}

/// All ranks of a world of `size` threads.
pub fn world(size: usize, limits: Limits) -> Vec<Threads> {
    machines(&[size], limits)
}

/// As [`world`], but as if the ranks were spread over machines with `sizes` ranks each.
pub fn machines(sizes: &[usize], limits: Limits) -> Vec<Threads> {
    let table = |size: usize| {
        let state = State { shown: vec![None; size], taken: 0, gone: vec![false; size], open: false };
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
        beside: Some([Arc::clone(&again), machine]),
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
            let absent: Vec<usize> = (0..self.world.size).filter(|&rank| state.shown[rank].is_none()).collect();
            let gone = absent.iter().find(|&&rank| state.gone[rank]);
            let given_up = || state.shown.iter().position(|shown| shown.as_ref().is_some_and(|shown| shown.withdrawn));
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

    /// Shows `lent`, and lets `take` look at what every rank shows, in the order of ranks. `take` is called only where all
    /// ranks came with the same operation, `size` and `parts`. When this returns nobody looks at `lent` any more.
    fn meet(
        &self,
        operation: &'static str,
        size: usize,
        parts: Vec<Range<usize>>,
        lent: Vec<SharedBuffer>,
        take: impl FnOnce(&[Arc<Shown>]),
    ) -> Result<()> {
        let rank = self.world.rank;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let own = Arc::new(Shown { operation, size, parts, lent, withdrawn: false });
        let mut state = self.state();
        state.shown[rank] = Some(Arc::clone(&own));
        self.table.changed.notify_all();
        let (mut state, all_there) = self.wait(state, operation);
        if let Err(error) = all_there {
            // Nobody looks before all are there, and from now on nobody will.
            let (parts, lent) = (Vec::new(), Vec::new());
            state.shown[rank] = Some(Arc::new(Shown { operation, size, parts, lent, withdrawn: true }));
            self.table.changed.notify_all();
            return Err(error);
        }
        let shown: Vec<Arc<Shown>> = state.shown.iter().flatten().cloned().collect();
        drop(state);
        // Also when `take` panics: the others must not look at memory that is given up.
        let leaving = Leaving(self);
        let what = |shown: &Shown| (shown.operation, shown.size, &shown.parts) == (operation, size, &own.parts);
        let differs = shown.iter().position(|other| !what(other));
        if differs.is_none() {
            take(&shown);
        }
        drop(leaving);
        let Some(other) = differs else { return Ok(()) };
        let Shown { operation: theirs, size: bytes, .. } = &*shown[other];
        if (*theirs, *bytes) == (operation, size) {
            return Err(self.error(operation, format_args!("its parts are not those of rank {other}")));
        }
        Err(self.error(operation, format_args!("of {size} bytes meets {theirs} of {bytes} bytes of rank {other}")))
    }

    /// Replaces this rank's part of each piece by its sum over ranks, rank 0 first.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone or late.
    pub fn sum_parts(&self, pieces: &mut [Piece<'_>]) -> Result<()> {
        let rank = self.world.rank;
        let size = pieces.iter().map(|piece| size_of_val(piece.values)).sum();
        let lent = pieces.iter_mut().map(|piece| SharedBuffer::to_change(bytes::of_mut(piece.values))).collect();
        let parts = together(pieces.iter().map(|piece| piece.parts.as_slice()));
        self.meet("reduce_scatter", size, parts, lent, |all| {
            for (index, piece) in pieces.iter().enumerate() {
                let of_ranks: Vec<SharedBuffer> = all.iter().map(|shown| shown.lent[index]).collect();
                // SAFETY: all ranks are in this meeting, which none leaves before all have looked; they came with the
                // same parts, as `meet` has compared, which do not overlap: this rank's part of everybody's memory is
                // left to this thread.
                unsafe { SharedBuffer::sum(&of_ranks, rank, &piece.parts[rank]) };
            }
        })
    }

    /// Fills in the parts of the other ranks.
    ///
    /// # Errors
    /// As [`Threads::sum_parts`].
    pub fn fill_parts(&self, pieces: &mut [Piece<'_>]) -> Result<()> {
        let size = pieces.iter().map(|piece| size_of_val(piece.values)).sum();
        let lent: Vec<SharedBuffer> =
            pieces.iter_mut().map(|piece| SharedBuffer::to_change(bytes::of_mut(piece.values))).collect();
        let width = size_of::<f32>();
        let parts = pieces.iter().map(|piece| piece.parts.iter().map(|part| part.start * width..part.end * width));
        let parts: Vec<Vec<Range<usize>>> = parts.map(Iterator::collect).collect();
        let parts: Vec<&[Range<usize>]> = parts.iter().map(Vec::as_slice).collect();
        let shown = together(parts.iter().copied());
        self.meet("all_gather", size, shown, lent, |all| self.fill(all, &parts))
    }

    /// Copies every other rank's parts of what it shows, in bytes, to the same places here.
    fn fill(&self, all: &[Arc<Shown>], parts: &[&[Range<usize>]]) {
        let rank = self.world.rank;
        for (other, shown) in all.iter().enumerate().filter(|(other, _)| *other != rank) {
            for (index, parts) in parts.iter().enumerate() {
                // SAFETY: all ranks are in this meeting, which none leaves before all have looked; they came with the
                // same parts, as `meet` has compared, which do not overlap. Others read this rank's part here; it
                // writes only theirs, where nobody else looks.
                unsafe { all[rank].lent[index].copy(shown.lent[index], &parts[other]) };
            }
        }
    }
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

/// Counts a rank out of a meeting, and waits for the others to have looked.
struct Leaving<'a>(&'a Threads);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let Threads { world, table, .. } = self.0;
        let mut state = self.0.state();
        state.taken += 1;
        if state.taken == world.size {
            state.taken = 0;
            state.shown.fill(None);
            table.changed.notify_all();
        }
        // They are copying: that ends.
        while state.shown[world.rank].is_some() {
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
        self.meet("all_to_all", send.len(), Vec::new(), vec![SharedBuffer::to_read(send)], |all| {
            for (shown, into) in all.iter().zip(receive.chunks_exact_mut(own.len().max(1))) {
                // SAFETY: the owner is in this meeting, which it does not leave before all have looked. It lent `send`
                // for reading, so that nobody writes there.
                unsafe { shown.lent[0].read(own, into) };
            }
        })
    }

    fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        let shown = together(std::iter::once(parts));
        self.meet("all_gather", data.len(), shown, vec![SharedBuffer::to_change(data)], |all| {
            self.fill(all, &[parts]);
        })
    }

    fn broadcast_bytes(&self, data: &mut [u8], root: usize) -> Result<()> {
        let gives = self.world.rank == root;
        let lent = if gives { vec![SharedBuffer::to_read(data)] } else { Vec::new() };
        self.meet("broadcast", data.len(), Vec::new(), lent, |all| {
            if !gives {
                // SAFETY: the root is in this meeting, which it does not leave before all have looked. It lent its data
                // for reading, so that nobody writes there.
                unsafe { all[root].lent[0].read(&(0..data.len()), data) };
            }
        })
    }

    fn barrier(&self) -> Result<()> {
        self.meet("barrier", 0, Vec::new(), Vec::new(), |_| ())
    }

    fn beside(&self, who: Among) -> Result<Box<dyn Collectives>> {
        let Some(tables) = &self.beside else {
            return Err(self.error("beside", "this world is beside another already"));
        };
        let table = Arc::clone(&tables[who as usize]);
        Ok(Box::new(Self {
            world: self.world.among(who),
            limits: self.limits,
            turn: Mutex::new(()),
            table,
            beside: None,
        }))
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

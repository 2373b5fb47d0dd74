//! Predicts which memory the next product will read, so that threads that wait for work can prefetch it. This is only a
//! hint: it may be wrong, and it never changes a result.
use crate::simd::prefetch_far;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most matrices of a product that are remembered.
const STRETCHES: usize = 4;
/// How many bytes are prefetched before a thread looks for work again.
const STEP: usize = 1024;
/// The most bytes that a thread prefetches of its own part: about what its L2 cache has room for.
const OWN: usize = 256 << 10;
/// The most bytes of the leader's part. The first other thread prefetches them after its own part.
const LEADERS: usize = 96 << 10;

/// The memory that a product will read: the address and length of each matrix, which count as one run of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Upcoming([(usize, usize); STRETCHES]);

impl Upcoming {
    /// The memory of the first matrices of a product.
    pub fn new(stretches: impl Iterator<Item = (usize, usize)>) -> Self {
        let mut all = Self::default();
        all.0.iter_mut().zip(stretches).for_each(|(to, from)| *to = from);
        all
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The address of byte `at` of the run.
    fn address(&self, mut at: usize) -> Option<usize> {
        for (address, bytes) in self.0 {
            if at < bytes {
                return Some(address.wrapping_add(at));
            }
            at -= bytes;
        }
        None
    }
}

/// What followed a product the last time. It is learned while a model runs, because each step has the same products.
#[derive(Debug, Default)]
pub(crate) struct Follower([(AtomicUsize, AtomicUsize); STRETCHES]);

impl Follower {
    /// Called when a product begins on this thread: `self` belongs to it, and it reads `reads`. Notes that for the
    /// product before it, and returns what followed this product the last time.
    pub fn begin(self: &Arc<Self>, reads: Upcoming) -> Upcoming {
        thread_local! {
            static LAST: RefCell<Option<Arc<Follower>>> = const { RefCell::new(None) };
        }
        if let Some(last) = LAST.replace(Some(Arc::clone(self))) {
            for ((address, bytes), from) in last.0.iter().zip(reads.0) {
                address.store(from.0, Ordering::Relaxed);
                bytes.store(from.1, Ordering::Relaxed);
            }
        }
        let load = |place: &AtomicUsize| place.load(Ordering::Relaxed);
        Upcoming::new(self.0.iter().map(|(address, bytes)| (load(address), load(bytes))))
    }
}

/// How far a thread has prefetched its part.
#[derive(Debug)]
pub(crate) struct Fetching {
    upcoming: Upcoming,
    /// The bytes that are left: of its own part, then of the leader's.
    left: [std::ops::Range<usize>; 2],
}

impl Fetching {
    /// Starts for thread `own` of `threads`. All threads have parts of equal length.
    pub fn new(upcoming: Upcoming, own: usize, threads: usize) -> Self {
        let total = upcoming.bytes();
        let part = total / threads;
        let leaders = if own == 1 { part.min(LEADERS) } else { 0 };
        Self { upcoming, left: [own * part..own * part + part.min(OWN), 0..leaders] }
    }

    /// Prefetches the next cache lines. Returns whether there were any left.
    pub fn step(&mut self) -> bool {
        let Some(left) = self.left.iter_mut().find(|left| left.start < left.end) else { return false };
        let at = left.start;
        left.start = (at + STEP).min(left.end);
        if let Some(address) = self.upcoming.address(at) {
            // Prefetching reads no address, so it does no harm if the matrix is gone.
            (0..STEP)
                .step_by(64)
                .for_each(|line| prefetch_far(std::ptr::without_provenance(address.wrapping_add(line))));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_is_learned_by_thread() {
        let followers: Vec<Arc<Follower>> = (0..3).map(|_| Arc::default()).collect();
        let reads = |at: usize| Upcoming::new([(at * 1000, 10 + at), (at * 1000 + 500, 7)].into_iter());
        let round = || -> Vec<_> { followers.iter().enumerate().map(|(at, own)| own.begin(reads(at))).collect() };
        assert_eq!(round(), [Upcoming::default(); 3]);
        // The last one was followed by the first of this round.
        assert_eq!(round(), [reads(1), reads(2), reads(0)]);
        assert_eq!(std::thread::scope(|scope| scope.spawn(round).join().unwrap()), [reads(1), reads(2), reads(0)]);
    }

    #[test]
    fn threads_fetch_their_parts_once() {
        let upcoming = Upcoming::new([(4096, 3000), (1 << 20, 5000)].into_iter());
        assert_eq!(
            (upcoming.address(2999), upcoming.address(3000), upcoming.address(8000)),
            (Some(7095), Some(1 << 20), None)
        );
        for (own, steps) in [(0, 4), (1, 8)] {
            let mut fetching = Fetching::new(upcoming, own, 2);
            assert_eq!((0..100).filter(|_| fetching.step()).count(), steps);
        }
        assert!(!Fetching::new(Upcoming::default(), 1, 2).step());
    }
}

//! How many bytes the process holds ([`live`], [`peak`]), how many it may ([`Budget`]), and how many the
//! machine has ([`limits`]).
//!
//! Rust's allocator cannot return a failed allocation as an error. So whoever takes a large buffer asks [`admit`]
//! first. Where the budget would be exceeded, that call unwinds without a panic's message to the nearest [`guarded`],
//! which returns an error of [`crate::Kind::Memory`]. Unwinding gives back what was taken on the way, so that the
//! caller can try again with less.
mod counting;
pub mod limits;
mod overflow;

use counting::end;
pub use counting::{calls, cost, highest, live, peak, reset_peak};
pub use overflow::catch_stack_overflow;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// Bytes with three digits in a binary unit, up to TiB: `1.50 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value < 10.0 => format!("{value:.2} {}", UNITS[unit]),
        _ if value < 100.0 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.0} {}", UNITS[unit]),
    }
}

/// The value of [`BUDGET`] without a budget.
const NONE: u64 = u64::MAX;

static BUDGET: AtomicU64 = AtomicU64::new(NONE);

/// The most bytes that the process may hold; while it lives, [`admit`] refuses what would exceed it.
#[derive(Debug)]
pub struct Budget {
    before: u64,
}

impl Budget {
    /// Sets the budget to `bytes` until this is dropped, which restores the one before.
    pub fn new(bytes: u64) -> Self {
        Self { before: BUDGET.swap(bytes, Ordering::Relaxed) }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        BUDGET.store(self.before, Ordering::Relaxed);
    }
}

/// The budget in bytes, if there is one.
pub fn budget() -> Option<u64> {
    Some(BUDGET.load(Ordering::Relaxed)).filter(|&bytes| bytes != NONE)
}

/// Carries a refusal of [`admit`] to [`guarded`]; all in bytes.
struct Exceeded {
    wanted: u64,
    live: u64,
    budget: u64,
}

/// Held from the check until the memory is taken: of two threads that ask at once, the second sees what the first took.
static TAKING: Mutex<()> = Mutex::new(());

/// Takes a buffer of `bytes` with `take`, which must not call this again: a lock is held meanwhile.
///
/// Where the buffer would exceed the budget, this does not return: it unwinds to the nearest [`guarded`].
pub fn admit<T>(bytes: usize, take: impl FnOnce() -> T) -> T {
    let taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let budget = BUDGET.load(Ordering::Relaxed);
    let (live, wanted) = (live(), bytes as u64);
    if live.saturating_add(wanted) > budget {
        drop(taking);
        // Not a panic: nothing is wrong with the program, and no hook has anything to print.
        resume_unwind(Box::new(Exceeded { wanted, live, budget }));
    }
    take()
}

/// Does `work`, and returns a refusal of [`admit`] within it as an error. Whatever `work` leaves half done must be
/// thrown away when it fails.
///
/// # Errors
/// Those of `work`. [`crate::Kind::Memory`]: the budget would have been exceeded.
pub fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(payload) => match payload.downcast::<Exceeded>() {
            Ok(exceeded) => {
                let Exceeded { wanted, live, budget } = *exceeded;
                Err(Error::memory(format!(
                    "{} more would exceed the memory budget of {}: {} are held",
                    human_bytes(wanted),
                    human_bytes(budget),
                    human_bytes(live)
                ))
                .hint("raise train.memory_budget, or use less: docs/auto-batch.md"))
            }
            Err(panic) => resume_unwind(panic),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other tests of this process allocate meanwhile, though far less than this.
    const LARGE: usize = 512 << 20;

    #[test]
    fn large_buffers_are_counted_while_they_live() {
        let (before, above) = (live(), LARGE as u64 / 2);
        let block = Vec::<u8>::with_capacity(LARGE);
        assert!(live() > before + above, "{} then {}", before, live());
        assert!(peak() > before + above && highest() >= peak());
        drop(std::hint::black_box(block));
        assert!(live() < before + above, "{} then {}", before, live());
    }

    #[test]
    fn many_small_pieces_are_counted_too() {
        let before = live();
        let pieces: Vec<Box<[u8; 1 << 10]>> = (0..200 << 10).map(|_| Box::new([1; 1 << 10])).collect();
        let held = live().saturating_sub(before);
        assert!((180 << 20..320 << 20).contains(&held), "{} pieces hold {held}", pieces.len());
    }

    #[test]
    fn calls_are_counted_and_counting_costs_little() {
        let before = calls();
        let pieces: Vec<Box<u64>> = (0..100_000).map(|number| std::hint::black_box(Box::new(number))).collect();
        assert!(calls() >= before + pieces.len() as u64 - 1024, "{} then {}", before, calls());
        assert!(cost() < 1e-6, "{:e} s a call", cost());
    }

    #[test]
    fn what_would_exceed_the_budget_is_an_error_of_its_own_and_other_panics_stay_panics() {
        assert_eq!(guarded(|| Ok(7)).unwrap(), 7);
        // As `admit` does it: a budget of its own would catch other tests of this process.
        let exceed =
            || -> Result<()> { resume_unwind(Box::new(Exceeded { wanted: 64 << 20, live: 1 << 30, budget: 1 << 30 })) };
        let error = guarded::<()>(exceed).unwrap_err();
        assert_eq!(error.kind(), crate::Kind::Memory);
        assert!(error.message().contains("64.0 MiB more would exceed the memory budget of 1.00 GiB"), "{error}");
        let in_a_thread = guarded::<()>(|| {
            rayon::scope(|scope| scope.spawn(|_| drop(exceed())));
            Ok(())
        });
        assert_eq!(in_a_thread.unwrap_err().kind(), crate::Kind::Memory);
        let other = catch_unwind(|| guarded::<()>(|| resume_unwind(Box::new("another panic"))));
        assert_eq!(other.unwrap_err().downcast_ref::<&str>(), Some(&"another panic"));
    }

    #[test]
    fn bytes_read_well() {
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536), "1.50 KiB");
        assert_eq!(human_bytes(200 << 20), "200 MiB");
    }
}

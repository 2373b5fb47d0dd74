//! How many bytes of a device a run holds ([`live`], [`peak`]), and how many it may hold ([`Budget`]).
//!
//! Rust's allocator cannot return a failed allocation as an error. So every large buffer is allocated through
//! [`admit`]. If the budget would be exceeded, that call unwinds without a panic message to the nearest [`guarded`],
//! which returns an error of [`tunesmith_base::Kind::Memory`]. Unwinding frees what was allocated on the way, so that
//! the caller can try again with less.
use super::Device;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::memory::{self, human_bytes};

/// The value of an unset budget.
const NONE: u64 = u64::MAX;

/// The budget of the CPU: of the whole process.
static CPU: AtomicU64 = AtomicU64::new(NONE);

/// The budgets of GPUs: of what this process holds there.
static GPUS: [AtomicU64; 256] = [const { AtomicU64::new(NONE) }; 256];

/// The bytes that this process holds for one GPU.
struct Held {
    live: AtomicU64,
    peak: AtomicU64,
    /// On the host, for the GPU.
    on_host: AtomicU64,
}

static HELD: [Held; 256] =
    [const { Held { live: AtomicU64::new(0), peak: AtomicU64::new(0), on_host: AtomicU64::new(0) } }; 256];

/// Counts bytes that were allocated on a GPU.
pub(crate) fn taken(ordinal: u8, bytes: usize) {
    let held = &HELD[usize::from(ordinal)];
    let live = held.live.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    held.peak.fetch_max(live, Ordering::Relaxed);
}

/// Counts bytes that were freed on a GPU.
pub(crate) fn given_back(ordinal: u8, bytes: usize) {
    HELD[usize::from(ordinal)].live.fetch_sub(bytes as u64, Ordering::Relaxed);
}

/// Counts bytes that are offloaded from a GPU to the host.
pub(crate) fn put_on_host(ordinal: u8, bytes: usize) {
    HELD[usize::from(ordinal)].on_host.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Counts offloaded bytes that have left the host.
pub(crate) fn taken_from_host(ordinal: u8, bytes: usize) {
    HELD[usize::from(ordinal)].on_host.fetch_sub(bytes as u64, Ordering::Relaxed);
}

/// Bytes that are offloaded from a GPU to the host now ([`crate::away`]).
pub fn on_host(device: Device) -> u64 {
    match device {
        Device::Cuda(ordinal) => HELD[usize::from(ordinal)].on_host.load(Ordering::Relaxed),
        Device::Cpu | Device::Meta => 0,
    }
}

/// A device's budget; none if the device has no memory.
fn limit(device: Device) -> Option<&'static AtomicU64> {
    match device {
        Device::Cpu => Some(&CPU),
        Device::Cuda(ordinal) => Some(&GPUS[usize::from(ordinal)]),
        Device::Meta => None,
    }
}

/// Bytes that are held there now: on the CPU, all of the process; on a GPU, its arrays and activations.
pub fn live(device: Device) -> u64 {
    match device {
        Device::Cpu => memory::live(),
        Device::Cuda(ordinal) => HELD[usize::from(ordinal)].live.load(Ordering::Relaxed),
        Device::Meta => 0,
    }
}

/// The most bytes held there at once since the last [`reset_peak`].
pub fn peak(device: Device) -> u64 {
    match device {
        Device::Cpu => memory::peak(),
        Device::Cuda(ordinal) => HELD[usize::from(ordinal)].peak.load(Ordering::Relaxed),
        Device::Meta => 0,
    }
}

/// Starts a new measurement of [`peak`].
pub fn reset_peak(device: Device) {
    match device {
        Device::Cpu => memory::reset_peak(),
        Device::Cuda(ordinal) => {
            let held = &HELD[usize::from(ordinal)];
            held.peak.store(held.live.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Device::Meta => {}
    }
}

/// The most bytes of a device that may be held. While it lives, [`admit`] refuses to exceed it. Of several that live at once,
/// in whatever order they come and go, the least counts.
#[derive(Debug)]
pub struct Budget {
    device: Device,
    bytes: u64,
}

/// All budgets that are alive now.
static BUDGETS: Mutex<Vec<(Device, u64)>> = Mutex::new(Vec::new());

impl Budget {
    /// Keeps the device's budget at `bytes` or less until this is dropped.
    pub fn new(device: Device, bytes: u64) -> Self {
        Self::change(device, |all| all.push((device, bytes)));
        Self { device, bytes }
    }

    /// Changes the budgets that live, and with them the device's limit.
    fn change(device: Device, change: impl FnOnce(&mut Vec<(Device, u64)>)) {
        let mut all = BUDGETS.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut all);
        if let Some(limit) = limit(device) {
            let least = all.iter().filter(|&&(of, _)| of == device).map(|&(_, bytes)| bytes).min();
            limit.store(least.unwrap_or(NONE), Ordering::Relaxed);
        }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        Self::change(self.device, |all| {
            if let Some(at) = all.iter().position(|&one| one == (self.device, self.bytes)) {
                all.swap_remove(at);
            }
        });
    }
}

/// A device's budget in bytes, if there is one.
pub fn budget(device: Device) -> Option<u64> {
    limit(device).map(|limit| limit.load(Ordering::Relaxed)).filter(|&bytes| bytes != NONE)
}

/// Carries a refusal of [`admit`] to [`guarded`]; all in bytes.
struct Exceeded {
    wanted: u64,
    live: u64,
    budget: u64,
}

/// Held from the check until the memory is allocated, so that a second thread sees the first one's allocation.
static TAKING: Mutex<()> = Mutex::new(());

/// Allocates a buffer of `bytes` on a device with `take`, which must not call this again: a lock is held meanwhile.
///
/// If the buffer would exceed the device's budget, this does not return: it unwinds to the nearest [`guarded`].
pub fn admit<T>(device: Device, bytes: usize, take: impl FnOnce() -> T) -> T {
    let taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let budget = budget(device).unwrap_or(NONE);
    let (live, wanted) = (live(device), bytes as u64);
    if live.saturating_add(wanted) > budget {
        drop(taking);
        // Not a panic: nothing is wrong with the program, and no hook has anything to print.
        resume_unwind(Box::new(Exceeded { wanted, live, budget }));
    }
    take()
}

/// Unwinds with a device's failure to the nearest [`guarded`], which returns the error.
pub(crate) fn fail(error: Error) -> ! {
    resume_unwind(Box::new(Failed(error)))
}

/// Carries a device's failure to [`guarded`].
struct Failed(Error);

/// Runs `work`, and returns a refusal of [`admit`] or a device's failure within it as an error. After a failure, the
/// caller must discard whatever `work` has left half done.
///
/// # Errors
/// Those of `work`. [`tunesmith_base::Kind::Memory`]: the budget would have been exceeded, or a GPU has no more memory.
/// [`tunesmith_base::Kind::Device`]: a GPU failed.
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
            Err(payload) => match payload.downcast::<Failed>() {
                Ok(failed) => Err(failed.0),
                Err(panic) => resume_unwind(panic),
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_exceed_the_budget_is_an_error_of_its_own_and_other_panics_stay_panics() {
        assert_eq!(guarded(|| Ok(7)).unwrap(), 7);
        // As `admit` does it: a budget of its own would catch other tests of this process.
        let exceed =
            || -> Result<()> { resume_unwind(Box::new(Exceeded { wanted: 64 << 20, live: 1 << 30, budget: 1 << 30 })) };
        let error = guarded::<()>(exceed).unwrap_err();
        assert_eq!(error.kind(), tunesmith_base::Kind::Memory);
        assert!(error.message().contains("64.0 MiB more would exceed the memory budget of 1.00 GiB"), "{error}");
        let in_a_thread = guarded::<()>(|| {
            rayon::scope(|scope| scope.spawn(|_| drop(exceed())));
            Ok(())
        });
        assert_eq!(in_a_thread.unwrap_err().kind(), tunesmith_base::Kind::Memory);
        let other = catch_unwind(|| guarded::<()>(|| resume_unwind(Box::new("another panic"))));
        assert_eq!(other.unwrap_err().downcast_ref::<&str>(), Some(&"another panic"));
    }

    #[test]
    fn a_budget_is_a_devices_own() {
        let budget_of_meta = Budget::new(Device::Meta, 1);
        assert_eq!((budget(Device::Meta), live(Device::Meta)), (None, 0));
        assert_eq!(admit(Device::Meta, 1 << 50, || 7), 7);
        drop(budget_of_meta);
    }

    #[test]
    fn the_least_budget_counts_in_whatever_order_they_end() {
        // A GPU that nothing else in this process uses.
        let device = Device::Cuda(250);
        let (first, second) = (Budget::new(device, 5), Budget::new(device, 3));
        assert_eq!(budget(device), Some(3));
        let third = Budget::new(device, 7);
        drop(first);
        assert_eq!(budget(device), Some(3));
        drop(second);
        assert_eq!(budget(device), Some(7));
        drop(third);
        assert_eq!(budget(device), None);
    }
}

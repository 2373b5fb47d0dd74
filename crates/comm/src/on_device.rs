//! What an engine does with numbers that lie in a GPU's memory: it sends them from there, and nothing goes through the host.
//! The host does not wait either. All of an engine's work is on a queue of its own, in the order in which it is asked for,
//! beside what the GPU computes meanwhile.
use std::ops::Range;

use tunesmith_base::error::Result;
use tunesmith_device::Queue;

/// Bytes of a GPU's memory that one rank sends and another receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The other rank.
    pub peer: usize,
    /// Where the bytes are, or go.
    pub address: u64,
    /// How many.
    pub bytes: usize,
}

/// An engine whose ranks have a GPU each, as far as it takes bytes from there.
///
/// Addresses are of memory of the queue's GPU, which lives until the queue has done what is asked for. What an operation reads
/// must be there before: who has computed it on another queue calls within [`Queue::cross`], or waits for a
/// [`tunesmith_device::Mark`] on this one.
pub trait OnDevice: Send + Sync {
    /// Where the operations are put.
    fn queue(&self) -> &Queue;

    /// Sends and receives all at once. To each peer goes what it receives from this rank, in the same order.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone or late, as far as that is known now. What becomes known later, all get
    /// who wait for the GPU.
    fn exchange(&self, sends: &[Transfer], receives: &[Transfer]) -> Result<()>;

    /// Fills in the other ranks' parts of each stretch of memory, which begins at an address and has so many bytes from each
    /// rank, in rank order.
    ///
    /// # Errors
    /// As [`OnDevice::exchange`].
    fn all_gather(&self, stretches: &[(u64, Vec<Range<usize>>)]) -> Result<()>;

    /// Replaces so many bytes at an address by those of rank `root`.
    ///
    /// # Errors
    /// As [`OnDevice::exchange`].
    fn broadcast(&self, address: u64, bytes: usize, root: usize) -> Result<()>;
}

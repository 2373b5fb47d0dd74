//! Operations of an engine on numbers in a GPU's memory: it sends them from there, not through the host, and the host
//! does not wait. All of an engine's work is on its own queue, in the order of the calls, in parallel to what the GPU
//! computes.
use std::ops::Range;

use tunesmith_base::error::Result;
use tunesmith_device::Queue;

/// Bytes of a GPU's memory that one rank sends and another receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The rank that receives or sends the bytes.
    pub peer: usize,
    /// The address of the bytes, or their destination.
    pub address: u64,
    /// The number of bytes.
    pub bytes: usize,
}

/// An engine whose ranks have a GPU each, and which sends bytes directly from GPU memory.
///
/// Addresses refer to memory of the queue's GPU, which must live until the queue has finished the operation. The data
/// that an operation reads must be complete. If another queue computes it, call within [`Queue::cross`], or wait for a
/// [`tunesmith_device::Mark`] on this queue.
pub trait OnDevice: Send + Sync {
    /// The queue of the operations.
    fn queue(&self) -> &Queue;

    /// Sends and receives all at once. The sends to a peer must match its receives from this rank, in the same order.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is known to be gone or late. Later failures surface when something waits
    /// for the GPU.
    fn exchange(&self, sends: &[Transfer], receives: &[Transfer]) -> Result<()>;

    /// Fills in the other ranks' parts of each stretch of memory: its address, and the number of bytes from each rank,
    /// in rank order.
    ///
    /// # Errors
    /// As [`OnDevice::exchange`].
    fn all_gather(&self, stretches: &[(u64, Vec<Range<usize>>)]) -> Result<()>;

    /// Replaces this number of bytes at an address by those of rank `root`.
    ///
    /// # Errors
    /// As [`OnDevice::exchange`].
    fn broadcast(&self, address: u64, bytes: usize, root: usize) -> Result<()>;
}

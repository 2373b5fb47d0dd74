//! The ranks of a run ([`World`]) and their collective operations ([`Collectives`]). One rank alone runs the same
//! code, with the engine [`single::Single`].
//!
//! An engine only moves bytes. Sums are computed here, in one place and in one order (rank 0 first). So the result has the
//! same bits on every rank, in every run and with every engine:
//!
//! ```text
//! reduce_scatter = all_to_all + the sum of what arrived, in the order of ranks
//! all_reduce     = reduce_scatter + all_gather        (small ones: all_gather + sum)
//! ```
//!
//! [`partition`] decides which rank owns which part of the trained values; [`partitioned_collectives`] sums and gathers such
//! parts. [`comm_thread`] runs operations in the background.
//!
//! To start, [`mod@env`] reads the launcher's variables. [`rendezvous`] connects all ranks to one [`store`], through torchrun's
//! store ([`c10d`]) if there is one. Then [`gloo`], `nccl` or [`threads`] moves the bytes.
pub mod bytes;
pub mod c10d;
pub mod comm_thread;
pub mod env;
pub mod gloo;
pub mod gloo_library;
pub mod gpus;
pub mod host;
pub mod membership;
#[cfg(feature = "cuda")]
pub mod nccl;
pub mod on_device;
pub mod partition;
pub mod partitioned_collectives;
pub mod process;
mod rank_sums;
pub mod rendezvous;
mod shared_buffer;
pub mod single;
pub mod slurm;
pub mod store;
pub mod threads;
pub mod token;
mod wire;

use std::ops::Range;
use std::time::Duration;

pub use bytes::Element;
pub use on_device::OnDevice;
pub use partition::Partition;
use tunesmith_base::error::Result;
use tunesmith_device::{Device, Element as Number, SliceMut};

/// The place of this rank among all that train together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// This rank's number among all ranks, `0..size`.
    pub rank: usize,
    /// How many ranks take part.
    pub size: usize,
    /// This rank's number on its machine.
    pub local_rank: usize,
    /// How many ranks are on its machine.
    pub local_size: usize,
}

impl World {
    /// A rank that is alone.
    pub const ALONE: Self = Self { rank: 0, size: 1, local_rank: 0, local_size: 1 };

    /// This rank's place in a group.
    #[must_use]
    pub const fn within(self, group: Group) -> Self {
        match group {
            Group::All => self,
            Group::Node => Self { rank: self.local_rank, size: self.local_size, ..self },
        }
    }

    /// Whether this rank writes what a run leaves behind.
    pub const fn is_first(self) -> bool {
        self.rank == 0
    }

    /// This rank's part of `length` elements.
    pub fn part(self, length: usize) -> Range<usize> {
        part(length, self.size, self.rank)
    }
}

/// The part of `length` elements that belongs to `rank` of `size`: parts differ by one element at most.
pub fn part(length: usize, size: usize, rank: usize) -> Range<usize> {
    let end = |rank: usize| (length as u128 * rank as u128 / size.max(1) as u128) as usize;
    end(rank)..end(rank + 1)
}

/// The ranks of a new group ([`Collectives::new_group`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// All ranks of the run.
    All,
    /// The ranks on this machine.
    Node,
}

/// Timeout and buffer size of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long an operation may take.
    pub timeout: Duration,
    /// Bytes that an [`all_reduce`](trait.Collectives.html#method.all_reduce) moves at a time, and the most memory that it needs
    /// besides the data.
    pub bucket: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), bucket: 25 << 20 }
    }
}

/// An engine that moves bytes between ranks. Every rank must call the same operations in the same order with the same sizes.
///
/// All operations fail with [`tunesmith_base::Kind::Peer`], naming rank, operation and peer, when a peer is gone or an operation
/// takes longer than [`Limits::timeout`]. After that the engine is not used again.
///
/// The typed operations that the run uses are methods of `dyn Collectives`: [`all_reduce`](#method.all_reduce),
/// [`reduce_scatter`](#method.reduce_scatter), [`all_gather`](#method.all_gather), [`broadcast`](#method.broadcast).
pub trait Collectives: Send + Sync {
    /// The place of this rank.
    fn world(&self) -> World;
    /// How long an operation may take, and how much it moves at a time.
    fn limits(&self) -> Limits;
    /// The engine's name in messages.
    fn name(&self) -> &'static str;
    /// The engine itself, if its ranks are threads of one process that read each other's memory.
    fn shared_memory(&self) -> Option<&threads::Threads> {
        None
    }
    /// The engine itself, if each rank has a GPU of its own and numbers are sent from its memory.
    fn on_device(&self) -> Option<&dyn OnDevice> {
        None
    }
    /// Sends the bytes `parts[r]` of `send` to rank r, and receives this rank's part from every rank, in rank order: `receive` is
    /// `[size, parts[rank].len()]`. `parts` are contiguous, and the same on every rank.
    ///
    /// # Errors
    /// As the trait says.
    fn all_to_all_bytes(&self, send: &[u8], parts: &[Range<usize>], receive: &mut [u8]) -> Result<()>;
    /// Fills in the other ranks' parts of `data`; this rank provides `data[parts[rank]]`.
    ///
    /// # Errors
    /// As the trait says.
    fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()>;
    /// Replaces `data` by that of rank `root`.
    ///
    /// # Errors
    /// As the trait says.
    fn broadcast_bytes(&self, data: &mut [u8], root: usize) -> Result<()>;
    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As the trait says.
    fn barrier(&self) -> Result<()>;
    /// Creates a group like `torch.distributed.new_group`: of all ranks, or of this machine's ranks, numbered by `local_rank`
    /// there. Its operations are independent of this group's. Every rank must call it, at most once for each kind.
    ///
    /// # Errors
    /// As the trait says.
    fn new_group(&self, group: Group) -> Result<Box<dyn Collectives>>;
}

/// Up to this many bytes, every rank gathers and sums everything, which saves a message.
const SMALL: usize = 4096;

/// The hint when another rank does not answer.
const LOST: &str =
    "another rank ended, or it cannot be reached: its own message says why; after that, continue with --resume";
/// The hint when a rank cannot reach the others.
const NO_WAY: &str = "check MASTER_ADDR, MASTER_PORT and the machines' names, and that no firewall closes the port";

impl dyn Collectives + '_ {
    /// Whether all ranks share one process, and so one memory budget.
    pub fn shares_memory(&self) -> bool {
        self.shared_memory().is_some()
    }

    /// Replaces `data` on every rank by the sum over ranks. Integers wrap around; f16 and bf16 are summed in f32 and
    /// rounded once.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a peer is gone or late.
    pub fn all_reduce<T: Element>(&self, data: &mut [T]) -> Result<()> {
        let world = self.world();
        if world.size == 1 || data.is_empty() {
            return Ok(());
        }
        if size_of_val(data) <= SMALL {
            let mut all = vec![T::ZERO; data.len() * world.size];
            all[world.rank * data.len()..][..data.len()].copy_from_slice(data);
            self.all_gather(&mut all)?;
            T::sum(data, &all);
            return Ok(());
        }
        for piece in data.chunks_mut((self.limits().bucket / size_of::<T>()).max(1)) {
            self.reduce_scatter(piece)?;
            self.all_gather(piece)?;
        }
        Ok(())
    }

    /// Replaces this rank's [`World::part`] of `data` by the sum over ranks, and returns its range. The rest of `data` is
    /// unchanged. Sums as [`all_reduce`](#method.all_reduce).
    ///
    /// # Errors
    /// As [`all_reduce`](#method.all_reduce).
    pub fn reduce_scatter<T: Element>(&self, data: &mut [T]) -> Result<Range<usize>> {
        let world = self.world();
        let own = world.part(data.len());
        if world.size == 1 || data.is_empty() {
            return Ok(own);
        }
        let mut all = vec![T::ZERO; own.len() * world.size];
        self.all_to_all_bytes(bytes::of(data), &byte_parts::<T>(data.len(), world.size), bytes::of_mut(&mut all))?;
        T::sum(&mut data[own.clone()], &all);
        Ok(own)
    }

    /// Fills `data`, of which each rank provides its [`World::part`].
    ///
    /// # Errors
    /// As [`all_reduce`](#method.all_reduce).
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<()> {
        let size = self.world().size;
        if size == 1 || data.is_empty() {
            return Ok(());
        }
        let parts = byte_parts::<T>(data.len(), size);
        self.all_gather_bytes(bytes::of_mut(data), &parts)
    }

    /// Fills in the other ranks' `parts` of `values`; this rank provides its own. The parts are contiguous, in rank
    /// order. If the engine works on the GPU's memory, later work on this thread's queue sees them, and the host does
    /// not wait.
    ///
    /// # Errors
    /// As [`all_reduce`](#method.all_reduce).
    pub fn all_gather_parts<T: Element + Number>(&self, values: SliceMut<'_, T>, parts: &[Range<usize>]) -> Result<()> {
        if self.world().size == 1 || values.is_empty() {
            return Ok(());
        }
        let width = size_of::<T>();
        let parts: Vec<_> = parts.iter().map(|part| part.start * width..part.end * width).collect();
        match self.on_device().filter(|engine| values.device() == Device::Cuda(engine.queue().ordinal())) {
            Some(engine) => engine.all_gather(&[(values.address(), parts)]),
            None => self.all_gather_bytes(bytes::of_mut(&mut values.on_host()), &parts),
        }
    }

    /// As [`all_gather_parts`](#method.all_gather_parts), of which each rank provides its [`World::part`].
    ///
    /// # Errors
    /// As [`all_reduce`](#method.all_reduce).
    pub fn all_gather_numbers<T: Element + Number>(&self, values: SliceMut<'_, T>) -> Result<()> {
        let World { size, .. } = self.world();
        let parts: Vec<_> = (0..size).map(|rank| part(values.len(), size, rank)).collect();
        self.all_gather_parts(values, &parts)
    }

    /// Replaces `data` by that of rank `root`.
    ///
    /// # Errors
    /// As [`all_reduce`](#method.all_reduce).
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        if self.world().size == 1 || data.is_empty() {
            return Ok(());
        }
        self.broadcast_bytes(bytes::of_mut(data), root)
    }

    /// Gathers the values of every rank: `[size, values.len()]`, in rank order.
    ///
    /// # Errors
    /// As [`all_reduce`](#method.all_reduce).
    pub fn collect<T: Element>(&self, values: &[T]) -> Result<Vec<T>> {
        let world = self.world();
        let mut all = vec![T::ZERO; values.len() * world.size];
        all[world.rank * values.len()..][..values.len()].copy_from_slice(values);
        self.all_gather(&mut all)?;
        Ok(all)
    }
}

/// Every rank's part of `length` elements, in bytes.
fn byte_parts<T>(length: usize, size: usize) -> Vec<Range<usize>> {
    let bytes = |index: usize| index * size_of::<T>();
    let part = |rank| part(length, size, rank);
    (0..size).map(|rank| bytes(part(rank).start)..bytes(part(rank).end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once_and_differ_by_one() {
        for length in [0, 1, 2, 7, 64, 1001] {
            for size in 1..=5 {
                let parts: Vec<_> = (0..size).map(|rank| part(length, size, rank)).collect();
                assert_eq!((parts[0].start, parts[size - 1].end), (0, length));
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
                let lengths = || parts.iter().map(ExactSizeIterator::len);
                assert!(lengths().max().unwrap() - lengths().min().unwrap() <= 1, "{parts:?}");
            }
        }
    }
}

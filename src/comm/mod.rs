//! Layer 3: who takes part in a run ([`World`]) and how ranks combine tensors ([`Collectives`]). World size 1
//! runs the same code as any other: the engine is then [`single::Single`].
pub mod single;

use crate::error::Result;

/// The place of this process among all that train together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// This process's number, `0..size`.
    pub rank: usize,
    /// How many processes take part.
    pub size: usize,
    /// This process's number on its machine.
    pub local_rank: usize,
}

/// Operations that every rank calls together, in the same order.
pub trait Collectives: Send + Sync {
    /// The place of this rank.
    fn world(&self) -> World;
    /// Replaces `data` on every rank by the sum over ranks.
    ///
    /// # Errors
    /// [`crate::Kind::Peer`]: a peer is gone or late.
    fn all_reduce(&self, data: &mut [f32]) -> Result<()>;
    /// Replaces each count by the sum over ranks, exactly.
    ///
    /// # Errors
    /// As [`Collectives::all_reduce`].
    fn all_reduce_counts(&self, data: &mut [u64]) -> Result<()>;
    /// Replaces each number by the sum over ranks, in f64.
    ///
    /// # Errors
    /// As [`Collectives::all_reduce`].
    fn all_reduce_sums(&self, data: &mut [f64]) -> Result<()>;
    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`Collectives::all_reduce`].
    fn barrier(&self) -> Result<()>;
}

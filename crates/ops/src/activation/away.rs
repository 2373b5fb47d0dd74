//! Activations of a GPU that wait on the host until backward needs them.
use super::{Activation, Number, Pool};
use std::sync::Arc;
use tunesmith_device::{Device, away};

/// Memory of an activation that is being copied to the host. On drop it goes back to its pool, for what is computed after the
/// copy.
#[derive(Debug)]
pub struct Leaving {
    buffer: Option<away::Leaving>,
    features: usize,
    number: Number,
    pool: Arc<Pool>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // While something else unwinds nothing more is asked of the GPU.
        let buffer = self.buffer.take().filter(|_| !std::thread::panicking());
        if let Some(buffer) = buffer.and_then(away::Leaving::buffer) {
            self.pool.take_back(buffer, self.features, self.number);
        }
    }
}

/// Where the numbers of an activation without memory are.
#[derive(Debug)]
pub enum Elsewhere {
    /// In the host's memory.
    Host(away::Away),
    /// On their way back to the GPU.
    Coming(away::Coming),
}

impl Activation {
    /// Begins to copy the numbers to the host, and gives the memory away; nothing on other devices. Until
    /// [`Activation::arrive`] there are none here.
    pub fn leave(&mut self) -> Option<(Leaving, Elsewhere)> {
        if !matches!(self.device(), Device::Cuda(_)) {
            return None;
        }
        let bytes = self.tokens * self.features * self.number.bytes() as usize;
        let (leaving, away) = away::leave(self.buffer.take()?, bytes);
        let (features, number, pool) = (self.features, self.number, Arc::clone(&self.pool));
        let leaving = Leaving { buffer: Some(leaving), features, number, pool };
        Some((leaving, Elsewhere::Host(away)))
    }

    /// Begins to copy its numbers back, into other memory of its pool.
    #[must_use]
    pub fn fetch(&self, from: Elsewhere) -> Elsewhere {
        match from {
            Elsewhere::Host(away) => {
                let buffer = self.like().buffer.take().expect("a new activation has memory");
                Elsewhere::Coming(away.come(buffer))
            }
            Elsewhere::Coming(_) => from,
        }
    }

    /// Has its numbers again, for what is computed from here on.
    pub fn arrive(&mut self, from: Elsewhere) {
        if let Elsewhere::Coming(coming) = self.fetch(from) {
            self.buffer = coming.buffer();
        }
    }
}

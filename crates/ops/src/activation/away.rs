//! Offloads activations from a GPU to the host's memory until the backward pass needs them.
use super::{Activation, Number, Pool};
use std::sync::Arc;
use tunesmith_device::{Device, away};

/// The GPU memory of an activation that is being copied to the host ([`Activation::leave`]). On drop it goes back to
/// its pool; whatever uses it next on the GPU waits for the copy.
#[derive(Debug)]
pub struct Leaving {
    buffer: Option<away::Leaving>,
    features: usize,
    number: Number,
    pool: Arc<Pool>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // While a panic unwinds, nothing more is asked of the GPU: the buffer is not given back to the pool.
        let buffer = self.buffer.take().filter(|_| !std::thread::panicking());
        if let Some(buffer) = buffer.and_then(away::Leaving::buffer) {
            self.pool.take_back(buffer, self.features, self.number);
        }
    }
}

/// Where the numbers of an offloaded activation are. The activation itself has no memory meanwhile.
#[derive(Debug)]
pub enum Elsewhere {
    /// In the host's memory.
    Host(away::Away),
    /// On their way back to the GPU.
    Coming(away::Coming),
}

impl Activation {
    /// Starts to copy the numbers to the host, and gives the GPU memory away. Until [`Activation::arrive`] the
    /// activation has no numbers. Returns `None`, and does nothing, on other devices.
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

    /// Starts to copy the numbers back to the GPU, into other memory of the activation's pool. Does nothing if they are
    /// already on their way.
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

    /// Gives the activation its numbers again: GPU work that is asked for from here on can use them.
    pub fn arrive(&mut self, from: Elsewhere) {
        if let Elsewhere::Coming(coming) = self.fetch(from) {
            self.buffer = coming.buffer();
        }
    }
}

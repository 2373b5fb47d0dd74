//! Averaged weights. If `train.ema_decay` or the optimizer computes averages, they are evaluated and published instead of the
//! trained weights.
use tunesmith_base::error::Result;
use tunesmith_device::{FloatBuffer, Floats};

use super::session::Session;

impl Session<'_> {
    /// Takes the averages of the values whose state this rank holds; `None` if the trained weights themselves are published.
    fn take_averages(&mut self) -> Option<FloatBuffer> {
        if let Some(ema) = &mut self.ema {
            return Some(std::mem::take(&mut ema.values));
        }
        self.optimizer.averages().then(|| {
            let values = self.model.params.values();
            let whole = self.sharing.shares_state() && !self.sharing.shares_values();
            let mut kept = if whole { self.sharing.pack(values) } else { FloatBuffer::from(values) };
            self.optimizer.publish(&mut kept);
            kept
        })
    }

    /// Calls `act` while the model holds the weights to publish, and restores the trained weights afterwards, to the bit.
    ///
    /// If the published weights are averages, `act` also gets the trained ones: the ranges whose state this rank holds,
    /// concatenated. Ranks that share the state call this together.
    ///
    /// # Errors
    /// Those of `act`; [`tunesmith_base::Kind::Peer`].
    pub fn published<T>(&mut self, act: impl FnOnce(&mut Self, Option<Floats<'_>>) -> Result<T>) -> Result<T> {
        let Some(mut other) = self.take_averages() else { return act(self, None) };
        self.exchange_values(&mut other)?;
        // After an error the weights are not swapped back: nothing is published any more, and other ranks may be gone.
        let done = act(self, Some(other.view()))?;
        self.exchange_values(&mut other)?;
        if let Some(ema) = &mut self.ema {
            ema.values = other;
        }
        Ok(done)
    }

    /// Swaps the values of the model with `kept`, the values of this rank's ranges.
    fn exchange_values(&mut self, kept: &mut FloatBuffer) -> Result<()> {
        let mut values = self.model.params.values_mut();
        if !self.sharing.shares_state() || self.sharing.shares_values() {
            values.swap(kept.view_mut());
            return Ok(());
        }
        self.sharing.swap(values.reborrow(), kept.view_mut());
        self.sharing.gather(&*self.comm, values)
    }

    /// Ends the training: from now on the model holds the weights to publish.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`] if ranks share the state.
    pub fn publish(&mut self) -> Result<()> {
        if let Some(mut averages) = self.take_averages() {
            self.exchange_values(&mut averages)?;
            self.ema = None;
        }
        Ok(())
    }
}

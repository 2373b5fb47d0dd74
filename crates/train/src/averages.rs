//! The weights that are evaluated and published: averages, where the optimizer or `train.ema_decay` keeps them.
use tunesmith_base::error::Result;

use super::session::Session;

impl Session<'_> {
    /// The weights to evaluate and to publish, where they are not those that are trained: of what this rank keeps the
    /// state of.
    fn take_averages(&mut self) -> Option<Vec<f32>> {
        if let Some(ema) = &mut self.ema {
            return Some(std::mem::take(&mut ema.values));
        }
        self.optimizer.averages().then(|| {
            let values = self.model.params.values();
            let whole = self.sharing.shares_state() && !self.sharing.shares_values();
            let mut kept = if whole { self.sharing.pack(values) } else { values.to_vec() };
            self.optimizer.publish(&mut kept);
            kept
        })
    }

    /// Does something while the model holds the weights to publish; the trained ones are then at hand beside them, if
    /// they are others (those of the ranges that this rank keeps the state of, end to end), and stand in the model again
    /// afterwards, bit by bit. All ranks do so together where they share the state.
    ///
    /// # Errors
    /// Those of `act`; [`tunesmith_base::Kind::Peer`].
    pub fn published<T>(&mut self, act: impl FnOnce(&mut Self, Option<&[f32]>) -> Result<T>) -> Result<T> {
        let Some(mut other) = self.take_averages() else { return act(self, None) };
        self.exchange_values(&mut other)?;
        // After an error nothing is published any more, and other ranks may be gone.
        let done = act(self, Some(&other))?;
        self.exchange_values(&mut other)?;
        if let Some(ema) = &mut self.ema {
            ema.values = other;
        }
        Ok(done)
    }

    /// Changes what the model holds with what is kept of it here.
    fn exchange_values(&mut self, kept: &mut [f32]) -> Result<()> {
        let values = self.model.params.values_mut();
        if !self.sharing.shares_state() || self.sharing.shares_values() {
            values.swap_with_slice(kept);
            return Ok(());
        }
        self.sharing.swap(values, kept);
        self.sharing.gather(&*self.comm, values)
    }

    /// Ends the training: the model holds the weights to publish from here on.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`], where ranks share the state.
    pub fn publish(&mut self) -> Result<()> {
        if let Some(mut averages) = self.take_averages() {
            self.exchange_values(&mut averages)?;
            self.ema = None;
        }
        Ok(())
    }
}

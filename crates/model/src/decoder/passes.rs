//! How a pass begins and ends. Where ranks share the model's weights, they begin and end every pass together.
use super::Model;
use crate::grads::Grads;
use crate::shards::Kind;
use tunesmith_base::error::{Kind as ErrorKind, Result};
use tunesmith_device::memory;

impl Model {
    /// Takes part in the passes of the other ranks, where ranks share weights, until no rank has a pass left. Whoever
    /// makes passes whose number may differ between ranks calls this at the end, on every rank.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone.
    pub fn stand_by(&self) -> Result<()> {
        self.shards.stand_by(self.params.values())
    }

    /// Takes part in a training pass for which this rank has no data.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone; those of the collector that takes the gradients
    /// ([`crate::grads::Collector`]).
    pub fn idle(&self, grads: &mut Grads<'_>) -> Result<()> {
        self.shards.begin(Kind::Train)?;
        self.end(Ok(()), Some(grads))
    }

    /// Ends a pass, even one that failed: the other ranks are still in theirs. They wait for this rank's part of
    /// `grads` whenever they leave a segment. So this rank goes on to the end of the route without computing, and hands
    /// over what it has.
    pub(super) fn end<T>(&self, walked: Result<T>, grads: Option<&mut Grads<'_>>) -> Result<T> {
        if walked.as_ref().is_err_and(|error| error.kind() == ErrorKind::Memory) {
            // Ranks that are threads share the budget: what lies idle here may be what another lacks.
            self.release();
        }
        let peer_lost = walked.as_ref().is_err_and(|error| error.kind() == ErrorKind::Peer);
        if peer_lost || !self.shards.gathers() {
            return walked;
        }
        let head = self.blocks.len() + 1;
        // Other ranks wait for a pass that shards weights, and for no other.
        let mut grads = grads.filter(|_| self.shards.is_sharded());
        self.shards.end(self.params.values(), &mut |left| match &mut grads {
            // Includes the segments above whose weights are not shared.
            Some(grads) => (left.unwrap_or(head)..=head)
                .rev()
                .try_for_each(|segment| grads.pass_over(&self.params.segment(segment))),
            None => Ok(()),
        })?;
        walked
    }

    /// Makes a pass without backward, of which `work` is the computation.
    pub(super) fn forward<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.shards.begin(Kind::Forward)?;
        self.end(memory::guarded(work), None)
    }
}

//! How a pass begins and ends, which all ranks make together where they shard the model.
use super::Model;
use crate::grads::Grads;
use crate::shards::Kind;
use tunesmith_base::error::{Kind as ErrorKind, Result};
use tunesmith_device::memory;

impl Model {
    /// Goes along with the passes that other ranks make, where weights are shared, until none has one to make. Whatever
    /// makes passes of which ranks may have different numbers ends with this, on every rank.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone.
    pub fn stand_by(&self) -> Result<()> {
        self.shards.stand_by(self.params.values())
    }

    /// A pass of a rank that has nothing to train on while others have.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone; those of whoever takes the gradients.
    pub fn idle(&self, grads: &mut Grads<'_>) -> Result<()> {
        self.shards.begin(Kind::Train)?;
        self.end(Ok(()), Some(grads))
    }

    /// After a pass, also one that failed: the other ranks are still at theirs. They wait for what it has of `grads`, if it
    /// was to make some, where they leave a segment: so it goes there while it goes on to the end.
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
            // With those above it whose weights are not shared.
            Some(grads) => (left.unwrap_or(head)..=head)
                .rev()
                .try_for_each(|segment| grads.pass_over(&self.params.segment(segment))),
            None => Ok(()),
        })?;
        walked
    }

    /// Makes a pass without backward: `work` is its computation.
    pub(super) fn forward<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.shards.begin(Kind::Forward)?;
        self.end(memory::guarded(work), None)
    }
}

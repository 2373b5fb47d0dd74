//! The stream that receives this thread's work for a GPU: that of the ops, or that of a queue which the thread has
//! entered.
use super::cuda::Stream;
use std::cell::RefCell;
use std::sync::Arc;

/// A GPU's number, and the stream for work on it.
type Entered = (u8, Arc<Stream>);

thread_local! {
    /// The streams that this thread has entered, the innermost last; empty for the stream of the ops.
    static ENTERED: RefCell<Vec<Option<Entered>>> = const { RefCell::new(Vec::new()) };
}

/// The stream that receives this thread's work for a GPU, if it is not that of the ops.
pub(super) fn stream(ordinal: u8) -> Option<Arc<Stream>> {
    ENTERED.with_borrow(|entered| {
        let (of, stream) = entered.last()?.as_ref()?;
        (*of == ordinal).then(|| Arc::clone(stream))
    })
}

/// Leaves a stream when dropped, even if its work unwinds.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        ENTERED.with_borrow_mut(std::vec::Vec::pop);
    }
}

/// Enters a stream on this thread while `work` runs.
pub(super) fn within<T>(entered: Option<Entered>, work: impl FnOnce() -> T) -> T {
    ENTERED.with_borrow_mut(|all| all.push(entered));
    let _leave = Leave;
    work()
}

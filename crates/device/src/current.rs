//! Where this thread's work for a GPU goes: to the stream of the ops, or to that of a queue which the thread has entered.
use super::cuda::Stream;
use std::cell::RefCell;
use std::sync::Arc;

/// A GPU's number, and the stream for work on it.
type Entered = (u8, Arc<Stream>);

thread_local! {
    /// What this thread has entered, the innermost last; nothing for the stream of the ops.
    static ENTERED: RefCell<Vec<Option<Entered>>> = const { RefCell::new(Vec::new()) };
}

/// The stream that this thread's work for a GPU goes to, if it is not the one of the ops.
pub(super) fn stream(ordinal: u8) -> Option<Arc<Stream>> {
    ENTERED.with_borrow(|entered| {
        let (of, stream) = entered.last()?.as_ref()?;
        (*of == ordinal).then(|| Arc::clone(stream))
    })
}

/// Leaves a stream, also when its work unwinds.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        ENTERED.with_borrow_mut(std::vec::Vec::pop);
    }
}

/// Does `work`, for which this thread enters a stream.
pub(super) fn within<T>(entered: Option<Entered>, work: impl FnOnce() -> T) -> T {
    ENTERED.with_borrow_mut(|all| all.push(entered));
    let _leave = Leave;
    work()
}

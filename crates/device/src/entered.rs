//! Which stream a thread's work for a GPU goes to.
use super::cuda::Stream;
use std::cell::RefCell;
use std::sync::Arc;

/// The stream of a GPU of that number.
type Entry = (u8, Arc<Stream>);

thread_local! {
    /// The streams that this thread has entered, the innermost last; nothing for that of the ops.
    static ENTERED: RefCell<Vec<Option<Entry>>> = const { RefCell::new(Vec::new()) };
}

/// The stream that this thread's work for a GPU goes to, if it is not the one of the ops.
pub(super) fn entered(ordinal: u8) -> Option<Arc<Stream>> {
    ENTERED.with_borrow(|entered| {
        let (_, stream) = entered.last()?.as_ref().filter(|(of, _)| *of == ordinal)?;
        Some(Arc::clone(stream))
    })
}

/// Leaves a stream, also when its work unwinds.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        ENTERED.with_borrow_mut(|entered| entered.pop());
    }
}

/// Does `work` with a stream entered, or with none.
pub(super) fn within<T>(entry: Option<Entry>, work: impl FnOnce() -> T) -> T {
    ENTERED.with_borrow_mut(|entered| entered.push(entry));
    let _leave = Leave;
    work()
}

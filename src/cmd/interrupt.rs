//! Ctrl-C and the termination signal as a flag that long-running work checks.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;
use crate::signals::{self, Handling, Requests};

/// A flag that the first signal sets while the [`Handling`] lives. A second signal ends the process.
///
/// # Errors
/// The system refuses the handler.
pub(super) fn interrupt() -> Result<(Arc<AtomicBool>, Handling)> {
    let (flag, requests) = (Arc::new(AtomicBool::new(false)), Requests::default());
    let set = Arc::clone(&flag);
    let handling = signals::handle(move |_| {
        set.store(true, Ordering::Relaxed);
        requests.is_first()
    })?;
    Ok((flag, handling))
}

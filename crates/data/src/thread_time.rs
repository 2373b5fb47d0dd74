//! Processor time of the running thread. Limits count this time, because a loaded machine lets threads wait.
use std::time::Duration;

/// The processor time that this thread has used since it started; `None` where the system does not report it.
pub fn thread_time() -> Option<Duration> {
    let text = tunesmith_base::files::system("/proc/thread-self/schedstat")?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

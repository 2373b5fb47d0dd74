//! Handles SIGHUP, SIGINT, and SIGTERM.
//!
//! Before step 1 there is nothing to save, so a signal ends the process at once. From step 1 on, the loop checks between
//! steps for a request to stop. A second signal ends the process at once: complete checkpoints stay, a half-written one is
//! removed.
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::lock::{DirLock, Leftovers};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::temporary;
use tunesmith_base::signals::{self, Handling, Requests};

/// The phase of the run, which decides how a signal is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Preparing,
    Looping,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    requested: Option<&'static str>,
    leftovers: Option<Leftovers>,
}

/// A request to stop, shared between the signal handler and the loop.
#[derive(Debug, Clone)]
pub struct Stop(Arc<Mutex<State>>);

impl Default for Stop {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State { phase: Phase::Preparing, requested: None, leftovers: None })))
    }
}

impl Stop {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the run to stop after the step it is in. `why` is a signal's name or another short reason.
    pub fn request(&self, why: &'static str) {
        self.state().requested.get_or_insert(why);
    }

    /// Why the run was asked to stop, if it was.
    pub fn requested(&self) -> Option<&'static str> {
        self.state().requested
    }

    /// Acquires the lock of the output directory. A signal before the loop removes it again. A signal that arrives meanwhile
    /// waits until the lock is acquired.
    ///
    /// # Errors
    /// The directory cannot be created or written to, or a live process holds its lock.
    pub(crate) fn acquire(&self, directory: &Path) -> Result<DirLock> {
        let mut state = self.state();
        let lock = DirLock::acquire(directory)?;
        state.leftovers = Some(lock.leftovers());
        Ok(lock)
    }

    /// Starts the loop: from now on a request waits for the step to finish and for the checkpoint to be written.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Preempted`] if a stop was requested before; nothing has been written yet.
    pub(crate) fn enter_loop(&self) -> Result<()> {
        let mut state = self.state();
        // Another rank in this process may already be in its loop and writing.
        if let (Phase::Preparing, Some(why)) = (state.phase, state.requested) {
            return Err(Error::preempted(format!("{why} before step 1: nothing was written")));
        }
        state.phase = Phase::Looping;
        Ok(())
    }

    /// Handles SIGHUP, SIGINT, and SIGTERM until the returned value is dropped.
    ///
    /// A signal before the loop calls `leave`, which should end the process; the loop cannot start meanwhile. A later signal
    /// becomes a request. `notice(signal, again)` is called for the request, and with `again` for a second signal, which ends
    /// the process at once.
    ///
    /// # Errors
    /// As [`signals::handle`].
    pub fn listen(
        &self,
        leave: impl Fn(&'static str) + Send + Sync + 'static,
        notice: impl Fn(&'static str, bool) + Send + Sync + 'static,
    ) -> Result<Handling> {
        let (stop, requests) = (self.clone(), Requests::default());
        signals::handle(move |signal| {
            let name = signals::name(signal);
            let mut state = stop.state();
            if state.phase == Phase::Preparing {
                // The mutex is held, so the loop cannot start while the process exits.
                temporary::abandon();
                if let Some(leftovers) = state.leftovers.take() {
                    leftovers.remove();
                }
                leave(name);
            }
            let first = requests.is_first();
            let repeated = state.requested.is_some();
            state.requested.get_or_insert(name);
            drop(state);
            if !first || !repeated {
                notice(name, !first);
            }
            first
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_before_the_loop_ends_the_run_and_a_later_one_is_a_flag() {
        let stop = Stop::default();
        stop.enter_loop().unwrap();
        assert_eq!(stop.requested(), None);
        stop.request("SIGTERM");
        stop.request("SIGINT");
        assert_eq!(stop.requested(), Some("SIGTERM"));

        let early = Stop::default();
        early.request("SIGINT");
        assert_eq!(early.enter_loop().unwrap_err().kind(), tunesmith_base::Kind::Preempted);
    }
}

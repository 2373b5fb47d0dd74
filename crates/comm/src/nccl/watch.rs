//! Watches the operations that a GPU runs on its own, as PyTorch's watchdog does. Nothing on the host waits for them,
//! so nothing else would notice that a rank is gone or late. In that case the watch aborts the communicator. This ends
//! its work on the GPU, and waiting for the GPU fails with the error.
use std::time::{Duration, Instant};

use super::link::{GONE, Link, Operation, Vigil, Why};
use tunesmith_base::error::Result;

/// The longest time between two checks.
const PAUSE: Duration = Duration::from_millis(20);

/// Watches until the engine is dropped.
pub(super) fn watch(link: &Link) {
    let mut vigil = Vigil::new(PAUSE);
    let mut ends: Option<Instant> = None;
    loop {
        let mut under_way = link.under_way();
        while under_way.operations.is_empty() && !under_way.ending {
            under_way = link.changed.wait(under_way).unwrap_or_else(std::sync::PoisonError::into_inner);
            vigil = Vigil::new(PAUSE);
        }
        if under_way.ending && ends.is_none() {
            ends = Some(Instant::now() + GONE);
        }
        let Some(first) = under_way.operations.front() else { return };
        if ends.is_some_and(|ends| Instant::now() > ends) {
            return;
        }
        let (name, state) = (first.name, state_of(first));
        if matches!(state, Ok(State::Ended)) {
            under_way.operations.pop_front();
            vigil = Vigil::new(PAUSE);
            continue;
        }
        drop(under_way);
        if let Err(why) = look(link, &mut vigil, state) {
            let waited = vigil.waited();
            link.fail(&mut link.handles(), name, waited, why);
        }
    }
}

enum State {
    /// It waits for earlier work of the GPU.
    Queued,
    Begun,
    Ended,
}

fn state_of(operation: &Operation) -> Result<State> {
    Ok(match (operation.began.done()?, operation.ended.done()?) {
        (_, true) => State::Ended,
        (true, false) => State::Begun,
        (false, false) => State::Queued,
    })
}

fn look(link: &Link, vigil: &mut Vigil, state: Result<State>) -> std::result::Result<(), Why> {
    match state? {
        // Time counts from its beginning.
        State::Queued => {
            std::thread::sleep(PAUSE / 20);
            *vigil = Vigil::new(PAUSE);
        }
        State::Begun | State::Ended => {
            let handles = link.idle_handles();
            if let Some(comm) = handles.as_ref().and_then(|handles| handles.comm) {
                link.is_settled(comm)?;
            }
            drop(handles);
            vigil.look(link)?;
        }
    }
    Ok(())
}

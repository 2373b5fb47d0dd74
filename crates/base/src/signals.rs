//! SIGHUP, SIGINT and SIGTERM, which ask the process to end. A dedicated thread waits for them, so that they are
//! handled while everything else is busy or blocked.
//!
//! Without a handler, the process ends at once. It removes its temporary files and dies of the signal, as a shell
//! expects: the exit code is 128 plus the signal's number. A handler, such as that of training, may save first. It
//! returns false to end the process at once.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::error::{Error, Result};
use crate::files::{system, temporary};

/// A second signal within this time is the same request: a terminal and a supervisor may both have sent one.
const SAME: Duration = Duration::from_millis(200);

/// Handles a signal. Returns true if the process continues, false to end it at once.
type Handler = Arc<dyn Fn(i32) -> bool + Send + Sync>;

static HANDLER: Mutex<Option<Handler>> = Mutex::new(None);
static LISTENS: AtomicBool = AtomicBool::new(false);

/// The name of one of the three signals.
pub const fn name(signal: i32) -> &'static str {
    match signal {
        SIGHUP => "SIGHUP",
        SIGINT => "SIGINT",
        _ => "SIGTERM",
    }
}

/// Starts to listen for signals, for the rest of the process. SIGHUP stays ignored if the process was started so, as by
/// `nohup`. If the system has no thread or file for it, signals end the process as by default.
pub fn listen() {
    let (ready, is_ready) = mpsc::channel();
    let hear = move || {
        // A program under `nohup` is started with SIGHUP ignored. It stays ignored.
        let hangs_up = !ignored(SIGHUP);
        let wanted = [SIGINT, SIGTERM].into_iter().chain(hangs_up.then_some(SIGHUP));
        let signals = Signals::new(wanted.clone());
        // A further signal while the process is ending takes effect at once.
        let ending = Arc::new(AtomicBool::new(false));
        for signal in wanted.filter(|_| signals.is_ok()) {
            let _ = signal_hook::flag::register_conditional_default(signal, Arc::clone(&ending));
        }
        LISTENS.store(signals.is_ok(), Ordering::Release);
        let _ = ready.send(());
        let Ok(mut signals) = signals else { return };
        for signal in signals.forever() {
            answer(signal, &ending);
        }
    };
    if std::thread::Builder::new().name("signals".into()).spawn(hear).is_ok() {
        let _ = is_ready.recv();
    }
}

fn answer(signal: i32, ending: &AtomicBool) {
    let handler = HANDLER.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if !handler.is_some_and(|handler| handler(signal)) {
        ending.store(true, Ordering::Release);
        end(signal);
    }
}

/// Whether the process was started with `signal` ignored.
fn ignored(signal: i32) -> bool {
    let status = system("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Removes the temporary files and ends the process.
fn end(signal: i32) {
    temporary::abandon();
    // If it returns nevertheless, the exit code below is the one that death by the signal would have given.
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal);
}

/// Keeps a handler in use. When it is dropped, signals end the process at once again.
#[derive(Debug)]
#[must_use]
pub struct Handling(());

impl Drop for Handling {
    fn drop(&mut self) {
        HANDLER.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Makes `handler` handle signals, with the signal's number, on the listening thread. It replaces the previous handler.
///
/// # Errors
/// [`crate::Kind::Memory`]: the system had no thread to listen on.
pub fn handle(handler: impl Fn(i32) -> bool + Send + Sync + 'static) -> Result<Handling> {
    if !LISTENS.load(Ordering::Acquire) {
        return Err(Error::memory("cannot listen for signals: the system gives no thread or no file for it")
            .hint("raise the limits of processes and open files (ulimit -u, ulimit -n)"));
    }
    HANDLER.lock().unwrap_or_else(PoisonError::into_inner).replace(Arc::new(handler));
    Ok(Handling(()))
}

/// Distinguishes the first request to end from a second one by an impatient user.
#[derive(Debug, Default)]
pub struct Requests(Mutex<Option<Instant>>);

impl Requests {
    /// Whether this is the first request, or within 200 ms of it.
    pub fn is_first(&self) -> bool {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(Instant::now).elapsed() < SAME
    }

    /// Makes the next request count as the first again.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

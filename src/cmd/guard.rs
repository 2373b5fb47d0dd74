//! Runs a subcommand so that limits of the machine become errors with an exit code, and a signal leaves no half-written files.
use std::panic::{set_hook, take_hook};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::terminal;
use crate::error::{Error, Result};
use crate::files::temporary;
use crate::{memory, ops, signals};

/// Stack sizes to try, in bytes; `ulimit -s` does not apply.
const STACKS: [usize; 4] = [64 << 20, 16 << 20, 4 << 20, 1 << 20];

/// Runs `work` on a thread with a large stack, and returns its exit code.
pub(super) fn guarded(work: impl FnOnce() -> ExitCode + Send + 'static) -> ExitCode {
    // Makes a write beyond the limit of file size fail instead of ending the process.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)));
    memory::catch_stack_overflow();
    tell_limits();
    signals::listen();
    run(move || ops::par::within(work).unwrap_or_else(fail)).unwrap_or_else(fail)
}

#[allow(clippy::needless_pass_by_value, reason = "the end of an error's way")]
fn fail(error: Error) -> ExitCode {
    terminal::print_error(&error);
    ExitCode::from(error.kind().exit_code())
}

fn run(work: impl FnOnce() -> ExitCode + Send + 'static) -> Result<ExitCode> {
    let work = Arc::new(std::sync::Mutex::new(Some(work)));
    let mut failed = None;
    for size in STACKS {
        let work = Arc::clone(&work);
        let take = move || work.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take().map(|work| work());
        match std::thread::Builder::new().name("main".into()).stack_size(size).spawn(take) {
            Ok(thread) => {
                return Ok(match thread.join() {
                    Ok(code) => code.unwrap_or(ExitCode::FAILURE),
                    // The panic's message is printed; 101 is the usual exit code.
                    Err(_) => ExitCode::from(101),
                });
            }
            Err(error) => failed = Some(error),
        }
    }
    Err(Error::no_thread(&failed.unwrap_or_else(|| std::io::Error::from_raw_os_error(libc::EAGAIN))))
}

/// Turns panics of libraries that could not start a thread into an error about the machine's limit.
fn tell_limits() {
    let before = take_hook();
    set_hook(Box::new(move |panic| {
        let payload = panic.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref().copied());
        if text.is_some_and(is_limit) {
            temporary::abandon();
            let error = Error::no_thread(&std::io::Error::from_raw_os_error(libc::EAGAIN));
            terminal::print_error(&error);
            std::process::exit(i32::from(error.kind().exit_code()));
        }
        before(panic);
    }));
}

/// Whether a panic's message says that a thread could not be started.
fn is_limit(text: &str) -> bool {
    let refused = ["os error 11", "code: 11", "os error 12", "code: 12", "Resource temporarily unavailable"];
    text.contains("thread") && refused.iter().any(|words| text.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_cannot_be_started_are_told_from_other_panics() {
        for text in [
            "failed to spawn thread: Os { code: 11, kind: WouldBlock, message: \"Resource temporarily unavailable\" }",
            "OS can't spawn worker thread: Resource temporarily unavailable (os error 11)",
            "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError(Os { code: 11 }) }",
        ] {
            assert!(is_limit(text), "{text}");
        }
        assert!(!is_limit("index out of bounds: the len is 11") && !is_limit("a thread has panicked"));
    }
}

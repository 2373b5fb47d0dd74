//! Notices if standard output was closed when the process began. Rust's runtime replaces it by `/dev/null` before `main`, and
//! output would be lost without an error.
use std::sync::atomic::{AtomicBool, Ordering};

static CLOSED: AtomicBool = AtomicBool::new(false);

/// Looks before the runtime does.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the section holds pointers to functions which the C runtime calls once, on the one thread that there is
// before `main`. A static of that type is such a pointer. The function needs nothing of Rust's runtime: a system call
// and an atomic.
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

#[cfg(target_os = "linux")]
extern "C" fn look() {
    // SAFETY: F_GETFD takes no third argument and touches no memory; a number that is no open file gives an error.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Whether there is no standard output.
pub(super) fn stdout_is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

//! Notices if standard output was closed when the process began. Rust's runtime replaces it by `/dev/null` before `main`, and
//! output would be lost without an error.
use std::sync::atomic::{AtomicBool, Ordering};

static CLOSED: AtomicBool = AtomicBool::new(false);

/// Looks before the runtime does.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the section holds pointers to functions that the C runtime calls before `main`; this is one.
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

#[cfg(target_os = "linux")]
extern "C" fn look() {
    // SAFETY: a plain system call on a number.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Whether there is no standard output.
pub(super) fn stdout_is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

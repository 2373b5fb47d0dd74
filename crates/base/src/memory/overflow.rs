//! A stack overflow ends the process with a message and the exit code of memory (9), not with a core dump.

/// Installs a handler of SIGSEGV and SIGBUS for the rest of the process. A fault near the stack pointer is a stack
/// overflow; other faults end the process as by default. Linux on x86-64 and ARM64 only.
pub fn catch_stack_overflow() {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    linux::install();
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod linux {
    use std::ffi::{c_int, c_void};

    /// A fault within so many bytes of the stack pointer is a stack overflow.
    const NEAR: usize = 1 << 20;

    pub(super) fn install() {
        // SAFETY: all zeros is a valid `sigaction`: no flags, an empty mask. The handler has the signature that
        // SA_SIGINFO asks for and is never unloaded; `action` outlives both calls, and the old actions are not asked
        // for. Rust's runtime has given each of its threads a stack for handlers (SA_ONSTACK).
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
    }

    /// Runs on the thread whose stack may be used up: it makes system calls only, allocates nothing and takes no lock.
    ///
    /// # Safety
    /// The system calls it as a handler with `SA_SIGINFO`.
    unsafe extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: with SA_SIGINFO the system passes both, and they live until the handler returns; SIGSEGV and SIGBUS
        // come with an address.
        let (address, stack) = unsafe { ((*info).si_addr() as usize, stack_pointer(context)) };
        if address.abs_diff(stack) < NEAR {
            super::super::end(b"memory error: a thread's stack is used up: the input is nested too deeply\n");
        }
        // SAFETY: `signal` may be called in a handler. The instruction faults again when this returns, and then ends
        // the process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }

    /// # Safety
    /// `context` is the third argument of a signal handler that is running.
    unsafe fn stack_pointer(context: *mut c_void) -> usize {
        let context = context.cast::<libc::ucontext_t>();
        #[cfg(target_arch = "x86_64")]
        // SAFETY: that argument points to the thread's `ucontext_t`, which lives as long as the handler runs.
        return unsafe { (*context).uc_mcontext.gregs[libc::REG_RSP as usize] as usize };
        #[cfg(target_arch = "aarch64")]
        // SAFETY: that argument points to the thread's `ucontext_t`, which lives as long as the handler runs.
        return unsafe { (*context).uc_mcontext.sp as usize };
    }
}

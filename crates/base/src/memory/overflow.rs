//! A stack that is used up ends the process with a message and the exit code of memory, not with a core dump.

/// Says so, instead of dying of SIGSEGV, where a thread's stack overflows. Other faults end the process as ever.
pub fn catch_stack_overflow() {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    linux::install();
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod linux {
    use std::ffi::{c_int, c_void};

    /// A fault so near to the stack pointer is one of the stack, in bytes.
    const NEAR: usize = 1 << 20;

    pub(super) fn install() {
        // SAFETY: all zeros is a valid `sigaction`; the handler has the signature that SA_SIGINFO asks for. Rust's runtime
        // has given each of its threads a stack for handlers.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
    }

    extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the system passes both, as SA_SIGINFO says.
        let (address, stack) = unsafe { ((*info).si_addr() as usize, stack_pointer(context)) };
        if address.abs_diff(stack) < NEAR {
            super::super::end(b"memory error: a thread's stack is used up: the input is nested too deeply\n");
        }
        // SAFETY: plain system calls; the fault comes again and ends the process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }

    /// # Safety
    /// `context` is that of a signal handler.
    unsafe fn stack_pointer(context: *mut c_void) -> usize {
        let context = context.cast::<libc::ucontext_t>();
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        return unsafe { (*context).uc_mcontext.gregs[libc::REG_RSP as usize] as usize };
        #[cfg(target_arch = "aarch64")]
        // SAFETY: the caller's promise.
        return unsafe { (*context).uc_mcontext.sp as usize };
    }
}

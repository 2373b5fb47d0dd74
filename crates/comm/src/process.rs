//! Starts rank processes that cannot outlive the launcher, and ends them with all their children.
use std::process::{Child, Command};

/// Makes the system kill the processes that `command` starts when this process ends, in whatever way. Each leads its
/// own process group, so that a Ctrl-C on the terminal reaches it only through the launcher.
///
/// The system ties this to the thread that starts them, which must live as long as the process.
pub fn tie(command: &mut Command) {
    use std::os::unix::process::CommandExt as _;
    command.process_group(0);
    #[cfg(target_os = "linux")]
    {
        let launcher = std::process::id();
        let tie = move || {
            // SAFETY: PR_SET_PDEATHSIG takes a number and touches no memory; a system call may be made between fork and
            // exec.
            if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // It may have ended between fork and here.
            // SAFETY: getppid takes nothing and cannot fail.
            if u32::try_from(unsafe { libc::getppid() }) != Ok(launcher) {
                return Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
            }
            Ok(())
        };
        // SAFETY: between fork and exec only what is async-signal-safe may run: the closure makes two system calls,
        // allocates nothing (both errors are a number or a kind) and takes no lock. It owns what it captures, a number.
        unsafe { command.pre_exec(tie) };
    }
}

/// Sends `signal` to the process and all of its group.
pub fn signal(child: &Child, signal: i32) {
    let Ok(group) = i32::try_from(child.id()) else { return };
    // SAFETY: `kill` touches no memory. The group is that of a child that has not been waited for, so that its number
    // is nobody else's; where it is gone already the call fails.
    unsafe { libc::kill(-group, signal) };
}

//! Helpers for tests that need a process of their own, or measure the memory and time of one.
use std::io::Read;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Whether this process runs only the test `test`. If not, starts a process that does, checks that it succeeds, and returns
/// false. A test alone in its process can measure its memory, and has the stand-in GPU, which runs one kernel of a process at
/// a time, to itself.
pub fn alone(test: &str) -> bool {
    const VARIABLE: &str = "TUNESMITH_TEST_ALONE";
    if std::env::var_os(VARIABLE).is_some_and(|name| name == test) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let ended = command.args(["--exact", test, "--nocapture"]).env(VARIABLE, test).output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    print!("{text}");
    assert!(ended.status.success() && text.contains("1 passed"), "{}", String::from_utf8_lossy(&ended.stderr));
    false
}

/// How a command ends, what it writes to its standard error, and its peak resident memory in bytes.
#[expect(clippy::zombie_processes, reason = "`wait4` waits for it")]
pub fn peak_memory(command: &mut Command) -> (Option<i32>, String, u64) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    let (status, usage) = waited(child.id());
    (ExitStatus::from_raw(status).code(), text, u64::try_from(usage.ru_maxrss).unwrap() * 1024)
}

/// Waits for a process, and tells what it used.
fn waited(process: u32) -> (i32, libc::rusage) {
    // SAFETY: all zeros are a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let mut status = 0;
    let process = i32::try_from(process).unwrap();
    // SAFETY: both pointers are to places of this function; the child has not been waited for.
    assert_eq!(unsafe { libc::wait4(process, &raw mut status, 0, &raw mut usage) }, process);
    (status, usage)
}

/// The standard output of a command, and the processor time that it takes, which does not depend on how busy the machine is.
#[expect(clippy::zombie_processes, reason = "`wait4` waits for it")]
pub fn processor_time(command: &mut Command) -> (String, Duration) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let (status, usage) = waited(child.id());
    assert_eq!(status, 0);
    let of = |time: libc::timeval| {
        Duration::from_secs(u64::try_from(time.tv_sec).unwrap())
            + Duration::from_micros(u64::try_from(time.tv_usec).unwrap())
    };
    (text, of(usage.ru_utime) + of(usage.ru_stime))
}

//! The program's allocator: the system's, with a count of the allocated bytes. If the system has no more memory, the
//! process ends with a message and the exit code for memory (9). Rust's default would abort it.
//!
//! Each thread counts on its own and adds to the common count after [`BATCH`] bytes or [`CALLS_BATCH`] calls, so that
//! threads do not contend for one counter. The count may be off by [`BATCH`] for each thread. Memory is counted when it
//! is requested, not when it is first touched. Mapped files are not counted. Counting itself costs [`calls`] times
//! [`cost`].
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Instant;

use crate::error::Kind;
use crate::files::temporary;

/// The system's allocator, which counts the bytes that are in use.
#[derive(Debug)]
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that a thread counts on its own before it adds them to the common count.
const BATCH: i64 = 64 << 10;
/// Calls of the allocator after which a thread adds its count to the common one, however few bytes they were.
const CALLS_BATCH: u64 = 256;

static CALLS: AtomicU64 = AtomicU64::new(0);
static LIVE: AtomicI64 = AtomicI64::new(0);
/// The most bytes since the last [`reset_peak`].
static PEAK: AtomicI64 = AtomicI64::new(0);
/// The most bytes before the last [`reset_peak`].
static BEFORE: AtomicI64 = AtomicI64::new(0);

thread_local! {
    /// Bytes and calls that this thread has not added to the common count yet.
    static PENDING: Cell<(i64, u64)> = const { Cell::new((0, 0)) };
}

/// Ends the process with the exit code for memory, without allocating, because nothing can catch a failed allocation.
#[cold]
fn exhausted(bytes: usize) -> ! {
    let mut digits = [b'0'; 20];
    let (mut rest, mut first) = (bytes, digits.len() - 1);
    while rest > 0 {
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
        first = first.saturating_sub(usize::from(rest > 0));
    }
    write(b"memory error: the system gives no memory for ");
    write(&digits[first..]);
    end(b" bytes more\n  hint: raise the limit (ulimit -v, the control group's memory.max), or use less: docs/auto-batch.md\n");
}

fn write(text: &[u8]) {
    // SAFETY: `text` holds as many bytes and outlives the call, which only reads them.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

/// Writes `text` to standard error, removes temporary files as far as that works without memory, and ends the process.
pub(super) fn end(text: &[u8]) -> ! {
    static ENDING: AtomicBool = AtomicBool::new(false);
    if !ENDING.swap(true, Ordering::SeqCst) {
        write(text);
        temporary::try_abandon();
    }
    // SAFETY: `_exit` may be called anywhere, in a signal handler too; it runs no destructors and does not return.
    unsafe { libc::_exit(i32::from(Kind::Memory.exit_code())) }
}

#[inline]
fn count(bytes: i64) {
    // The cell is constant and has no destructor, so it can be accessed as long as its thread lives.
    let (sum, calls) = PENDING.with(|pending| {
        let (sum, calls) = pending.get();
        let (sum, calls) = (sum + bytes, calls + 1);
        let whole = sum.abs() >= BATCH || calls == CALLS_BATCH;
        pending.set(if whole { (0, 0) } else { (sum, calls) });
        if whole { (sum, calls) } else { (0, 0) }
    });
    if calls != 0 {
        CALLS.fetch_add(calls, Ordering::Relaxed);
        let live = LIVE.fetch_add(sum, Ordering::Relaxed) + sum;
        if live > PEAK.load(Ordering::Relaxed) {
            PEAK.fetch_max(live, Ordering::Relaxed);
        }
    }
}

// SAFETY: every call goes on to the system's allocator with the caller's own arguments, and gives back what that gives,
// but for null, where the process ends. Counting does not allocate (a constant thread-local cell and atomics) and does
// not unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the layout's size is not zero, as the caller promises.
        let start = unsafe { System.alloc(layout) };
        if start.is_null() {
            exhausted(layout.size());
        }
        count(layout.size() as i64);
        start
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the layout's size is not zero, as the caller promises.
        let start = unsafe { System.alloc_zeroed(layout) };
        if start.is_null() {
            exhausted(layout.size());
        }
        count(layout.size() as i64);
        start
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the piece came from this allocator, and so from the system's, with this layout, as the caller
        // promises.
        unsafe { System.dealloc(start, layout) };
        count(-(layout.size() as i64));
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the piece came from this allocator, and so from the system's, with this layout; `size` is not zero
        // and does not overflow when it is rounded up, as the caller promises.
        let moved = unsafe { System.realloc(start, layout, size) };
        if moved.is_null() {
            exhausted(size);
        }
        count(size as i64 - layout.size() as i64);
        moved
    }
}

fn positive(count: i64) -> u64 {
    count.max(0) as u64
}

/// Bytes that the process holds now.
pub fn live() -> u64 {
    positive(LIVE.load(Ordering::Relaxed))
}

/// The most bytes held at once since the last [`reset_peak`].
pub fn peak() -> u64 {
    positive(PEAK.load(Ordering::Relaxed))
}

/// The most bytes that the process has ever held at once.
pub fn highest() -> u64 {
    peak().max(positive(BEFORE.load(Ordering::Relaxed)))
}

/// Starts a new measurement of [`peak`].
pub fn reset_peak() {
    BEFORE.fetch_max(PEAK.load(Ordering::Relaxed), Ordering::Relaxed);
    PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// The number of calls of the allocator so far. Each thread may hold back up to 256 calls.
pub fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// Allocates and frees memory of a layout whose size is not zero.
fn pair(allocator: &impl GlobalAlloc, layout: Layout) {
    // SAFETY: `cost` calls this with a layout of 64 bytes; what is given back was given by the same allocator with that
    // layout.
    unsafe {
        let start = black_box(allocator.alloc(layout));
        if !start.is_null() {
            allocator.dealloc(start, layout);
        }
    }
}

/// Measures the seconds that counting adds to a call of the allocator: the difference to the system's allocator, each
/// the best of several rounds.
pub fn cost() -> f64 {
    const PAIRS: u32 = 20_000;
    let layout = Layout::new::<[u64; 8]>();
    let round = |allocator: &dyn Fn()| {
        let began = Instant::now();
        (0..PAIRS).for_each(|_| allocator());
        began.elapsed().as_secs_f64() / f64::from(2 * PAIRS)
    };
    let (mut counted, mut plain) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..20 {
        counted = counted.min(round(&|| pair(&ALLOCATOR, layout)));
        plain = plain.min(round(&|| pair(&System, layout)));
    }
    (counted - plain).max(0.0)
}

/// Blocks of at least this many bytes are mapped from the system one by one, rather than cut from an arena of glibc's
/// allocator.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 1 << 20;

/// Lets glibc's allocator give the memory of large blocks back to the system when they are freed. Otherwise it raises the size
/// that counts as large to that of the largest block freed so far, up to 32 MiB, and keeps what is smaller. Where ranks are
/// threads that share weights, each segment that is freed and gathered again then leaves holes. Must be called before there are
/// threads.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    for (parameter, bytes) in [(libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, 2 * LARGE)] {
        // SAFETY: a number for a parameter of the allocator; no pointer.
        unsafe { libc::mallopt(parameter, bytes) };
    }
}

/// Where the address space is limited (`ulimit -v`), lets all threads share one arena of glibc's allocator. Each arena
/// would take 64 MiB of addresses, and glibc ends the program if it can no longer allocate for itself. Must be called
/// before there are threads.
pub fn share_arena_under_limit() {
    #[cfg(target_env = "gnu")]
    {
        let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: writes one `rlimit`, which lives.
        let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) } == 0;
        if known && limit.rlim_cur != libc::RLIM_INFINITY {
            // SAFETY: a number for a parameter of the allocator; no pointer.
            unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
        }
    }
}

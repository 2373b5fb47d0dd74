//! Shares work among the threads of the current thread's pool ([`run`]). Each thread starts with a stretch of
//! neighbouring tasks, so that it reads memory in one direction. Then it takes tasks that others have left, so that a
//! slow or busy core delays only one task. Results never depend on which thread ran a task: a task owns what it writes.
use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::upcoming::{Fetching, Upcoming};
use smallvec::SmallVec;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::threads::default_threads;

/// How many numbers of a flat buffer one task handles, in optimizer updates and other work over all trained values.
pub const TASK: usize = 1 << 16;

/// Runs `work` with a new thread pool, of which the current thread is one: one thread for each core (or
/// `RAYON_NUM_THREADS`), or fewer if the system does not give as many. The current thread is part of the pool because
/// handing each operation over to another thread would cost a small model up to a sixth of its time.
///
/// # Errors
/// [`tunesmith_base::Kind::Memory`]: the system does not even give a pool with the current thread alone.
pub fn within<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R> {
    let mut threads = default_threads();
    // Other pools are tried first: a thread can join a pool only once, and it stays in a pool even if the pool's other
    // threads did not start.
    while threads > 1 && pool(threads - 1).is_err() {
        threads /= 2;
    }
    let all = rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build();
    all.map(|pool| pool.install(work)).map_err(no_threads)
}

/// How many threads [`run`] shares work among: those of the current thread's pool, or 1 outside of any pool.
pub fn threads() -> usize {
    rayon::current_thread_index().map_or(1, |_| rayon::current_num_threads())
}

/// A pool of `threads` new threads, without the current one.
///
/// # Errors
/// [`tunesmith_base::Kind::Memory`]: the system does not give them.
pub fn pool(threads: usize) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(no_threads)
}

fn no_threads(error: rayon::ThreadPoolBuildError) -> Error {
    Error::memory("cannot start threads")
        .caused_by(error)
        .hint("raise the limits of processes and memory (ulimit -u, ulimit -v, pids.max), or set train.num_threads")
}

/// Runs `task(0)..task(count - 1)`, each once, and returns when all are done. A thread of a pool ([`within`], [`pool`])
/// shares them with the other threads of the pool; any other thread runs them alone.
pub fn run(count: usize, task: impl Fn(usize) + Sync) {
    run_ahead(count, None, task);
}

/// As [`run`]. Meanwhile, threads that wait within [`together`] prefetch `upcoming`, until there is another one.
pub(crate) fn run_ahead(count: usize, upcoming: Option<Upcoming>, task: impl Fn(usize) + Sync) {
    let threads = threads().min(count);
    if threads <= 1 {
        (0..count).for_each(task);
        return;
    }
    let team = TEAM.take();
    if !team.is_null() {
        let _back = OnDrop(|| TEAM.set(team));
        // SAFETY: `together` put the pointer there, on this thread, and takes it away before its team goes; this call
        // is within it. A team is only ever borrowed for reading.
        unsafe { &*team }.run(count, upcoming, &task);
        return;
    }
    let stretches = Stretches::new(threads);
    stretches.begin(count);
    let (stretches, task) = (&stretches, &task);
    rayon::scope(|scope| {
        for own in 1..threads {
            scope.spawn(move |_| stretches.take_part(own, count, task));
        }
        stretches.take_part(0, count, task);
    });
}

/// The tasks `0..count`, divided into one stretch for each thread.
struct Stretches(SmallVec<[Next; 8]>);

/// The next task of a stretch, in a cache line of its own.
#[repr(align(128))]
struct Next(AtomicUsize);

impl Stretches {
    fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| Next(AtomicUsize::new(0))).collect())
    }

    /// The first task of stretch `index`; the stretch before it ends there.
    fn bound(&self, index: usize, count: usize) -> usize {
        // In 128 bits, so that no product overflows.
        (index as u128 * count as u128 / self.0.len() as u128) as usize
    }

    /// Starts a new round. Nobody may take part until this has returned.
    fn begin(&self, count: usize) {
        for (index, next) in self.0.iter().enumerate() {
            next.0.store(self.bound(index, count), Ordering::Relaxed);
        }
    }

    /// Runs the tasks of stretch `own`, then what is left of the other stretches.
    fn take_part(&self, own: usize, count: usize, task: &(impl Fn(usize) + Sync + ?Sized)) {
        let threads = self.0.len();
        for index in (own..threads).chain(0..own) {
            let end = self.bound(index + 1, count);
            loop {
                let at = self.0[index].0.fetch_add(1, Ordering::Relaxed);
                if at >= end {
                    break;
                }
                task(at);
            }
        }
    }
}

/// Runs `work` with the pool's other threads on call: until `work` returns, they wait for the tasks of [`run`] without
/// going to sleep. For work of many short parts, such as a step of generation, where waking threads would cost more
/// than the parts themselves.
pub fn together<R>(work: impl FnOnce() -> R) -> R {
    let threads = threads();
    if threads <= 1 || !TEAM.get().is_null() {
        return work();
    }
    let team = Team::new(threads);
    rayon::in_place_scope(|scope| {
        for own in 1..threads {
            let team = &team;
            scope.spawn(move |_| team.help(own));
        }
        let _end = OnDrop(|| {
            TEAM.set(std::ptr::null());
            team.over.store(true, Ordering::Release);
        });
        TEAM.set(&raw const team);
        work()
    })
}

thread_local! {
    /// The team that this thread leads, if it may give it work; else null.
    static TEAM: Cell<*const Team> = const { Cell::new(std::ptr::null()) };
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

type Task = *const (dyn Fn(usize) + Sync);

/// Threads that wait for one leader's work. The work is open from when `open` becomes a new number until it becomes 0.
/// A helper counts itself in `inside` while it looks at the work, and the leader goes on only when nobody is inside.
struct Team {
    work: UnsafeCell<Option<(Task, usize, Option<Upcoming>)>>,
    stretches: Stretches,
    open: AtomicUsize,
    inside: AtomicUsize,
    rounds: AtomicUsize,
    over: AtomicBool,
}

// SAFETY: the fields are atomic but for `work`. The leader alone writes it, while it is closed and nobody is inside;
// helpers read it while they are inside and have seen it open. Both go by sequentially consistent operations on `open`
// and `inside`: a helper counts itself in before it looks at `open`, the leader closes before it looks at `inside`.
unsafe impl Sync for Team {}

impl Team {
    fn new(threads: usize) -> Self {
        let zero = || AtomicUsize::new(0);
        Self {
            work: UnsafeCell::new(None),
            stretches: Stretches::new(threads),
            open: zero(),
            inside: zero(),
            rounds: zero(),
            over: AtomicBool::new(false),
        }
    }

    fn run(&self, count: usize, upcoming: Option<Upcoming>, task: &(dyn Fn(usize) + Sync)) {
        let close = OnDrop(|| {
            self.open.store(0, Ordering::SeqCst);
            let mut turns = 0;
            while self.inside.load(Ordering::SeqCst) > 0 {
                wait(&mut turns);
            }
        });
        // SAFETY: the same fat pointer under a longer lifetime. Helpers use it while they are inside, and `close`
        // waits, even where `task` panics, until nobody is: `task` outlives each use.
        #[allow(clippy::transmute_ptr_to_ptr, reason = "a cast cannot change the lifetime of a trait object")]
        let shared = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Task>(task) };
        // SAFETY: the work is closed, and nobody reads it, as nobody is inside: `close` of the last round waited for
        // that, and before the first round nobody was. One thread leads a team, so nobody else writes.
        unsafe { *self.work.get() = Some((shared, count, upcoming)) };
        self.stretches.begin(count);
        let round = self.rounds.fetch_add(1, Ordering::Relaxed) + 1;
        self.open.store(round, Ordering::SeqCst);
        self.stretches.take_part(0, count, task);
        drop(close);
    }

    /// What thread `own` of the team does until the leader's work is over: runs tasks, and prefetches meanwhile.
    fn help(&self, own: usize) {
        let (mut done, mut turns, mut fetching) = (0, 0, None::<Fetching>);
        while !self.over.load(Ordering::Acquire) {
            let open = self.open.load(Ordering::Relaxed);
            if open == 0 || open == done {
                if !fetching.as_mut().is_some_and(Fetching::step) {
                    wait(&mut turns);
                }
                continue;
            }
            turns = 0;
            self.inside.fetch_add(1, Ordering::SeqCst);
            let _leave = OnDrop(|| {
                self.inside.fetch_sub(1, Ordering::SeqCst);
            });
            let open = self.open.load(Ordering::SeqCst);
            if open != 0 {
                // SAFETY: this thread is inside and has seen the work open: the leader wrote it before and writes it
                // again only when this thread has left.
                if let Some((task, count, upcoming)) = unsafe { *self.work.get() } {
                    let threads = self.stretches.0.len();
                    fetching = upcoming.map(|upcoming| Fetching::new(upcoming, own, threads)).or(fetching);
                    // SAFETY: the leader's `run`, which borrows the task, does not return before this thread has left.
                    self.stretches.take_part(own, count, unsafe { &*task });
                }
                done = open;
            }
        }
    }
}

/// Waits a moment; a thread that has waited often yields to others.
fn wait(turns: &mut u32) {
    *turns += 1;
    if *turns > 2000 {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

/// A pointer that tasks may share, because each task writes only to its own part. Whoever makes one guarantees three
/// things: the memory stays borrowed until [`run`] returns, each task stays within it, and no two tasks touch the same
/// place.
#[derive(Debug, Clone, Copy)]
pub struct Shared<T>(pub *mut T);

// SAFETY: a place, which is no access. To read or write there is `unsafe`, and that block answers for the tasks' parts
// being apart.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as for `Send`: a shared reference gives the place, and nothing else.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The pointer (through a method, so that closures capture the wrapper and not its field).
    pub const fn get(self) -> *mut T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_team_does_every_task_once_and_outlives_a_panic() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        pool.install(|| {
            let sums = together(|| {
                (0..2000usize)
                    .map(|round| {
                        let done: Vec<AtomicUsize> = (0..round % 40).map(|_| AtomicUsize::new(0)).collect();
                        run(done.len(), |task| {
                            // Work within work goes its usual way.
                            run(3, |_| {
                                done[task].fetch_add(1, Ordering::Relaxed);
                            });
                        });
                        done.iter().all(|count| count.load(Ordering::Relaxed) == 3)
                    })
                    .filter(|&right| right)
                    .count()
            });
            assert_eq!(sums, 2000);
            let outcome = std::panic::catch_unwind(|| {
                together(|| run(8, |task| assert!(task != 5, "on purpose")));
            });
            assert!(outcome.is_err());
            assert_eq!(together(|| 7), 7);
        });
    }
}

//! Work shared among the threads of the current pool, handed out task by task, so that a slow or busy core
//! delays only its own tasks. Results never depend on who ran what: a task owns what it writes.
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `task(0)..task(count - 1)`, each once, and returns when all are done.
pub fn run(count: usize, task: impl Fn(usize) + Sync) {
    let threads = rayon::current_num_threads().min(count);
    if threads <= 1 {
        (0..count).for_each(task);
        return;
    }
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                break;
            }
            task(index);
        }
    };
    rayon::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| work());
        }
        work();
    });
}

/// A pointer that tasks may share, because each writes only what it owns.
#[derive(Debug, Clone, Copy)]
pub struct Shared<T>(pub *mut T);

// SAFETY: a promise of the code that makes one: tasks touch disjoint parts.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The pointer (through a method, so that closures capture the wrapper and not its field).
    pub const fn get(self) -> *mut T {
        self.0
    }
}

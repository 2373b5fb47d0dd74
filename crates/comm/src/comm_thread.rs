//! Runs collective operations in the background. A thread runs them in the order of the requests; a blocking operation
//! waits for those before it. All ranks request the same operations in the same order, so they also run them in the
//! same order.
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::{Collectives, World};
use tunesmith_base::error::{Error, Result};

type Job = Box<dyn FnOnce(&dyn Collectives) + Send>;

/// Counts the operations that have not finished.
#[derive(Debug, Default)]
struct Waiting {
    count: Mutex<usize>,
    none: Condvar,
}

impl Waiting {
    fn add(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    fn wait(&self) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.none.wait_while(count, |count| *count > 0).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Counts an operation as finished when dropped, even if it panics or never runs.
struct Counted(Arc<Waiting>);

impl Drop for Counted {
    fn drop(&mut self) {
        let mut count = self.0.count.lock().unwrap_or_else(PoisonError::into_inner);
        *count -= 1;
        if *count == 0 {
            self.0.none.notify_all();
        }
    }
}

/// An engine with a background thread.
pub struct CommThread {
    engine: Arc<dyn Collectives>,
    waiting: Arc<Waiting>,
    jobs: Sender<Job>,
}

impl std::fmt::Debug for CommThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CommThread({}, {:?})", self.engine.name(), self.engine.world())
    }
}

impl CommThread {
    /// The place of this rank.
    pub fn world(&self) -> World {
        self.engine.world()
    }

    /// Starts the thread of `engine`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the system has no thread left.
    pub fn new(engine: Box<dyn Collectives>) -> Result<Self> {
        let engine: Arc<dyn Collectives> = Arc::from(engine);
        let (jobs, asked) = channel::<Job>();
        let at_work = Arc::clone(&engine);
        let work = move || asked.into_iter().for_each(|job| job(&*at_work));
        // It ends with its owner, which does not wait: after a failure here, what is under way may wait for ranks that
        // wait for this one.
        let thread = std::thread::Builder::new().name("ranks".into()).spawn(work);
        thread.map_err(|error| Error::no_thread(&error))?;
        Ok(Self { engine, waiting: Arc::default(), jobs })
    }

    /// Queues an operation. Its result arrives at the receiver, which is closed without one if the thread has ended.
    pub fn begin<T: Send + 'static>(&self, act: impl FnOnce(&dyn Collectives) -> T + Send + 'static) -> Receiver<T> {
        let (done, receiver) = channel();
        self.waiting.add();
        let counted = Counted(Arc::clone(&self.waiting));
        let job: Job = Box::new(move |engine| {
            let _counted = counted;
            // Nobody listens any more after a failure.
            let _ = done.send(act(engine));
        });
        // If the thread has ended the job is dropped, and counted out.
        let _ = self.jobs.send(job);
        receiver
    }

    /// Waits until all queued operations have finished, and returns the engine for a blocking one.
    pub fn idle(&self) -> &dyn Collectives {
        self.waiting.wait();
        &*self.engine
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, threads};

    #[test]
    fn what_is_begun_comes_before_what_is_waited_for() {
        let ranks = threads::world(3, Limits::default());
        let run = |rank: threads::Threads| {
            let number = rank.world().rank as f32;
            let line = CommThread::new(Box::new(rank)).unwrap();
            let mut sums = Vec::new();
            for turn in 0..20 {
                // A rank that dawdles before either kind changes nothing.
                let dawdle = |at: usize| std::thread::sleep(std::time::Duration::from_millis((at % 3) as u64));
                let begun = line.begin(move |engine| {
                    dawdle(turn + number as usize);
                    engine.collect(&[number + turn as f32])
                });
                dawdle(turn + 2 * number as usize);
                let mut sum = [number];
                line.idle().all_reduce(&mut sum).unwrap();
                sums.push((begun.recv().unwrap().unwrap(), sum[0]));
            }
            sums
        };
        let sums: Vec<_> = std::thread::scope(|scope| {
            let running: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
            running.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let turn = |turn: u32| (vec![turn as f32, 1.0 + turn as f32, 2.0 + turn as f32], 3.0);
        assert!(sums.iter().all(|sums| sums.iter().cloned().eq((0..20).map(turn))), "{sums:?}");
    }

    #[test]
    fn what_stands_behind_an_operation_that_panics_is_not_waited_for() {
        let line = CommThread::new(Box::new(threads::world(1, Limits::default()).remove(0))).unwrap();
        let (go, wait) = channel::<()>();
        // No message of a panic.
        let first = line.begin(move |_| -> u8 {
            let _ = wait.recv();
            std::panic::resume_unwind(Box::new(()))
        });
        let second = line.begin(|_| 2u8);
        go.send(()).unwrap();
        assert!(first.recv().is_err() && second.recv().is_err());
        line.idle().barrier().unwrap();
        assert!(line.begin(|_| 3u8).recv().is_err());
        line.idle().barrier().unwrap();
    }

    #[test]
    fn a_rank_that_is_gone_ends_what_was_begun_and_what_is_waited_for() {
        let mut ranks = threads::world(2, Limits::default());
        drop(ranks.pop());
        let line = CommThread::new(Box::new(ranks.remove(0))).unwrap();
        let begun = line.begin(|engine| engine.barrier());
        assert_eq!(begun.recv().unwrap().unwrap_err().kind(), tunesmith_base::Kind::Peer);
        assert_eq!(line.idle().barrier().unwrap_err().kind(), tunesmith_base::Kind::Peer);
    }
}

//! Reads and prepares images in other threads before a batch needs them.
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use tunesmith_base::error::Result;
use tunesmith_vision::Pixels;

/// Maximum bytes of pixels that are ready but not taken yet. Each thread may exceed it by one image.
pub(crate) const MOST_BYTES: usize = 256 << 20;

/// Reads an image by its name in the data: its pixels, or its features if a run has cached them.
pub(crate) type ReadPixels = Arc<dyn Fn(&str) -> Result<Arc<Pixels>> + Send + Sync>;

/// Images that background threads read, in the order in which they will be taken. Dropping it stops the threads and waits for
/// them.
pub(crate) struct Ahead {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    read: ReadPixels,
    most_bytes: usize,
    state: Mutex<State>,
    /// Notified when an image was read or taken, or when the threads must end.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Images that no thread has begun to read, in order.
    queue: VecDeque<String>,
    pictures: HashMap<String, Entry>,
    /// Bytes of pixels of all images that are ready.
    bytes: usize,
    ends: bool,
}

struct Entry {
    /// How many more times [`Ahead::take`] will be called for this image.
    uses: usize,
    stage: Stage,
}

enum Stage {
    Waiting,
    Reading,
    Ready(Arc<Pixels>),
    /// Reading failed. The caller of [`Ahead::take`] reads the image itself, and gets the error.
    Failed,
}

impl fmt::Debug for Ahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ahead").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Ahead {
    /// Starts to read `files` on at most `threads` threads. `files` contains a name once for each time the image will be taken.
    pub(crate) fn of(files: Vec<String>, threads: usize, read: ReadPixels) -> Self {
        Self::within(MOST_BYTES, files, threads, read)
    }

    fn within(most_bytes: usize, files: Vec<String>, threads: usize, read: ReadPixels) -> Self {
        let mut state = State::default();
        for file in files {
            let entry = state.pictures.entry(file.clone()).or_insert(Entry { uses: 0, stage: Stage::Waiting });
            entry.uses += 1;
            if entry.uses == 1 {
                state.queue.push_back(file);
            }
        }
        let threads = threads.min(state.queue.len());
        let shared = Arc::new(Shared { read, most_bytes, state: Mutex::new(state), changed: Condvar::new() });
        let spawn = |_| {
            let shared = Arc::clone(&shared);
            // If the system has no thread left, the caller of `take` reads the images.
            thread::Builder::new().name("pictures".to_owned()).spawn(move || shared.work()).ok()
        };
        let threads = (0..threads).filter_map(spawn).collect();
        Self { shared, threads }
    }

    /// Takes an image that was read ahead, and waits for one that a thread is reading. Returns `None` if the caller must read
    /// it: no thread has begun it, reading it failed, or it was not announced.
    pub(crate) fn take(&self, file: &str) -> Option<Arc<Pixels>> {
        let mut state = self.shared.lock();
        while matches!(state.pictures.get(file)?.stage, Stage::Reading) {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let entry = state.pictures.get_mut(file)?;
        entry.uses -= 1;
        let last = entry.uses == 0;
        let found = match &entry.stage {
            Stage::Ready(pixels) => Some(Arc::clone(pixels)),
            _ => None,
        };
        if last {
            state.pictures.remove(file);
            state.bytes -= found.as_deref().map_or(0, bytes);
            self.shared.changed.notify_all();
        }
        found
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A thread catches its panics.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(file) = self.next() {
            let read = catch_unwind(AssertUnwindSafe(|| (self.read)(&file)));
            let mut state = self.lock();
            let added = match (read, state.pictures.get_mut(&file)) {
                (Ok(Ok(pixels)), Some(entry)) => {
                    let added = bytes(&pixels);
                    entry.stage = Stage::Ready(pixels);
                    added
                }
                (_, Some(entry)) => {
                    entry.stage = Stage::Failed;
                    0
                }
                (_, None) => 0,
            };
            state.bytes += added;
            drop(state);
            self.changed.notify_all();
        }
    }

    /// The next image to read, once fewer than `most_bytes` are ready. `None` if the thread must end.
    fn next(&self) -> Option<String> {
        let mut state = self.lock();
        loop {
            if state.ends {
                return None;
            }
            if state.bytes >= self.most_bytes {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let file = state.queue.pop_front()?;
            // An image that was taken meanwhile is read by the caller of `take`.
            if let Some(entry) = state.pictures.get_mut(&file) {
                entry.stage = Stage::Reading;
                return Some(file);
            }
        }
    }
}

fn bytes(pixels: &Pixels) -> usize {
    size_of_val(pixels.patches.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tunesmith_base::error::Error;

    fn pixels(file: &str) -> Arc<Pixels> {
        Arc::new(Pixels { patches: file.bytes().map(f32::from).collect(), ..Pixels::default() })
    }

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("{number:04}")).collect()
    }

    #[test]
    fn pictures_are_read_once_and_no_more_wait_than_have_room() {
        let (reads, most) = (Arc::new(AtomicUsize::new(0)), 5 * 16);
        let counted = Arc::clone(&reads);
        let read: ReadPixels = Arc::new(move |file| {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(pixels(file))
        });
        let files: Vec<String> = names(100).into_iter().flat_map(|name| [name.clone(), name]).collect();
        let ahead = Ahead::within(most, files.clone(), 3, read);
        let mut own = 0;
        for (asked, file) in files.iter().enumerate() {
            match ahead.take(file) {
                Some(found) => assert_eq!(found, pixels(file)),
                None => own += 1,
            }
            assert!(ahead.shared.lock().bytes <= most + 2 * 16, "each thread may add one image");
            let read = reads.load(Ordering::SeqCst);
            assert!(read <= asked / 2 + 5 + 3 + 1, "{read} were read after {asked} were asked for");
        }
        assert_eq!(ahead.take("0000"), None, "it was taken as often as announced");
        let state = ahead.shared.lock();
        assert_eq!((state.bytes, state.pictures.len()), (0, 0));
        drop(state);
        assert!(reads.load(Ordering::SeqCst) + own >= 100);
    }

    #[test]
    fn a_bad_picture_is_left_to_whoever_asks_and_a_drop_ends_the_threads() {
        let read: ReadPixels = Arc::new(|file| match file {
            "0000" => Err(Error::data("bad")),
            "0001" => panic!("a decoder's fault"),
            _ => Ok(pixels(file)),
        });
        let ahead = Ahead::within(1, names(50), 2, read);
        for file in ["0000", "0001", "unknown"] {
            assert_eq!(ahead.take(file), None, "{file}");
        }
        // Most wait for room; nobody takes them.
        drop(ahead);
        assert_eq!(Ahead::of(Vec::new(), 2, Arc::new(|_| unreachable!())).take("a"), None);
    }
}

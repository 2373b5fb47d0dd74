//! Fetches all images that the rows of an input name by web address, before these rows are tokenized.
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::inputs::Input;
use super::pictures::{Pictures, is_bad_image};
use super::row::Form;
use super::row_pass::Walker;
use super::source::{Place, RawRow};
use super::web_address::Came;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::words::count;

/// How many images are fetched at once.
const AT_ONCE: usize = 16;
/// How many failures the report describes.
const NAMED_FAILURES: usize = 5;

/// Counts of the images that rows name by web address.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WebCounts {
    /// Images that this run fetched.
    pub fetched: u64,
    /// Bytes of the fetched images.
    pub bytes: u64,
    /// Images that were in the cache already.
    pub cached: u64,
    /// Images that could not be fetched, or that were not an image. Only with `data.bad_images: skip`; otherwise the
    /// first one ends the run.
    pub failed: u64,
    /// Failed images for which another attempt may succeed, as after a network error.
    pub passing: u64,
    /// The first failures, each with the place of its row.
    pub failures: Vec<String>,
}

impl WebCounts {
    /// These counts as a later run from the token cache reports them: it fetches nothing.
    pub(super) fn of_cache(self) -> Self {
        Self { fetched: 0, bytes: 0, cached: self.cached + self.fetched, ..self }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.fetched += other.fetched;
        self.bytes += other.bytes;
        self.cached += other.cached;
        self.failed += other.failed;
        self.passing += other.passing;
        let free = NAMED_FAILURES - self.failures.len().min(NAMED_FAILURES);
        self.failures.extend(other.failures.iter().take(free).cloned());
    }

    /// A sentence for the user; `None` if no row names an address.
    pub fn summary(&self) -> Option<String> {
        let Self { fetched, bytes, cached, failed, .. } = self;
        (fetched + cached + failed > 0).then(|| {
            let mebibytes = *bytes as f64 / f64::from(1 << 20);
            format!("{} fetched ({mebibytes:.1} MiB), {cached} in the cache, {failed} failed", count(*fetched, "image"))
        })
    }

    fn add(&mut self, place: &Place, came: Result<Option<Came>>) -> Result<()> {
        match came {
            Ok(None) => {}
            Ok(Some(Came::Cached)) => self.cached += 1,
            Ok(Some(Came::Fetched(bytes))) => (self.fetched, self.bytes) = (self.fetched + 1, self.bytes + bytes),
            Err(error) if is_bad_image(&error) => {
                self.failed += 1;
                self.passing += u64::from(error.kind() == Kind::Io);
                if self.failures.len() < NAMED_FAILURES {
                    self.failures.push(error.context(place).message().to_owned());
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// An image to fetch, and the row that names it.
struct Asked {
    row: usize,
    place: Place,
    name: String,
}

/// What the threads have counted, and the error of the earliest row that failed.
#[derive(Default)]
struct Done {
    counts: WebCounts,
    failed: Option<(usize, Error)>,
}

/// What the threads share. They take images from one queue, so an image goes to the first thread that is free.
struct Fetching<'a> {
    pictures: &'a dyn Pictures,
    skips: bool,
    queue: Mutex<Receiver<Asked>>,
    done: Mutex<Done>,
}

impl Fetching<'_> {
    fn done(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches images until the queue is closed. Skips images of rows after one that failed, because the run ends with
    /// that error.
    fn work(&self) {
        let next = || self.queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
        while let Some(Asked { row, place, name }) = next() {
            if self.done().failed.as_ref().is_some_and(|(first, _)| row > *first) {
                continue;
            }
            let came = self.pictures.fetch(&name);
            let mut done = self.done();
            let counted = match came {
                Err(error) if !self.skips => Err(error),
                came => done.counts.add(&place, came),
            };
            if let Err(error) = counted
                && done.failed.as_ref().is_none_or(|(first, _)| row < *first)
            {
                done.failed = Some((row, error.context(&place)));
            }
        }
    }
}

/// Fetches the images of all rows of an input, several at once. With `skips` (`data.bad_images: skip`), failures are
/// only counted.
///
/// # Errors
/// The errors of reading and parsing rows; the error of the earliest row with an image that cannot be fetched;
/// [`Kind::Memory`]: the threads cannot be started.
pub(super) fn fetch(
    walker: &Walker,
    set: &str,
    input: &Input,
    pictures: &dyn Pictures,
    skips: bool,
) -> Result<WebCounts> {
    let links = |row: RawRow, forms: &[Form]| {
        let place = row.place.clone();
        let names = row.parse(forms)?.into_images();
        Ok((place, names.into_iter().filter(|name| pictures.is_remote(name)).collect::<Vec<_>>()))
    };
    let (asks, queue) = sync_channel(4 * AT_ONCE);
    let fetching = Fetching { pictures, skips, queue: Mutex::new(queue), done: Mutex::default() };
    let walked = std::thread::scope(|scope| {
        // Moved into this scope, so that the end of the pass closes the queue and thereby ends the threads.
        let asks = asks;
        let (mut row, mut started) = (0, 0);
        walker.walk(&format!("fetching images of {set}"), input, &links, &mut |(place, names)| {
            for name in names {
                // The threads start with the first image, because many data sets have none to fetch.
                while started < AT_ONCE {
                    std::thread::Builder::new().spawn_scoped(scope, || fetching.work()).map_err(|error| {
                        Error::memory("cannot start threads that fetch images")
                            .caused_by(error)
                            .hint("raise the limits of processes and memory (ulimit -u, ulimit -v)")
                    })?;
                    started += 1;
                }
                let sent = asks.send(Asked { row, place: place.clone(), name });
                if sent.is_err() || fetching.done().failed.is_some() {
                    return Err(Error::data("an image cannot be fetched")); // its own error goes first, below
                }
            }
            row += 1;
            Ok(())
        })
    });
    let Done { counts, failed } = fetching.done.into_inner().unwrap_or_else(PoisonError::into_inner);
    match failed {
        Some((_, error)) => Err(error),
        None => walked.map(|()| counts),
    }
}

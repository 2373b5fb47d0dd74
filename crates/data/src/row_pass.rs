//! A pass over the rows of files. Rows are read in order, processed by all threads, and passed on in order. Only one
//! chunk of rows is in memory.
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::inputs::Input;
use super::progress::Progress;
use super::row::Form;
use super::source::{self, RawRow};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::threads::default_threads;
use tunesmith_config::Config;

/// A chunk ends after this many rows, or about this many bytes.
const CHUNK_ROWS: usize = 4096;
const CHUNK_BYTES: usize = 16 << 20;

/// What every pass over the data needs.
pub struct Walker<'a> {
    /// The threads that process rows.
    pub threads: &'a rayon::ThreadPool,
    /// Receives the bytes read so far.
    pub progress: &'a dyn Progress,
    /// The most rows to read of an input (`data.max_rows`).
    pub max_rows: Option<usize>,
}

impl Walker<'_> {
    /// Reads the rows of `input`, applies `work` to each in parallel, and passes the results to `take` in order. `work`
    /// also gets the row forms of the file.
    ///
    /// # Errors
    /// The error of reading, `work` or `take` that comes first in the order of the rows.
    pub fn walk<T: Send>(
        &self,
        doing: &str,
        input: &Input,
        work: &(dyn Fn(RawRow, &[Form]) -> Result<T> + Sync),
        take: &mut dyn FnMut(T) -> Result<()>,
    ) -> Result<()> {
        let total = input.paths.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum();
        self.progress.begin(doing, total);
        let mut rows = 0;
        for path in &input.paths {
            let left = self.max_rows.map(|most| most - rows);
            let (bytes, mut reported) = (Cell::new(0_u64), 0);
            let (mut chunk, mut chunk_bytes) = (Vec::new(), 0);
            let mut forms_of_file = Vec::new();
            let mut flush = |chunk: &mut Vec<RawRow>, forms: &[Form]| -> Result<()> {
                // Rows after one that failed are skipped: each of them may take as long to fail.
                let failed = AtomicUsize::new(usize::MAX);
                let one = |(index, row)| {
                    if index > failed.load(Ordering::Relaxed) {
                        return None;
                    }
                    let outcome = work(row, forms);
                    if outcome.is_err() {
                        failed.fetch_min(index, Ordering::Relaxed);
                    }
                    Some(outcome)
                };
                let done: Vec<Option<Result<T>>> =
                    self.threads.install(|| chunk.par_drain(..).enumerate().map(one).collect());
                done.into_iter().flatten().try_for_each(|outcome| outcome.and_then(&mut *take))?;
                self.progress.advance(bytes.get() - reported);
                reported = bytes.get();
                Ok(())
            };
            let read = source::read(path, input.format, left, &bytes, &mut |row, forms| {
                if forms_of_file.is_empty() {
                    forms_of_file = forms.to_vec();
                }
                rows += 1;
                chunk_bytes += row.bytes();
                chunk.push(row);
                if chunk.len() == CHUNK_ROWS || chunk_bytes > CHUNK_BYTES {
                    chunk_bytes = 0;
                    flush(&mut chunk, &forms_of_file)?;
                }
                Ok(())
            });
            // The rows before an unreadable one come first, because the earliest error is the one to report.
            flush(&mut chunk, &forms_of_file)?;
            read?;
        }
        self.progress.end();
        Ok(())
    }
}

/// The thread pool that reads and tokenizes rows, of `data.num_proc` threads.
///
/// # Errors
/// [`tunesmith_base::Kind::Memory`]: the threads cannot be started.
pub fn threads(config: &Config) -> Result<rayon::ThreadPool> {
    let threads = config.data.num_proc.unwrap_or_else(default_threads);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|error| {
        Error::memory("data.num_proc: cannot start threads")
            .caused_by(error)
            .hint("raise the limits of processes and memory (ulimit -u, ulimit -v), or set data.num_proc=1")
    })
}

//! One pass over the rows of some files: read in order, worked on by all threads, handed on in order; in memory are
//! the rows of one chunk.
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::dataset::Progress;
use super::inputs::Input;
use super::row::Form;
use super::source::{self, RawRow};
use tunesmith_base::error::Result;

/// Rows that are worked on together, and about how much text.
const CHUNK_ROWS: usize = 4096;
const CHUNK_BYTES: usize = 16 << 20;

/// What a pass needs besides the files.
pub struct Walker<'a> {
    /// The threads that work.
    pub threads: &'a rayon::ThreadPool,
    /// Is told how far the pass has come.
    pub progress: &'a dyn Progress,
    /// The most rows to read.
    pub max_rows: Option<usize>,
}

impl Walker<'_> {
    /// Reads the rows of `input`, applies `work` to each in parallel and hands the results to `take` in order.
    ///
    /// # Errors
    /// The first error, in the order of the rows, of reading, `work` or `take`.
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
            let (bytes, mut told) = (Cell::new(0_u64), 0);
            let (mut chunk, mut chunk_bytes) = (Vec::new(), 0);
            let mut forms_of_file = Vec::new();
            let mut flush = |chunk: &mut Vec<RawRow>, forms: &[Form]| -> Result<()> {
                // Rows behind one that failed are not looked at: each of them may take as long to fail.
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
                self.progress.advance(bytes.get() - told);
                told = bytes.get();
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
            // Rows before one that cannot be read are looked at first: the earliest error is the one to report.
            flush(&mut chunk, &forms_of_file)?;
            read?;
        }
        self.progress.end();
        Ok(())
    }
}

//! How the passes over the data report their progress.

/// Receives the progress of a long task, for a progress bar.
pub trait Progress {
    /// A task of `total` units begins; `what` names it. The units of a pass over files are bytes.
    fn begin(&self, what: &str, total: u64);
    /// `by` more units are done.
    fn advance(&self, by: u64);
    /// The task is over. An error ends it without this call.
    fn end(&self);
}

/// Ignores all progress, for callers without a progress bar.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
}

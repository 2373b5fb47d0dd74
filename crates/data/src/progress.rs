//! How the passes over the data report their progress, and what they found wrong.

/// Receives the progress of a long task, for a progress bar, and warnings about the rows.
pub trait Progress {
    /// A task of `total` units begins; `what` names it. The units of a pass over files are bytes.
    fn begin(&self, what: &str, total: u64);
    /// `by` more units are done.
    fn advance(&self, by: u64);
    /// The task is over. An error ends it without this call.
    fn end(&self);
    /// A likely mistake for the user to act on, as one sentence. [`crate::load`] calls this for each of
    /// [`crate::Report::warnings`], so that every command that reads rows says what is cut or left out.
    fn warn(&self, text: &str);
}

/// Ignores all progress and warnings, for callers that show none. [`crate::Dataset`] keeps the warnings.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
    fn warn(&self, _: &str) {}
}

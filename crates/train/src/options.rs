//! What a run is given beside its configuration, and what it returns.
use tunesmith_comm::env::Launch;
use tunesmith_data::question;
use tunesmith_telemetry::report::Outcome;

/// What a run is given beside its configuration.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Fields of the stamp that may differ from the checkpoint's.
    pub allow: Vec<String>,
    /// Remove an earlier run's files from the output directory.
    pub overwrite: bool,
    /// The launcher's environment, if it started this process as one of several ranks.
    pub launch: Option<Launch>,
    /// The command that resumes the run, for messages.
    pub resume_command: String,
}

/// The result of a finished run.
#[derive(Debug, Clone)]
pub struct Summary {
    /// How it ended.
    pub outcome: Outcome,
    /// Wall time.
    pub seconds: f64,
    /// Optimizer steps of this process; those before a resume do not count.
    pub steps: u64,
    /// Tokens of these steps.
    pub tokens: u64,
    /// Tokens by the wall time of the steps alone.
    pub tokens_per_second: f64,
    /// Peak memory of the process.
    pub peak_bytes: u64,
    /// Results and places: label and text.
    pub facts: Vec<(String, String)>,
    /// How to try the result; none on ranks that write nothing.
    pub ask: Option<Ask>,
}

/// How to try a run's result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// A row to ask.
    pub row: question::Question,
    /// The model has a classification head: it returns labels or a number, no text.
    pub scores: bool,
}

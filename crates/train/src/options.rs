//! The options of a run besides its configuration, and its result.
use tunesmith_comm::env::Launch;
use tunesmith_data::question;
use tunesmith_telemetry::report::RunOutcome;

/// The options of a run besides its configuration.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Fields of the stamp that may differ from those of the checkpoint.
    pub allow: Vec<String>,
    /// Remove an earlier run's files from the output directory.
    pub overwrite: bool,
    /// The launcher's environment, if it started this process as one of several ranks.
    pub launch: Option<Launch>,
    /// Make the plan alone: the output directory is neither checked nor locked.
    pub plan_only: bool,
    /// The command that resumes the run, for messages.
    pub resume_command: String,
}

/// The result of a finished run.
#[derive(Debug, Clone)]
pub struct Summary {
    /// How the run ended.
    pub outcome: RunOutcome,
    /// Wall time in seconds.
    pub seconds: f64,
    /// Optimizer steps of this process, without those before a resume.
    pub steps: u64,
    /// Tokens of the effective batches of these steps.
    pub tokens: u64,
    /// Tokens divided by the wall time of the steps only.
    pub tokens_per_second: f64,
    /// Peak memory of the process in bytes.
    pub peak_bytes: u64,
    /// Results and paths, as pairs of label and text.
    pub facts: Vec<(String, String)>,
    /// How to try the result; `None` on ranks that write no files.
    pub ask: Option<Ask>,
}

/// How to try a run's result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// An example prompt: that of the first held-out row, if it has one.
    pub row: question::Question,
    /// Whether the model has a classification head, so that it returns labels or a number instead of text.
    pub scores: bool,
}

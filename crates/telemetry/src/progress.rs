//! The progress of a run: the loop sends each [`Event`] to an [`Observer`], which decides how it is shown on a
//! terminal, in plain lines or in a test.
use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

use super::metrics::{EvalLine, StepLine};
use super::report::Sample;
use tunesmith_hub as hub;
use tunesmith_plan::batches::Batches;
use tunesmith_plan::human_bytes;
use tunesmith_plan::rates::Rate;

/// An event of a run.
#[derive(Debug)]
pub enum Event<'a> {
    /// A phase of the preparation begins, such as "loading the model".
    Phase(&'a str),
    /// A message for the user.
    Notice(&'a str),
    /// The plan, before step 1.
    Plan {
        /// Model, mode and sizes: label and value.
        facts: &'a [(String, String)],
        /// How rows become micro-batches, steps and epochs.
        batches: &'a Batches,
        /// The learning rate at its turning points.
        rates: &'a [Rate],
        /// How `train.lr_scaling` has scaled the rates to the rows of a step, in words; `None` without it.
        scaled: Option<&'a str>,
        /// The step from which the run continues; 0 for a new run.
        resumed_at: u64,
    },
    /// Everything is loaded and open: step 1, or the first after a resume, begins.
    Started,
    /// An optimizer step is done.
    Step {
        /// The numbers that `metrics.jsonl` gets.
        line: &'a StepLine,
        /// Speed and time left, over the last steps.
        pace: &'a Throughput,
        /// Whether nothing was updated, because the loss or the gradients were not finite.
        skipped: bool,
    },
    /// An evaluation on the validation split begins.
    Evaluating {
        /// Rows of the validation split.
        rows: u64,
    },
    /// An evaluation on the validation split is done.
    Eval {
        /// The numbers that `metrics.jsonl` gets.
        line: &'a EvalLine,
        /// Whether this is the best evaluation so far, by `train.metric_for_best_model`.
        best: bool,
    },
    /// The checkpoint in this folder is synced to disk.
    Saved(&'a Path),
    /// Generations for held-out rows, before and after training.
    Samples(&'a [Sample]),
}

/// Receives the events of a run, and warnings ([`tunesmith_data::Progress::warn`]). Called from the loop's thread and from those that tokenize.
pub trait Observer: tunesmith_data::Progress + Sync {
    /// Receives one event; see the trait for the threads that call it.
    fn event(&self, event: &Event<'_>);
}

/// Ignores all events; for ranks other than the first.
#[derive(Debug, Clone, Copy)]
pub struct SilentObserver;

impl Observer for SilentObserver {
    fn event(&self, _: &Event<'_>) {}
}

impl tunesmith_data::Progress for SilentObserver {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
    fn warn(&self, _: &str) {}
}

/// Reports downloads to an observer.
pub struct Downloads<'a>(pub &'a dyn Observer);

impl hub::DownloadProgress for Downloads<'_> {
    fn begin(&self, what: &str, total: u64) {
        self.0.event(&Event::Notice(&format!("{what}: {}", human_bytes(total))));
        self.0.begin(what, total);
    }

    fn advance(&self, by: u64) {
        self.0.advance(by);
    }

    fn end(&self) {
        self.0.end();
    }

    fn notice(&self, text: &str) {
        self.0.event(&Event::Notice(text));
    }
}

/// Steps over which the shown loss, speed and remaining time are averaged.
pub const WINDOW: usize = 20;

/// One of the last steps.
#[derive(Debug, Clone, Copy)]
struct Recent {
    tokens: u64,
    loss: Option<f64>,
    seconds: f64,
}

/// The speed and the remaining time of a run, from its last [`WINDOW`] steps.
#[derive(Debug, Clone)]
pub struct Throughput {
    /// Steps done, including those before a resume.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    recent: VecDeque<Recent>,
}

impl Throughput {
    /// A pace without measurements, at `step` of `total_steps`.
    pub fn new(step: u64, total_steps: u64) -> Self {
        Self { step, total_steps, recent: VecDeque::with_capacity(WINDOW) }
    }

    /// Counts one more step, which took `took`.
    pub fn advance(&mut self, tokens: u64, loss: Option<f64>, took: Duration) {
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.step += 1;
        self.recent.push_back(Recent { tokens, loss, seconds: took.as_secs_f64() });
    }

    /// The mean of the window's losses, without steps whose loss was not finite.
    pub fn loss(&self) -> Option<f64> {
        let (sum, count) =
            self.recent.iter().filter_map(|step| step.loss).fold((0.0, 0), |(s, n), loss| (s + loss, n + 1));
        (count > 0).then(|| sum / f64::from(count))
    }

    fn seconds(&self) -> f64 {
        self.recent.iter().map(|step| step.seconds).sum()
    }

    /// The window's tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        let tokens: u64 = self.recent.iter().map(|step| step.tokens).sum();
        tokens as f64 / self.seconds().max(1e-9)
    }

    /// Seconds that the remaining steps will take at the window's pace; 0 before the first step.
    pub fn eta_seconds(&self) -> f64 {
        self.seconds() / self.recent.len().max(1) as f64 * self.total_steps.saturating_sub(self.step) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_follows_the_last_steps() {
        let mut pace = Throughput::new(10, 20);
        assert_eq!((pace.eta_seconds(), pace.loss()), (0.0, None));
        pace.advance(100, Some(2.0), Duration::from_millis(500));
        assert_eq!((pace.step, pace.tokens_per_second(), pace.loss()), (11, 200.0, Some(2.0)));
        assert!((pace.eta_seconds() - 4.5).abs() < 1e-9);
        pace.advance(100, None, Duration::from_millis(500));
        assert_eq!(pace.loss(), Some(2.0), "a step without a loss does not count");
        pace.advance(100, Some(1.0), Duration::from_secs(1));
        assert!((pace.loss().unwrap() - 1.5).abs() < 1e-9);
        assert!((pace.tokens_per_second() - 150.0).abs() < 1e-9);
        assert!((pace.eta_seconds() - 2.0 / 3.0 * 7.0).abs() < 1e-9);
    }

    #[test]
    fn the_first_steps_leave_no_trace() {
        let mut pace = Throughput::new(0, 1000);
        pace.advance(1, Some(12.0), Duration::from_secs(60));
        for _ in 0..WINDOW {
            pace.advance(100, Some(0.5), Duration::from_secs(1));
        }
        assert_eq!((pace.loss(), pace.tokens_per_second()), (Some(0.5), 100.0));
        assert_eq!(pace.eta_seconds(), (1000 - pace.step) as f64);
    }
}

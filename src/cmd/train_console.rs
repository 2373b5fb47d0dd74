//! What `train` shows: a progress bar on a terminal, and plain lines elsewhere.
use std::io::IsTerminal as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::bar;
use super::terminal::{Style, columns, print, stdout_colour, warning};
use crate::config::Interval;
use crate::data;
use crate::plan::{self, grouped, human_bytes, human_seconds};
use crate::telemetry::metrics::{EvalLine, StepLine};
use crate::telemetry::progress::{Event, Observer, Throughput, WINDOW};
use crate::telemetry::report::{Sample, exact_matches, whole_percent};
use crate::train::run::Summary;
use crate::words::count;

/// Shows a run: a bar on a terminal, elsewhere one line per event.
pub(super) struct Console {
    terminal: bool,
    colour: bool,
    every: Interval,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The bar of the preparation (such as tokenization), then that of the training.
    bar: Option<ProgressBar>,
    /// The current step of the preparation and its start.
    task: Option<(String, Instant)>,
}

impl Console {
    pub fn new(every: Interval) -> Self {
        let terminal = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let (colour, began) = (stdout_colour(), Instant::now());
        Self { terminal, colour, every, began, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints above the bar. A full disk behind standard output must not end a training run.
    fn say(&self, text: &str) {
        let bar = self.state().bar.clone();
        match bar {
            Some(bar) => bar.suspend(|| drop(print(text))),
            None => drop(print(text)),
        }
    }

    /// Shows the current activity on the bar, in place of a step's figures.
    fn on_bar(&self, text: &str) {
        if let Some(bar) = &self.state().bar {
            let shown = match bar.length() {
                Some(total) => bar::with_text(bar.position(), total, text, wide(), self.colour),
                None => text.to_owned(),
            };
            bar.set_message(shown);
        }
    }

    fn heading(&self, text: &str) -> String {
        format!("{}\n", Style::Bold.paint(text, self.colour))
    }

    fn step(&self, line: &StepLine, pace: &Throughput, skipped: bool) {
        let figure = |value: Option<f64>| value.map_or_else(|| "not finite".to_owned(), |value| format!("{value:.4}"));
        let (rate, memory) = (grouped(pace.tokens_per_second().round() as u64), human_bytes(line.peak_bytes));
        let eta = human_seconds(pace.eta_seconds());
        if let Some(bar) = &self.state().bar {
            bar.set_position(line.step);
            bar.set_message(bar::of_step(line, pace, wide(), self.colour));
        } else if line.step.is_multiple_of(self.every.steps(pace.total_steps)) || line.step == pace.total_steps {
            let width = pace.total_steps.to_string().len();
            let accuracy = line.accuracy.map_or_else(String::new, |accuracy| format!("  accuracy {accuracy:.4}"));
            self.say(&format!(
                "step {:>width$}/{}  epoch {:.2}  loss {}{accuracy}  lr {:.3e}  norm {}  {rate} tok/s  eta {eta}  mem {memory}\n",
                line.step,
                pace.total_steps,
                line.epoch,
                figure(line.loss),
                line.learning_rate,
                figure(line.grad_norm),
            ));
        }
        if skipped {
            let scale = line.loss_scale.map(|scale| format!(", the loss scale is now {scale}")).unwrap_or_default();
            self.say(&format!("step {}: loss or gradients are not finite; the step was skipped{scale}\n", line.step));
        }
    }

    fn eval(&self, line: &EvalLine, best: bool) {
        let loss = line.eval_loss.map_or_else(|| "not finite".to_owned(), |loss| format!("{loss:.4}"));
        let best = if best { "  (best so far)" } else { "" };
        let seconds = human_seconds(line.eval_seconds);
        // Scores of single labels are only in metrics.jsonl.
        let told = |name: &str| line.eval_confusion.is_empty() || !name.contains('.');
        let scores = line.eval_scores.iter().filter(|(name, _)| told(name));
        let scores: Vec<String> = scores.map(|(name, score)| format!(", {name} {score:.4}")).collect();
        let scores = scores.concat();
        self.say(&format!(
            "evaluation after step {}: loss {loss}{scores} over {} in {seconds}{best}\n",
            line.step,
            count(line.eval_rows, "row")
        ));
    }

    fn samples(&self, samples: &[Sample]) {
        const SHOWN: usize = 8;
        /// About two lines of a terminal.
        const SHORT: usize = 120;
        let mut lines = vec![Style::Bold.paint("answers on held-out rows", self.colour)];
        for sample in samples.iter().take(SHOWN) {
            let [prompt, reference, before, after] =
                [&sample.question, &sample.reference, &sample.before, &sample.after].map(|text| one_line(text, SHORT));
            let style = if sample.after_matches() { Style::Green } else { Style::Red };
            let after = style.paint(&after, self.colour);
            lines.push(format!("  {prompt}\n    expected  {reference}\n    before    {before}\n    after     {after}"));
        }
        if samples.len() > SHOWN {
            lines.push(format!("  … and {}", count(samples.len() - SHOWN, "more row")));
        }
        let (before, after) = exact_matches(samples);
        let share = |count: usize| whole_percent(count, samples.len());
        lines.push(format!(
            "  exact match: {before}/{of} ({} %) before, {after}/{of} ({} %) after\n",
            share(before),
            share(after),
            of = samples.len(),
        ));
        self.say(&lines.join("\n"));
    }

    pub fn finish(&self) {
        if let Some(bar) = self.state().bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Observer for Console {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Phase(what) => {
                if self.terminal {
                    self.state().bar.get_or_insert_with(spinner);
                    self.on_bar(what);
                }
            }
            Event::Notice(text) => self.say(&format!("{text}\n")),
            Event::Plan { facts, batches, rates, scaled, resumed_at } => {
                self.finish();
                let mut text = self.heading("run") + &plan::table(facts);
                text += &(self.heading("batches") + &batches.to_string());
                text += &(self.heading("learning rate") + &plan::rates::show(rates));
                text += &scaled.map(|scaled| format!("  {scaled}\n")).unwrap_or_default();
                self.say(&text);
                if self.terminal {
                    let bar = ProgressBar::new(batches.total_steps);
                    bar.set_style(style("{msg}"));
                    bar.set_position(*resumed_at);
                    bar.enable_steady_tick(std::time::Duration::from_millis(250));
                    self.state().bar = Some(bar);
                    self.on_bar("loading the model");
                }
            }
            Event::Started => {
                let ready = human_seconds(self.began.elapsed().as_secs_f64());
                let remark = if self.terminal {
                    format!("; the bar shows means of the last {WINDOW} steps")
                } else {
                    String::new()
                };
                self.say(&format!("ready after {ready}{remark}\n"));
            }
            Event::Step { line, pace, skipped } => self.step(line, pace, *skipped),
            Event::Evaluating { rows } => {
                self.on_bar(&format!("evaluating {}", count(rows, "row")));
            }
            Event::Eval { line, best } => self.eval(line, *best),
            Event::Saved(path) => self.say(&format!("saved {}\n", path.display())),
            Event::Samples(samples) => self.samples(samples),
        }
    }
}

impl data::Progress for Console {
    fn begin(&self, what: &str, total: u64) {
        // Removes the line of the previous activity.
        self.finish();
        let mut state = self.state();
        state.task = Some((what.to_owned(), Instant::now()));
        if self.terminal {
            let bar = ProgressBar::new(total);
            bar.set_style(style("{msg} {bar:24.cyan/blue} {percent} %"));
            bar.set_message(what.to_owned());
            state.bar = Some(bar);
        }
    }

    fn advance(&self, by: u64) {
        if let Some(bar) = &self.state().bar {
            bar.inc(by);
        }
    }

    fn end(&self) {
        self.finish();
        let task = self.state().task.take();
        if let Some((what, since)) = task {
            self.say(&format!("{what}: {}\n", human_seconds(since.elapsed().as_secs_f64())));
        }
    }

    fn warn(&self, text: &str) {
        self.say(&warning(text, self.colour));
    }
}

/// The columns for the bar. The last one stays free, because some terminals would begin a new line.
fn wide() -> usize {
    columns().map_or(80, |columns| columns.saturating_sub(1))
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn spinner() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(std::time::Duration::from_millis(100));
    bar
}

/// Puts a text on one line of at most `limit` characters; `(nothing)` if it is empty.
fn one_line(text: &str, limit: usize) -> String {
    let shown: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match shown.char_indices().nth(limit) {
        Some((end, _)) => format!("{}…", &shown[..end]),
        None if shown.is_empty() => "(nothing)".to_owned(),
        None => shown,
    }
}

/// The summary at the end of a run.
pub(super) fn show_summary(summary: &Summary) -> String {
    let (outcome, time) = (summary.outcome.as_str(), human_seconds(summary.seconds));
    let work = match summary.steps {
        0 => "no step was left to do".to_owned(),
        steps => format!(
            "{}, {} at {} tokens/s",
            count(grouped(steps), "step"),
            count(grouped(summary.tokens), "token"),
            grouped(summary.tokens_per_second.round() as u64)
        ),
    };
    let memory = human_bytes(summary.peak_bytes);
    format!("{outcome} after {time}: {work}, peak memory {memory}\n{}", plan::table(&summary.facts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_shown_on_one_line() {
        assert_eq!(one_line(" a\nb\u{1b}[31m ", 60), "a b [31m");
        assert_eq!(one_line("äöü", 2), "äö…");
        assert_eq!(one_line(" \n", 9), "(nothing)");
    }
}

//! `tunesmith train`: fine-tunes a model. Shows a progress bar on a terminal, and plain lines elsewhere.
use std::io::IsTerminal as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::args::{JobArgs, is_checkpoint, print_notes};
use super::terminal::{Style, columns, print, print_exact, print_note, print_text, stdout_colour};
use super::{bar, paste};
use crate::comm::env;
use crate::config::{Flag, Resolved};
use crate::data;
use crate::error::{Error, Result};
use crate::plan::{self, grouped, human_bytes, human_seconds};
use crate::telemetry::metrics::{EvalLine, StepLine};
use crate::telemetry::progress::{Event, Observer, Pace, WINDOW};
use crate::telemetry::report::{Sample, exact_matches, whole_percent};
use crate::train::run::{self, Options, Summary};
use crate::train::signals::Stop;
use crate::words::count;

/// The arguments of `tunesmith train`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Go on from a checkpoint: without a value from the newest good one of the output directory; DIR is a checkpoint's
    /// folder, or a run's file `best` or `latest`
    #[arg(long, value_name = "latest|DIR", num_args = 0..=1, default_missing_value = "latest")]
    resume: Option<String>,
    /// Resume although this part of the checkpoint's stamp differs, such as `train.learning_rate` (may be given more
    /// than once; a refusal names the keys)
    #[arg(long, value_name = "KEY")]
    allow: Vec<String>,
    /// Start over in an output directory that holds an earlier run: its files are removed before step 1
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// The GPUs to use: `tunesmith launch --gpu-ids 0,1 -- train CONFIG` starts a rank for each
    #[arg(long, value_delimiter = ',', value_name = "N,N")]
    gpu_ids: Vec<usize>,
}

/// Trains.
///
/// # Errors
/// Everything that a run can fail with; [`crate::Kind::Preempted`] after a signal, when everything is saved.
pub fn run(args: &Args) -> Result<()> {
    let (job, resume) = claim_word(&args.job, args.resume.as_deref());
    let flag = |value: String| Flag { name: "--resume", key: "train.resume_from_checkpoint", value };
    let flags: Vec<Flag> = resume.map(flag).into_iter().collect();
    let launch = env::read(|name| std::env::var(name).ok())?;
    // Ranks other than the first say nothing but why they fail.
    let first = launch.as_ref().is_none_or(|launch| launch.world.is_first());
    if launch.is_none() {
        one_process(args)?;
    }
    let resolved = job.load_silently(&flags)?;
    if first {
        print_notes(&resolved);
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let names_file = resolved.config.train.accelerate.is_some();
        for note in by_accelerate(variable, launch.is_some(), names_file) {
            print_note(note);
        }
    }
    let stop = Stop::default();
    let _listening = stop.listen(
        move |signal| {
            tell(first, &format!("{signal} before step 1: nothing was written"));
            std::process::exit(i32::from(crate::Kind::Preempted.exit_code()));
        },
        move |signal, again| {
            let what = if again {
                "again: ending at once; the checkpoints that are there are whole"
            } else {
                "finishing this step, then saving (again: end at once)"
            };
            tell(first, &format!("{signal}: {what}"));
        },
    )?;
    let console = Console::new(resolved.config.train.logging_steps);
    let again = paste::to_resume(launch.is_some());
    let options = Options { allow: args.allow.clone(), overwrite: args.overwrite, launch, resume_command: again };
    let summary = run::run(&resolved, &options, &stop, &console)?;
    console.finish();
    if !first {
        return Ok(());
    }
    print(&show_summary(&summary))?;
    match &summary.ask {
        Some(ask) => print_exact(&paste::to_ask(ask, &resolved.config.train.output_dir)),
        None => Ok(()),
    }
}

/// Without a launcher there is one rank, however many GPUs are asked for.
///
/// # Errors
/// [`crate::Kind::Config`]: several are asked for.
fn one_process(args: &Args) -> Result<()> {
    let refused = |asked: &str, launch: &str| {
        Err(Error::config(format!("{asked}: `train` alone is one process, which is one rank"))
            .hint(format!("`{launch} -- train CONFIG` starts a rank for each")))
    };
    if let Some(number) = args.job.config.num_gpus().filter(|number| number != "1") {
        return refused(&format!("NUM_GPUS={number}"), &format!("NUM_GPUS={number} tunesmith launch"));
    }
    let ids: Vec<String> = args.gpu_ids.iter().map(usize::to_string).collect();
    match &ids[..] {
        [] => Ok(()),
        [id] => {
            print_note(&format!("not needed: --gpu-ids {id}: this version computes on the CPU"));
            Ok(())
        }
        ids => {
            let ids = ids.join(",");
            refused(&format!("--gpu-ids {ids}"), &format!("tunesmith launch --gpu-ids {ids}"))
        }
    }
}

/// What `accelerate launch` has been asked for and does not hand on in a way that is read here.
fn by_accelerate(variable: impl Fn(&str) -> Option<String>, launched: bool, names_file: bool) -> Vec<&'static str> {
    let mut notes = Vec::new();
    let Some(precision) = variable("ACCELERATE_MIXED_PRECISION") else { return notes };
    let asked = |name: &str| variable(name).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    // It sets the port where it is to start several processes.
    if !launched && variable("MASTER_PORT").is_some() && variable("WORLD_SIZE").is_none() {
        notes.push(
            "accelerate launch has started one process: with --cpu it leaves the others to mpirun (--mpirun_hostfile); \
             `tunesmith launch --nproc N -- train …` starts N ranks",
        );
    }
    let shares = asked("ACCELERATE_USE_FSDP") || asked("ACCELERATE_USE_DEEPSPEED");
    if !names_file && (shares || precision != "no") {
        notes.push(
            "of what accelerate launch has been told only the number of processes is read; name its file too for the rest \
             (FSDP, DeepSpeed, mixed precision): ACCELERATE_CONFIG_FILE=FILE",
        );
    }
    notes
}

/// The configuration that the words of a `train …` resolve to, where the number of ranks is still open, and `NUM_GPUS`, as a word or in the
/// environment; nothing where the words cannot be read, which the ranks will say.
///
/// # Errors
/// [`crate::Kind::Config`]: the configuration is refused.
pub fn resolved(words: &[String]) -> Result<Option<(Resolved, Option<String>)>> {
    #[derive(clap::Parser)]
    struct Words {
        #[command(flatten)]
        args: Args,
    }
    let Ok(Words { args }) = <Words as clap::Parser>::try_parse_from(words) else { return Ok(None) };
    let (job, _) = claim_word(&args.job, args.resume.as_deref());
    Ok(Some((job.load_partial(&[])?, job.config.num_gpus())))
}

/// `--resume` takes a value or none, so that in `--resume CONFIG` or `--resume KEY=VALUE` it would eat the next word:
/// a word that is plainly not a checkpoint folder is given back.
fn claim_word(job: &JobArgs, resume: Option<&str>) -> (JobArgs, Option<String>) {
    let mut job = job.clone();
    let resume = resume.map(|word| {
        if is_checkpoint(word) {
            word.to_owned()
        } else {
            job.config.words.push(word.to_owned());
            "latest".to_owned()
        }
    });
    (job, resume)
}

fn tell(first: bool, text: &str) {
    if first {
        print_text(&format!("{text}\n"));
    }
}

/// Shows a run: on a terminal a bar that is redrawn in place, elsewhere a line for each thing that happens.
struct Console {
    terminal: bool,
    colour: bool,
    every: u64,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The bar of the preparation (such as tokenization), then that of the training.
    bar: Option<ProgressBar>,
    /// What the preparation is doing, and since when, for plain lines.
    task: Option<(String, Instant)>,
}

impl Console {
    fn new(every: u64) -> Self {
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

    /// What is done now, on the bar, in the place of a step's figures.
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

    fn step(&self, line: &StepLine, pace: &Pace, skipped: bool) {
        let figure = |value: Option<f64>| value.map_or_else(|| "not finite".to_owned(), |value| format!("{value:.4}"));
        let (rate, memory) = (grouped(pace.tokens_per_second().round() as u64), human_bytes(line.peak_bytes));
        let eta = human_seconds(pace.eta_seconds());
        if let Some(bar) = &self.state().bar {
            bar.set_position(line.step);
            bar.set_message(bar::of_step(line, pace, wide(), self.colour));
        } else if line.step.is_multiple_of(self.every) || line.step == pace.total_steps {
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
        // Those of single labels are in metrics.jsonl.
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
        /// Two lines of a terminal.
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

    fn finish(&self) {
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
        // The line of what was done before goes.
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
}

/// The columns of the terminal that the bar is drawn on: its last one stays free, or some terminals begin a new line.
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

/// The text on one line of at most `limit` characters, or a word for nothing.
fn one_line(text: &str, limit: usize) -> String {
    let shown: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match shown.char_indices().nth(limit) {
        Some((end, _)) => format!("{}…", &shown[..end]),
        None if shown.is_empty() => "(nothing)".to_owned(),
        None => shown,
    }
}

fn show_summary(summary: &Summary) -> String {
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
    use super::super::args::ConfigArgs;
    use super::*;

    #[test]
    fn what_accelerate_does_not_hand_on_is_told() {
        let notes = |variables: &[(&str, &str)], launched, names_file| {
            let variable =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            by_accelerate(variable, launched, names_file).join("; ")
        };
        let plain = ("ACCELERATE_MIXED_PRECISION", "no");
        assert_eq!(notes(&[], false, false), "");
        assert_eq!(notes(&[plain], true, false), "");
        assert!(notes(&[plain, ("MASTER_PORT", "29500")], false, false).contains("has started one process"));
        let fsdp = [plain, ("ACCELERATE_USE_FSDP", "true")];
        assert!(notes(&fsdp, true, false).contains("ACCELERATE_CONFIG_FILE=FILE"));
        assert_eq!(notes(&fsdp, true, true), "");
        assert!(notes(&[("ACCELERATE_MIXED_PRECISION", "bf16")], true, false).contains("mixed precision"));
    }

    fn claim(resume: &str) -> (Vec<String>, Option<String>) {
        let config = ConfigArgs { words: vec!["a.yaml".to_owned()] };
        let (job, resume) = claim_word(&JobArgs { config, model: None, data: Vec::new() }, Some(resume));
        (job.config.words, resume)
    }

    #[test]
    fn resume_gives_back_a_word_that_is_no_checkpoint() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let name = file.path().to_str().unwrap();
        let words = |more: &str| vec!["a.yaml".to_owned(), more.to_owned()];
        assert_eq!(claim("TRAIN_SEED=1"), (words("TRAIN_SEED=1"), Some("latest".to_owned())));
        assert_eq!(claim(name), (words(name), Some("latest".to_owned())));
        let run = tempfile::tempdir().unwrap();
        let best = run.path().join("best");
        std::fs::write(&best, "checkpoint-000010\n").unwrap();
        assert_eq!(claim(best.to_str().unwrap()).1.as_deref(), best.to_str(), "a file that names a checkpoint");
        assert_eq!(claim("runs/a/checkpoint-000010").1.as_deref(), Some("runs/a/checkpoint-000010"));
    }

    #[test]
    fn texts_are_shown_on_one_line() {
        assert_eq!(one_line(" a\nb\u{1b}[31m ", 60), "a b [31m");
        assert_eq!(one_line("äöü", 2), "äö…");
        assert_eq!(one_line(" \n", 9), "(nothing)");
    }
}

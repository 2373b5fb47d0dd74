//! The end of a run: restores the best weights if configured, and writes the final files, the samples, and the report.
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::announce::rate_table;
use super::memory_prediction::used_of_budget;
use super::model_source::ModelSource;
use super::options::{Ask, Summary};
use super::run_plan::RunPlan;
use super::samples::Questions;
use super::session::{Done, Session};
use super::{data_summary, output, save};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::RealDisk;
use tunesmith_base::words::count;
use tunesmith_checkpoint::{TrainState, own_files};
use tunesmith_config::Mode;
use tunesmith_config::Source;
use tunesmith_data::{Dataset, question};
use tunesmith_plan::{grouped, human_bytes, human_seconds};
use tunesmith_telemetry::machine::{MachineInfo, peak_bytes};
use tunesmith_telemetry::metrics::{self, MetricsLine, StepLine};
use tunesmith_telemetry::progress::Event;
use tunesmith_telemetry::report::{self, Confusion, RunOutcome, RunReport, Sample, SettingRow, exact_matches};

/// Writes the results of a run. `resume_command` is the command that resumes it.
///
/// # Errors
/// Those of the disk and the engine. [`tunesmith_base::Kind::Preempted`]: a signal interrupted the samples; the weights are
/// saved.
pub fn finish(mut session: Session<'_>, outcome: RunOutcome, began: Instant, resume_command: &str) -> Result<Summary> {
    let (observer, stop) = (session.observer, session.stop);
    session.publish()?;
    if session.writes() || session.sharing.shares_values() {
        restore_best(&mut session)?;
    }
    if !session.writes() {
        save::follow_final_weights(&session)?;
        return finish_without_files(session, outcome, began);
    }
    let weights = save::final_weights(&mut session).map_err(|error| session.with_newest(error))?;
    observer.event(&Event::Saved(&weights));

    let sampling = Instant::now();
    let Session { model, optimizer, plan, source, dataset, state, done, comm, gatherer, .. } = session;
    let questions = Questions::new(&dataset, &plan.samples)?;
    if !questions.is_empty() {
        observer.event(&Event::Phase("generating for held-out rows"));
    }
    // Frees the buffers of the steps, so that the key/value cache fits.
    model.release();
    let after = questions.generate(&model, stop)?;
    model.stand_by()?;
    // Frees the trained model before the base is loaded: both at once would need twice the memory.
    drop((model, optimizer));
    let samples_base = after.is_some() && !questions.is_empty();
    if gatherer.is_some() {
        comm.broadcast(&mut [u64::from(samples_base)], 0)?;
    }
    let before = if samples_base {
        let base = source.load(gatherer.as_ref())?;
        let generations = questions.generate(&base, stop)?;
        base.stand_by()?;
        generations
    } else {
        after.clone()
    };
    let cut_off = before.is_none();
    let samples = questions.samples(before.unwrap_or_default(), after.unwrap_or_default())?;
    if !samples.is_empty() {
        observer.event(&Event::Samples(&samples));
    }

    let sampling = sampling.elapsed();
    let saved = format!("the trained weights are saved: {}", weights.display());
    let lines = metrics::read(&plan.output_dir.join(output::METRICS)).map_err(|error| error.with_more(&saved))?;
    let finished = FinishedRun {
        plan: &plan,
        source: &source,
        dataset: &dataset,
        state,
        done,
        outcome,
        weights,
        lines,
        sampling,
        began,
    };
    let summary = finished.summary(&samples);
    if plan.logging.report {
        let page = report::render(&finished.report(&summary, samples));
        let path = plan.output_dir.join(output::REPORT);
        own_files::replace_file(&RealDisk, &path, &page).map_err(|error| error.with_more(&saved))?;
    }
    if cut_off {
        let why = stop.requested().unwrap_or("a request to stop");
        return Err(Error::preempted(format!("{why}: the training is done and saved, but its samples are not"))
            .hint(format!("generate them with {resume_command}")));
    }
    Ok(summary)
}

/// Restores the best weights with `train.load_best_model_at_end`, unless they are the last ones. Ranks that shard the
/// weights call this together.
fn restore_best(session: &mut Session<'_>) -> Result<()> {
    let wanted = session.plan.saving.load_best_at_end;
    let best = best_of(&session.state).filter(|&(_, step)| wanted && step != session.state.step);
    let Some((loss, step)) = best else { return Ok(()) };
    let name = best_name(&session.state).to_owned();
    let found = save::load_best(session, step)?;
    session.observer.event(&Event::Notice(&if found {
        format!("back to the best weights: step {step}, eval_{name} {loss:.4}")
    } else {
        format!("the best weights, of step {step}, were not saved: the run ends with the last ones")
    }));
    Ok(())
}

/// The part of [`finish`] for ranks that write no files. If weights are sharded, they provide their shards while the first
/// rank generates.
fn finish_without_files(session: Session<'_>, outcome: RunOutcome, began: Instant) -> Result<Summary> {
    let Session { model, optimizer, source, done, comm, gatherer, .. } = session;
    if let Some(gatherer) = &gatherer {
        model.stand_by()?;
        drop((model, optimizer));
        let mut samples_base = [0u64];
        comm.broadcast(&mut samples_base, 0)?;
        if samples_base != [0] {
            source.load(Some(gatherer))?.stand_by()?;
        }
    }
    Ok(done.summary(outcome, began, Vec::new()))
}

impl Done {
    fn summary(&self, outcome: RunOutcome, began: Instant, facts: Vec<(String, String)>) -> Summary {
        let Self { steps, tokens, stepping, .. } = *self;
        Summary {
            outcome,
            seconds: began.elapsed().as_secs_f64(),
            steps,
            tokens,
            tokens_per_second: tokens as f64 / stepping.as_secs_f64().max(1e-9),
            peak_bytes: peak_bytes(self.device),
            facts,
            ask: None,
        }
    }
}

fn best_of(state: &TrainState) -> Option<(f64, u64)> {
    state.best_metric.zip(state.best_step)
}

/// The name of the metric that decides which evaluation is best.
fn best_name(state: &TrainState) -> &str {
    state.best_metric_name.as_deref().unwrap_or("loss")
}

/// A finished run.
struct FinishedRun<'a> {
    plan: &'a RunPlan,
    source: &'a ModelSource,
    dataset: &'a Dataset,
    state: TrainState,
    done: Done,
    outcome: RunOutcome,
    weights: PathBuf,
    lines: Vec<MetricsLine>,
    sampling: Duration,
    began: Instant,
}

impl FinishedRun<'_> {
    fn steps(&self) -> impl DoubleEndedIterator<Item = &StepLine> {
        self.lines.iter().filter_map(|line| match line {
            MetricsLine::Step(line) => Some(line),
            MetricsLine::Eval(_) => None,
        })
    }

    /// The losses of the first and the last step of the whole run.
    fn losses(&self) -> Option<(f64, f64)> {
        let mut losses = self.steps().filter_map(|line| line.loss);
        let first = losses.next()?;
        Some((first, losses.next_back().unwrap_or(first)))
    }

    /// The training accuracy of a classification over the last epoch, measured before each update.
    fn accuracy(&self) -> Option<f64> {
        let end = self.steps().next_back()?.epoch;
        let lines = self.steps().filter(|line| line.epoch > end - 1.0);
        let (right, rows) = lines.fold((0.0, 0.0), |(right, all), line| {
            let rows = line.label_tokens as f64;
            line.accuracy.map_or((right, all), |accuracy| (right + accuracy * rows, all + rows))
        });
        (rows > 0.0).then(|| right / rows)
    }

    fn summary(&self, samples: &[Sample]) -> Summary {
        let (plan, source) = (self.plan, self.source);
        let mut facts: Vec<(String, String)> = Vec::new();
        let mut fact = |label: &str, value: String| facts.push((label.to_owned(), value));
        if let Some((first, last)) = self.losses() {
            fact("loss", format!("{first:.4} at the first step, {last:.4} at the last"));
        }
        if let Some(accuracy) = self.accuracy() {
            fact("training accuracy", format!("{accuracy:.4} over the last epoch"));
        }
        if let Some(scale) = self.steps().next_back().and_then(|line| line.loss_scale) {
            // The last scalar of the optimizer counts skipped steps.
            let skipped = self.state.optimizer_scalars.last().copied().unwrap_or_default();
            fact("loss scale", format!("{scale} at the end, {} skipped for overflow", count(skipped, "step")));
        }
        if let Some((loss, step)) = best_of(&self.state) {
            fact(&format!("best eval {}", best_name(&self.state)), format!("{loss:.4} after step {step}"));
        }
        if !self.done.evaluating.is_zero() {
            fact("evaluations", self.evaluations());
        }
        if !samples.is_empty() {
            let (before, after) = exact_matches(samples);
            fact("exact match", format!("{before} of {} before, {after} after", samples.len()));
        }
        let vision = source.arch.vision.as_ref();
        let is_pair = vision.is_some_and(|vision| vision.folder.is_some());
        let has_world = vision.is_some_and(|vision| vision.world.is_some());
        match plan.model.mode {
            Mode::Full | Mode::Freeze => {
                fact("model", self.weights.display().to_string());
                let dir = self.weights.display();
                match source.arch.auto_class() {
                    Some(class) => fact("load in Transformers", format!("{class}.from_pretrained(\"{dir}\")")),
                    None => fact("load in Python", format!("scripts/load_vision.py: load(\"{dir}\")")),
                }
                let keys = [(is_pair, "vision.encoder"), (has_world, "vision.world")];
                let keys: Vec<&str> = keys.into_iter().filter(|(has, _)| *has).map(|(_, key)| key).collect();
                if !keys.is_empty() {
                    fact("train further", format!("model.name={dir}, without {}", keys.join(" and ")));
                }
            }
            _ => {
                fact("adapter", self.weights.display().to_string());
                let grown = !source.arch.new_tokens.is_empty();
                let base = match (grown, plan.model.merged_adapters.as_slice()) {
                    (_, [_, ..]) => "the base with tuning.adapters merged",
                    (true, []) => "the base with resize_token_embeddings to the new tokenizer",
                    (false, []) => "base",
                };
                let base = if source.arch.score.is_some() {
                    format!("{base} as AutoModelForSequenceClassification with this folder's config")
                } else {
                    base.to_owned()
                };
                // PEFT takes no adapter without an adapted module: where only the connector or the encoder is trained.
                if source.placements.is_empty() && source.arch.freezes_language() {
                    fact(
                        "use it",
                        "infer, eval and chat read it; tunesmith merge writes a model for Transformers".to_owned(),
                    );
                } else if source.arch.auto_class().is_some() {
                    fact("load in PEFT", format!("PeftModel.from_pretrained({base}, \"{}\")", self.weights.display()));
                }
                fact("train further", format!("tuning.adapter={}", self.weights.display()));
            }
        }
        if plan.logging.report {
            fact("report", plan.output_dir.join(output::REPORT).display().to_string());
        }
        if let Some(dir) = &plan.logging.events_dir {
            fact("curves", format!("tensorboard --logdir {}", dir.display()));
        }
        facts.extend(plan.memory.configured.map(used_of_budget));
        let mut summary = self.done.summary(self.outcome, self.began, facts);
        summary.ask = Some(self.ask());
        summary
    }

    /// An example prompt to try the trained model with: that of the first held-out row, or else "Hello".
    fn ask(&self) -> Ask {
        let dataset = self.dataset;
        let chat = dataset.template.is_some();
        let any = || question::Question { system: None, question: "Hello".to_owned(), chat, images: Vec::new() };
        let mut row = question::first(&dataset.inputs).unwrap_or_else(any);
        row.images.retain(|image| !image.starts_with("data:"));
        for image in &mut row.images {
            *image = self.source.image_dir().join(&*image).display().to_string();
        }
        Ask { row, scores: self.source.arch.score.is_some() }
    }

    /// The time of the evaluations and its share of the run.
    fn evaluations(&self) -> String {
        let (taken, whole) = (self.done.evaluating.as_secs_f64(), self.began.elapsed().as_secs_f64());
        format!("{} ({:.1} % of the run)", human_seconds(taken), 100.0 * taken / whole.max(1e-9))
    }

    fn report(&self, summary: &Summary, samples: Vec<Sample>) -> RunReport {
        let timing = |label: &str, time: Duration| (label.to_owned(), human_seconds(time.as_secs_f64()));
        let hashing = self.done.hashing.as_secs_f64();
        let hashing = format!("{} ({:.2} % of the run)", human_seconds(hashing), 100.0 * hashing / summary.seconds);
        let mut facts = vec![
            timing("before step 1", self.done.preparing),
            timing("steps", self.done.stepping),
            ("evaluations".to_owned(), self.evaluations()),
            timing("checkpoints", self.done.saving),
            timing("checkpoints, in the background", self.done.writing.saturating_sub(self.done.saving)),
            timing("samples", self.sampling),
            ("whole run".to_owned(), human_seconds(summary.seconds)),
            ("hashing, included in these".to_owned(), hashing),
        ];
        facts.push(("weights".to_owned(), self.weights.display().to_string()));
        let mut plan = self.plan.steps.rows();
        plan.extend(rate_table(self.plan).into_iter().map(|rate| {
            (format!("learning rate, {} (step {})", rate.label, rate.step), format!("{:.3e}", rate.learning_rate))
        }));
        let setting = |setting: &tunesmith_config::Setting| SettingRow {
            key: setting.key.clone(),
            value: setting.value.to_string(),
            source: setting.source.to_string(),
            default: setting.source == Source::Default,
        };
        let lengths = self.dataset.train.lengths();
        RunReport {
            title: self.plan.logging.run_name.clone(),
            subtitle: self.plan.model.summary.clone(),
            outcome: self.outcome,
            cards: self.cards(summary),
            lines: self.lines.clone(),
            data: data_summary::of_data(self.dataset),
            lengths,
            samples,
            confusion: self.confusion(),
            plan,
            settings: self.plan.settings.iter().map(setting).collect(),
            machine: MachineInfo::detect(),
            facts,
        }
    }

    /// The confusion matrix of the final weights.
    fn confusion(&self) -> Option<Confusion> {
        let best = best_of(&self.state).filter(|_| self.plan.saving.load_best_at_end);
        let evaluations = self.lines.iter().filter_map(|line| match line {
            MetricsLine::Eval(line) => Some(line),
            MetricsLine::Step(_) => None,
        });
        let line = evaluations.rev().find(|line| best.is_none_or(|(_, step)| line.step == step))?;
        let labels = self.source.arch.score.as_ref()?.labels.clone();
        let cells = line.eval_confusion.clone();
        (cells.len() == labels.len() && !cells.is_empty()).then_some(Confusion {
            title: format!("Validation rows after step {}", line.step),
            labels,
            cells,
        })
    }

    fn cards(&self, summary: &Summary) -> Vec<(String, String, String)> {
        let mut cards = Vec::new();
        let mut card = |name: &str, value: String, remark: String| cards.push((name.to_owned(), value, remark));
        if let Some((first, last)) = self.losses() {
            card("final loss", report::figure(last), format!("first {}", report::figure(first)));
        }
        if let Some((loss, step)) = best_of(&self.state) {
            let name = format!("best evaluation {}", best_name(&self.state));
            card(&name, report::figure(loss), format!("after step {step}"));
        }
        let (tokens, seconds) = self.steps().fold((0.0, 0.0), |(tokens, seconds), line| {
            let step = line.tokens as f64;
            (tokens + step, seconds + step / line.tokens_per_second.max(1e-9))
        });
        let speed = tokens / f64::max(seconds, 1e-9);
        card("speed", grouped(speed.round() as u64), "tokens per second".to_owned());
        let remark = format!("peak memory {}", human_bytes(summary.peak_bytes));
        card("time", human_seconds(summary.seconds), remark);
        cards
    }
}

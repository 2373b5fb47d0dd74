//! The run on one page: prepare, load, go on from a checkpoint if asked, step, evaluate, save, finish.
use std::time::Instant;

use super::progress::{Event, Observer};
use super::report::Outcome;
use super::session::Session;
use super::signals::Stop;
use super::{engine, finish, prepare, save};
use crate::config::{EvalStrategy, Resolved};
use crate::error::{Error, Result};
use crate::memory::{self, Budget, limits};

/// What a run is told beside its configuration.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Fields of the stamp that may differ from the checkpoint's.
    pub allow: Vec<String>,
    /// Remove an earlier run's files from the output directory.
    pub overwrite: bool,
}

/// What a finished run amounts to.
#[derive(Debug, Clone)]
pub struct Summary {
    /// How it ended.
    pub outcome: Outcome,
    /// Wall time.
    pub seconds: f64,
    /// Optimizer steps done now, those before a resume not counted.
    pub steps: u64,
    /// Tokens of these steps.
    pub tokens: u64,
    /// Over the wall time of the steps alone.
    pub tokens_per_second: f64,
    /// The most memory held.
    pub peak_bytes: u64,
    /// Results and places: label and text.
    pub facts: Vec<(String, String)>,
}

/// Trains as `resolved` says.
///
/// # Errors
/// Whatever is refused or fails; [`crate::Kind::Preempted`] when `stop` was requested and everything is saved;
/// [`crate::Kind::Numeric`] after too many steps in a row that were not finite.
pub fn run(resolved: &Resolved, options: &Options, stop: &Stop, observer: &dyn Observer) -> Result<Summary> {
    let budget = resolved.config.train.memory_budget.map(|bytes| bytes.0).or_else(limits::usable);
    let _budget = budget.map(Budget::new);
    let run_here = || memory::guarded(|| run_here(resolved, options, stop, observer));
    let Some(threads) = resolved.config.train.num_threads else { return run_here() };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| Error::config(format!("train.num_threads = {threads}: {error}")))?;
    pool.install(run_here)
}

fn run_here(resolved: &Resolved, options: &Options, stop: &Stop, observer: &dyn Observer) -> Result<Summary> {
    let began = Instant::now();
    engine::choose(&resolved.config);
    let prepared = prepare::prepare(resolved, options, stop, observer)?;
    prepared.announce(observer);
    let mut session = Session::load(resolved, options, stop, observer, prepared)?;
    session.try_evaluation()?;
    stop.enter_loop()?;
    session.open(options, began)?;
    observer.event(&Event::Started);
    let starts = session.state.step == 0 && resolved.config.train.eval_on_start;
    if starts && resolved.config.train.eval_strategy != EvalStrategy::No {
        session.evaluate()?;
    }
    let outcome = steps(&mut session)?;
    finish::finish(session, outcome, began)
}

/// From the step that the session stands at to the end.
fn steps(session: &mut Session<'_>) -> Result<Outcome> {
    let total = session.prepared.batches.total_steps;
    loop {
        session.collect()?;
        // First what belongs after the step that was done last; a signal may have cut it off before a resume.
        if session.evaluation_is_due() {
            session.evaluate()?;
            save::point_best(session)?;
        }
        let stop = session.stop.requested();
        let outcome = match session.state.step {
            step if step >= total => Some(Outcome::Completed),
            _ if session.is_stale() => Some(Outcome::StoppedEarly),
            _ => None,
        };
        let (unsaved, ends) = (session.state.step > session.begun, stop.is_some() || outcome.is_some());
        if unsaved && (ends || session.save_is_due()) {
            save::checkpoint(session, ends)?;
        }
        if ends {
            session.settle()?;
        }
        match (stop, outcome) {
            (Some(why), _) => return Err(interrupted(session, why)),
            (None, Some(outcome)) => return Ok(outcome),
            (None, None) => session.step()?,
        }
    }
}

fn interrupted(session: &Session<'_>, why: &str) -> Error {
    let (step, total) = (session.state.step, session.prepared.batches.total_steps);
    if step == 0 {
        return Error::preempted(format!("{why}: stopped before step 1; there was nothing to save"));
    }
    Error::preempted(format!("{why}: stopped after step {step} of {total}, everything is saved")).hint(format!(
        "run it again with --resume: `scripts/just train CONFIG={} --resume`, with the same overrides",
        session.resolved.path.display()
    ))
}

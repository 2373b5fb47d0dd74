//! The run on one page: prepare, load, go on from a checkpoint if asked, step, evaluate, save, finish.
use std::time::Instant;

use super::ranks::{self, Seat};
use super::run_files::DISPLACED;
use super::session::{GONE, Session};
use super::signals::Stop;
use super::{engine, finish, prepare, save};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::memory::{self, Budget, limits};
use tunesmith_comm::env::Launch;
use tunesmith_config::{EvalStrategy, Resolved};
use tunesmith_data::question;
use tunesmith_telemetry::progress::{Event, Observer, Quiet};
use tunesmith_telemetry::report::Outcome;

/// What a run is told beside its configuration.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Fields of the stamp that may differ from the checkpoint's.
    pub allow: Vec<String>,
    /// Remove an earlier run's files from the output directory.
    pub overwrite: bool,
    /// What the launcher says that started this process as one of several.
    pub launch: Option<Launch>,
    /// The command that goes on with this run, as a message says it.
    pub again: String,
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
    /// How the result is asked; `None` on ranks that leave nothing behind.
    pub ask: Option<Ask>,
}

/// What it takes to ask a run's result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// A row to ask it with.
    pub row: question::Question,
    /// The model has a head of scores: it gives labels or a number, no answers.
    pub scores: bool,
}

/// Trains as `resolved` says, with as many ranks as there are. Only rank 0 writes and is heard.
///
/// # Errors
/// Whatever is refused or fails; [`tunesmith_base::Kind::Preempted`] when `stop` was requested and everything is saved;
/// [`tunesmith_base::Kind::Numeric`] after too many steps in a row that were not finite.
pub fn run(resolved: &Resolved, options: &Options, stop: &Stop, observer: &dyn Observer) -> Result<Summary> {
    engine::choose(&resolved.config);
    // Ranks that are processes share the machine's memory, those that are threads share the process's.
    let sharing = options.launch.as_ref().map_or(1, |launch| launch.world.local_size as u64);
    let usable = || limits::usable().map(|bytes| bytes / sharing);
    let budget = resolved.config.train.memory_budget.map(|bytes| bytes.0).or_else(usable);
    let _budget = budget.map(Budget::new);
    let mut seats = ranks::seats(resolved, options.launch.as_ref(), observer)?;
    let (world, launcher) = (seats[0].world, options.launch.as_ref().map(|launch| launch.launcher));
    let resolved = &resolved.in_world(world.size, world.local_size, launcher)?;
    let others = seats.split_off(1);
    let first = seats.remove(0);
    std::thread::scope(|scope| {
        let others: Vec<_> = others
            .into_iter()
            .map(|seat| scope.spawn(move || on_threads(resolved, options, stop, &Quiet, seat)))
            .collect();
        let mut results = vec![on_threads(resolved, options, stop, observer, first)];
        for other in others {
            results.push(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        ranks::cause(results)
    })
}

/// One rank, on its share of the cores.
fn on_threads(
    resolved: &Resolved,
    options: &Options,
    stop: &Stop,
    observer: &dyn Observer,
    seat: Seat,
) -> Result<Summary> {
    let observer = if seat.world.is_first() { observer } else { &Quiet };
    let threads = seat.threads(resolved.config.train.num_threads);
    let run_here = || memory::guarded(|| run_here(resolved, options, stop, observer, seat));
    let Some(threads) = threads else { return run_here() };
    let pool = tunesmith_ops::par::pool(threads)?;
    pool.install(run_here)
}

fn run_here(
    resolved: &Resolved,
    options: &Options,
    stop: &Stop,
    observer: &dyn Observer,
    seat: Seat,
) -> Result<Summary> {
    let began = Instant::now();
    let found = seat.in_turn(|| prepare::find(resolved, options, stop, observer, &seat))?;
    // Only now: reading the data may take longer than an operation between ranks may.
    let comm = seat.connect()?;
    let prepared = found.settle(resolved, options, &*comm, observer)?;
    prepared.announce(observer);
    let mut session = Session::load(resolved, options, stop, observer, prepared, comm)?;
    session.agree()?;
    session.try_evaluation()?;
    stop.enter_loop()?;
    session.open(options, began)?;
    observer.event(&Event::Started);
    let starts = session.state.step == 0 && resolved.config.train.eval_on_start;
    if starts && resolved.config.train.eval_strategy != EvalStrategy::No {
        session.evaluate()?;
    }
    let outcome = steps(&mut session, &options.again)?;
    finish::finish(session, outcome, began, &options.again)
}

/// From the step that the session stands at to the end.
fn steps(session: &mut Session<'_>, again: &str) -> Result<Outcome> {
    let total = session.prepared.batches.total_steps;
    loop {
        let gone = session.output_has_gone()?;
        if !gone {
            session.mind_its_files();
        }
        session.collect().or_else(|error| if gone { Ok(()) } else { Err(error) })?;
        // First what belongs after the step that was done last; a signal may have cut it off before a resume.
        if session.evaluation_is_due() {
            session.evaluate()?;
            save::point_best(session)?;
        }
        let stop = session.asked_to_stop()?;
        let outcome = match session.state.step {
            step if step >= total => Some(Outcome::Completed),
            _ if session.is_stale() => Some(Outcome::StoppedEarly),
            _ => None,
        };
        let (unsaved, ends) = (session.state.step > session.begun, stop.is_some() || outcome.is_some());
        session.save_is_owed |= unsaved && session.save_is_due();
        // A run in which no step counted has trained nothing, however short it is.
        let trained_nothing = outcome.is_some() && session.optimizer.step == 0;
        if session.is_diverging() || trained_nothing {
            // Nothing is saved here: whatever comes last would stand in the place of a checkpoint that can be used.
            if ends {
                return Err(session.diverged(stop));
            }
        } else if unsaved && (ends || session.save_is_owed) {
            save::checkpoint(session, ends)?;
            session.save_is_owed = false;
        }
        if ends {
            session.settle()?;
        }
        match (stop, outcome) {
            (Some(why), _) => {
                // Nobody leaves before everything is saved: a launcher may end the others when one has.
                session.comm.barrier()?;
                return Err(interrupted(session, why, again));
            }
            (None, Some(outcome)) => return Ok(outcome),
            (None, None) => session.step()?,
        }
    }
}

fn interrupted(session: &Session<'_>, why: &str, again: &str) -> Error {
    let (step, total) = (session.state.step, session.prepared.batches.total_steps);
    if why == GONE {
        let output_dir = session.prepared.config.train.output_dir.display();
        let message = format!("train.output_dir = {output_dir} was removed or moved while the run wrote to it");
        return Error::new(Kind::Io, message).hint(format!(
            "the state after step {step} of {total} is saved in a new folder of that name: go on with --resume, or move it to \
             the other checkpoints first"
        ));
    }
    if let Some(found) = session.displaced.as_ref().filter(|_| why == DISPLACED) {
        let saved = if step == 0 {
            "nothing was trained yet: move away what is in the way, and start again".to_owned()
        } else {
            format!(
                "the state after step {step} of {total} is saved: move away what is in the way, and go on with {again}"
            )
        };
        return Error::new(Kind::Io, found).hint(saved);
    }
    if step == 0 {
        return Error::preempted(format!("{why}: stopped before step 1; there was nothing to save"));
    }
    Error::preempted(format!("{why}: stopped after step {step} of {total}, everything is saved"))
        .hint(format!("go on with {again}"))
}

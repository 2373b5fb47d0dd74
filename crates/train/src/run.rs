//! A run on one page: plan, load, resume if configured, step, evaluate, save, finish.
use std::time::Instant;

pub use super::options::{Ask, Options, Summary};
use super::output_watch::{GONE, REPLACED};
use super::prepared::Prepared;
use super::ranks::{self, Seat};
use super::run_plan::RunPlan;
use super::session::Session;
use super::signals::Stop;
use super::{engine, finish, save, setup};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_comm::Collectives;
use tunesmith_comm::env::Launch;
use tunesmith_config::Resolved;
use tunesmith_device::memory::{self, Budget};
use tunesmith_model::device::{device, of_rank as of_rank_device, usable};
use tunesmith_telemetry::progress::{Event, Observer, SilentObserver};
use tunesmith_telemetry::report::RunOutcome;

/// Trains with the configuration `resolved`, on all ranks of this process. Only rank 0 writes and reports events.
///
/// # Errors
/// Those of every part of the run. [`tunesmith_base::Kind::Preempted`]: `stop` was requested, and everything is saved.
/// [`tunesmith_base::Kind::Numeric`]: too many steps in a row were not finite.
pub fn run(resolved: &Resolved, options: &Options, stop: &Stop, observer: &dyn Observer) -> Result<Summary> {
    on_ranks(resolved, options, observer, &|resolved, observer, seat| {
        let began = Instant::now();
        let (prepared, comm) = prepare(resolved, options, stop, observer, seat)?;
        prepared.announce(observer);
        let mut session = Session::load(options, stop, observer, prepared, comm)?;
        session.check_rank_consistency()?;
        session.try_evaluation()?;
        stop.enter_loop()?;
        session.open(options, began)?;
        observer.event(&Event::Started);
        if session.state.step == 0 && session.plan.evaluation.as_ref().is_some_and(|evaluation| evaluation.on_start) {
            session.evaluate()?;
        }
        let outcome = steps(&mut session, &options.resume_command).map_err(|error| session.with_newest(error))?;
        finish::finish(session, outcome, began, &options.resume_command)
    })
}

/// Makes the plan of a run as [`run`] does, but trains nothing and leaves the output directory alone, which may hold a run.
///
/// # Errors
/// Those of [`run`] before step 1.
pub fn plan(resolved: &Resolved, launch: Option<Launch>, observer: &dyn Observer) -> Result<RunPlan> {
    let (options, stop) = (Options { launch, plan_only: true, ..Options::default() }, Stop::default());
    let (options, stop) = (&options, &stop);
    on_ranks(resolved, options, observer, &|resolved, observer, seat| {
        let (prepared, _) = prepare(resolved, options, stop, observer, seat)?;
        prepared.report_notes(observer);
        Ok(prepared.plan)
    })
}

/// The work of one rank, given the configuration for its world.
type OfRank<'a, T> = &'a (dyn Fn(&Resolved, &dyn Observer, Seat) -> Result<T> + Sync);

/// Runs `of_rank` on every rank of this process, each with its share of the cores. Returns the result of the first rank, or
/// the error that caused the others.
fn on_ranks<T: Send>(
    resolved: &Resolved,
    options: &Options,
    observer: &dyn Observer,
    of_rank: OfRank<'_, T>,
) -> Result<T> {
    engine::choose(resolved.config.tuning.backend);
    let mut on_device = resolved.clone();
    if let Some(launch) = &options.launch {
        on_device.config.model.device = of_rank_device(resolved.config.model.device, launch.world.local_rank)?;
    }
    let resolved = &on_device;
    // Processes divide the machine's memory, or a GPU's among those that share it; threads share the budget of their process.
    let device = device(resolved.config.model.device)?;
    let mut seats = ranks::seats(resolved, options.launch.as_ref(), observer)?;
    let sharing = seats[0].sharing(device)? as u64;
    let usable = || usable(device).map(|bytes| bytes / sharing);
    let budget = resolved.config.train.memory_budget.map(|bytes| bytes.0).or_else(usable);
    let _budget = budget.map(|bytes| Budget::new(device, bytes));
    let (world, launcher) = (seats[0].world, options.launch.as_ref().map(|launch| launch.launcher));
    let resolved = &resolved.in_world(world.size, world.local_size, launcher)?;
    let others = seats.split_off(1);
    let first = seats.remove(0);
    let on_threads = |seat: Seat, observer: &dyn Observer| {
        let observer = if seat.world.is_first() { observer } else { &SilentObserver };
        let threads = seat.threads(resolved.config.train.num_threads);
        let act = || memory::guarded(|| of_rank(resolved, observer, seat));
        match threads {
            None => act(),
            Some(threads) => tunesmith_ops::par::pool(threads)?.install(act),
        }
    };
    std::thread::scope(|scope| {
        let on_threads = &on_threads;
        let others: Vec<_> =
            others.into_iter().map(|seat| scope.spawn(move || on_threads(seat, &SilentObserver))).collect();
        let mut results = vec![on_threads(first, observer)];
        for other in others {
            results.push(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        ranks::cause(results)
    })
}

/// Checks the run on one rank, connects it with the other ranks, and plans the run.
fn prepare(
    resolved: &Resolved,
    options: &Options,
    stop: &Stop,
    observer: &dyn Observer,
    seat: Seat,
) -> Result<(Prepared, Box<dyn Collectives>)> {
    let mut checked = seat.in_turn(|| setup::open_locally(resolved, options, stop, observer, &seat))?;
    checked.features(options, observer)?;
    // Connects after the data are read, which may take longer than the timeout of an operation between ranks.
    let comm = seat.connect()?;
    let prepared = checked.plan(resolved, options, &*comm, observer)?;
    Ok((prepared, comm))
}

/// Runs all remaining steps, with their evaluations and checkpoints. `resume_command` is for messages.
fn steps(session: &mut Session<'_>, resume_command: &str) -> Result<RunOutcome> {
    let total = session.plan.steps.total_steps;
    loop {
        let gone = session.output_is_gone()?;
        if !gone {
            session.check_files();
        }
        session.poll_saving().or_else(|error| if gone { Ok(()) } else { Err(error) })?;
        // First the evaluation after the last step, which a signal may have interrupted before a resume.
        if session.evaluation_is_due() {
            session.settle()?;
            session.evaluate()?;
            save::update_best_pointer(session)?;
        }
        session.report_mended_features();
        let stop = session.stop_requested()?;
        let outcome = match session.state.step {
            step if step >= total => Some(RunOutcome::Completed),
            _ if session.stops_early() => Some(RunOutcome::StoppedEarly),
            _ => None,
        };
        let (unsaved, ends) = (session.state.step > session.begun, stop.is_some() || outcome.is_some());
        session.save_is_owed |= unsaved && save::is_due(session);
        if ends || session.save_is_owed {
            session.settle()?;
        }
        // A run that skipped every step has trained nothing, however short it is.
        let trained_nothing = outcome.is_some() && session.optimizer.step == 0;
        if session.is_diverging() || trained_nothing {
            // Nothing is saved here, so that the newest checkpoint stays a usable one.
            if ends {
                return Err(session.diverged(stop));
            }
        } else if unsaved && (ends || session.save_is_owed) {
            save::checkpoint(session, ends)?;
            session.save_is_owed = false;
        }
        if ends {
            session.wait_for_saving()?;
        }
        match (stop, outcome) {
            (Some(why), _) => {
                // No rank exits before everything is saved, because a launcher may then end the others.
                session.comm.barrier()?;
                return Err(interrupted(session, why, resume_command));
            }
            (None, Some(outcome)) => return Ok(outcome),
            (None, None) => session.step()?,
        }
    }
}

fn interrupted(session: &Session<'_>, why: &str, resume_command: &str) -> Error {
    let (step, total) = (session.state.step, session.plan.steps.total_steps);
    if why == GONE {
        let output_dir = session.plan.output_dir.display();
        let message = format!("train.output_dir = {output_dir} was removed or moved while the run wrote to it");
        return Error::new(Kind::Io, message).hint(format!(
            "the state after step {step} of {total} is saved in a new folder of that name: continue with --resume, or first \
             move it to the other checkpoints"
        ));
    }
    if let Some(found) = session.replaced_file.as_ref().filter(|_| why == REPLACED) {
        let saved = if step == 0 {
            "nothing was trained yet: move it away, and start again".to_owned()
        } else {
            format!("the state after step {step} of {total} is saved: move it away, and continue with {resume_command}")
        };
        return Error::new(Kind::Io, found).hint(saved);
    }
    if step == 0 {
        return Error::preempted(format!("{why}: stopped before step 1; there was nothing to save"));
    }
    Error::preempted(format!("{why}: stopped after step {step} of {total}, everything is saved"))
        .hint(format!("continue with {resume_command}"))
}

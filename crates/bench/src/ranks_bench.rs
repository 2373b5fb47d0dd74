//! `tunesmith bench --ranks`: measures steps of several ranks on this machine and compares them with the prediction of
//! [`tunesmith_plan::scaling`]. The prediction uses the step time of ranks that do not communicate, and the times of two
//! all-gathers.
use super::training::{self, TrainingRequest};
use serde::Serialize;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;
use tunesmith_base::error::{Error, Result};
use tunesmith_comm::env::{Endpoint, Launch};
use tunesmith_comm::gloo::{self, Gloo};
use tunesmith_comm::host::Host;
use tunesmith_comm::membership::Facts;
use tunesmith_comm::rendezvous::{Rendezvous, Wait};
use tunesmith_comm::single::Single;
use tunesmith_comm::token::RunToken;
use tunesmith_comm::{Collectives, Limits, World, threads};
use tunesmith_config::arch::Arch;
use tunesmith_data::{Batch, Split};
use tunesmith_model::Model;
use tunesmith_optim::{AdamW, Betas, Optimizer};
use tunesmith_parallel::ddp_zero::Sharing;
use tunesmith_parallel::optimizer::slots;
use tunesmith_plan::platform;
use tunesmith_plan::scaling::{self, Fabric, Link, Pattern, Work};
use tunesmith_plan::strategies::Strategy;
use tunesmith_train::micro_batches;
use tunesmith_train::step::{Attempt, attempt};

/// Bytes of the two all-gathers from which latency and bandwidth are fitted.
const PROBES: [usize; 2] = [16 << 10, 16 << 20];
/// Repetitions of each all-gather; the fastest counts.
const TRIES: usize = 5;

/// What carries the bytes between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RanksEngine {
    /// Ranks are threads of one process and share its memory.
    Threads,
    /// Gloo over the loopback device.
    Gloo,
}

/// Prediction and measurement of one number of ranks.
#[derive(Debug, Clone, Serialize)]
pub struct RanksLine {
    /// What carried the bytes between the ranks.
    pub engine: RanksEngine,
    /// World size; all ranks run on this machine.
    pub ranks: usize,
    /// Compute threads of one rank.
    pub threads: usize,
    /// Latency and bandwidth between ranks, measured on two; `None` if the two times allow no fit.
    pub link: Option<Link>,
    /// Seconds of a step if the same number of ranks run at the same time without communicating.
    pub alone: f64,
    /// Predicted seconds of a step.
    pub predicted: f64,
    /// Measured seconds of a step.
    pub measured: f64,
    /// Measured tokens per second of all ranks.
    pub tokens_per_second: f64,
}

/// Measures each number of ranks in `worlds` with each available engine.
///
/// # Errors
/// Those of [`training::run`]; [`tunesmith_base::Kind::Peer`].
pub fn run(request: &TrainingRequest, worlds: &[usize]) -> Result<Vec<RanksLine>> {
    let arch = training::shape(&request.shape)?;
    let mut engines = vec![RanksEngine::Threads];
    engines.extend(gloo::probe().is_ok().then_some(RanksEngine::Gloo));
    let mut lines = Vec::new();
    for engine in engines {
        // All ranks of a machine share its bandwidth: each of four ranks has half of what each of two has.
        let pair = link(engine)?;
        for &ranks in worlds {
            let lone: Vec<Box<dyn Collectives>> =
                (0..ranks).map(|_| Box::new(Single) as Box<dyn Collectives>).collect();
            let (alone, work) = steps(request, &arch, lone)?;
            let (measured, _) = if ranks == 1 { (alone, work) } else { steps(request, &arch, world(engine, ranks)?)? };
            let shared = pair.map(|link| Link { bandwidth: link.bandwidth * 2.0 / ranks.max(2) as f64, ..link });
            let predicted = shared.map_or(alone, |link| {
                let fabric = Fabric { local: ranks as u64, inside: link, between: link, pattern: Pattern::Pairwise };
                // The same cores communicate and compute, so the backward pass hides no communication.
                let work = Work { compute: alone, backward: 0.0, ..work };
                scaling::estimate(Strategy::Ddp, &work, &fabric, ranks as u64).communication + alone
            });
            lines.push(RanksLine {
                engine,
                ranks,
                threads: threads_of(ranks),
                link: shared,
                alone,
                predicted,
                measured,
                tokens_per_second: work.tokens * ranks as f64 / measured,
            });
        }
    }
    Ok(lines)
}

fn threads_of(ranks: usize) -> usize {
    platform::threads(std::thread::available_parallelism().map_or(1, std::num::NonZero::get), ranks)
}

/// Connects a world of `size` ranks.
fn world(engine: RanksEngine, size: usize) -> Result<Vec<Box<dyn Collectives>>> {
    let limits = Limits::default();
    if engine == RanksEngine::Threads {
        return Ok(threads::world(size, limits)
            .into_iter()
            .map(|rank| Box::new(rank) as Box<dyn Collectives>)
            .collect());
    }
    let token = RunToken::fresh()?;
    let host = Host::serve(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), token.clone())?;
    let connect = |rank: usize| {
        let world = World { rank, size, local_rank: rank, local_size: size };
        let endpoint = Endpoint::Launcher(host.address().to_string());
        let launch = Launch { launcher: "bench", world, endpoint, token: Some(token.clone()) };
        Gloo::connect(Rendezvous::join(&launch, Facts::new(), Wait::default())?, limits)
            .map(|rank| Box::new(rank) as Box<dyn Collectives>)
    };
    on_all((0..size).collect(), connect)
}

/// Calls `act` for each item on a thread of its own. Returns the results in order.
fn on_all<T: Send, R: Send>(each: Vec<T>, act: impl Fn(T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let act = &act;
    std::thread::scope(|scope| {
        let running: Vec<_> = each.into_iter().map(|one| scope.spawn(move || act(one))).collect();
        running.into_iter().map(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Latency and bandwidth between two ranks, fitted to the times of two all-gathers.
fn link(engine: RanksEngine) -> Result<Option<Link>> {
    let times = on_all(world(engine, 2)?, |rank| {
        let mut best = [f64::INFINITY; 2];
        for _ in 0..TRIES {
            for (bytes, best) in PROBES.iter().zip(&mut best) {
                let mut data = vec![1u8; *bytes];
                rank.barrier()?;
                let began = Instant::now();
                rank.all_gather(&mut data)?;
                *best = best.min(began.elapsed().as_secs_f64());
            }
        }
        Ok(best)
    })?;
    let slowest = |at: usize| times.iter().map(|best| best[at]).fold(0.0, f64::max);
    Ok(scaling::fit(2, (PROBES[0] as f64, slowest(0)), (PROBES[1] as f64, slowest(1))))
}

/// Runs the same steps on all `ranks` at the same time. Returns the mean seconds of a step on the slowest rank, and the
/// work of one rank in a step.
fn steps(request: &TrainingRequest, arch: &Arch, ranks: Vec<Box<dyn Collectives>>) -> Result<(f64, Work)> {
    let threads = threads_of(ranks.len());
    let split = Split::from_examples(&training::rows(request, arch.vocab_size))?;
    let batches = |step: usize| -> Result<Vec<Batch>> {
        let row = |row| vec![(step * request.batch + row) % split.len()];
        micro_batches::batches(
            &split,
            &vec![(0..request.batch).map(row).collect()],
            request.config.train.max_tokens_per_pass,
        )
    };
    let results = on_all(ranks, |comm| {
        let pool = tunesmith_ops::par::pool(threads)?;
        pool.install(|| {
            let mut model = Model::load(arch, None, &request.config)?;
            let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
            let slots = slots(&model.params.specs);
            let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots, model.params.values());
            let mut sharing = Sharing::copies(&model.params, &optimizer, comm.world());
            let mut step = |batches: &[Batch]| {
                attempt(&mut model, &mut optimizer, &*comm, &mut sharing, batches, 1e-4, 1.0).and_then(Attempt::done)
            };
            step(&batches(0)?)?;
            comm.barrier()?;
            let began = Instant::now();
            let mut tokens = 0;
            for index in 1..=request.steps {
                let own = batches(index)?;
                tokens += own.iter().map(|batch| batch.tokens.len()).sum::<usize>();
                step(&own)?;
            }
            let seconds = began.elapsed().as_secs_f64() / request.steps as f64;
            let gradients = 4.0 * model.params.values().len() as f64;
            let tokens = tokens as f64 / request.steps as f64;
            let bucket = comm.limits().bucket as f64;
            let work = Work {
                compute: seconds,
                backward: 0.0,
                passes: 1,
                gradients,
                weights: 0.0,
                segments: arch.num_hidden_layers as u64 + 2,
                bucket,
                tokens,
            };
            Ok((seconds, work))
        })
    })?;
    let slowest = results.iter().map(|(seconds, _)| *seconds).fold(0.0, f64::max);
    let work = results.first().map(|(_, work)| *work).ok_or_else(|| Error::config("no ranks"))?;
    Ok((slowest, work))
}

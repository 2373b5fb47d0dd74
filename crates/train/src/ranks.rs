//! The ranks of a run and how they start: one process, one of several that a launcher has started (`ddp`), or several
//! threads of one process (`dp`).
use std::time::Duration;

use super::rank_settings::{COMMUNICATION, SIZES};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::words::count;
use tunesmith_comm::env::Launch;
use tunesmith_comm::gloo::{self, Gloo};
#[cfg(feature = "cuda")]
use tunesmith_comm::gpus;
use tunesmith_comm::membership::Facts;
#[cfg(feature = "cuda")]
use tunesmith_comm::nccl::{self, Nccl};
use tunesmith_comm::rendezvous::{LocalMainFirst, Rendezvous, Wait};
use tunesmith_comm::single::Single;
use tunesmith_comm::threads::{self, Threads};
use tunesmith_comm::{Collectives, Limits, World};
use tunesmith_config::Source;
use tunesmith_config::{DeviceChoice, RankBackend, Resolved, Strategy, TrainConfig};
use tunesmith_device::Device;
#[cfg(feature = "cuda")]
use tunesmith_device::gpu;
use tunesmith_plan::platform;
use tunesmith_telemetry::progress::{Event, Observer};

/// A rank before it connects with the others.
pub struct Seat {
    pub world: World,
    /// How the ranks were started, in words.
    pub described: String,
    limits: Limits,
    link: Link,
}

/// How a rank reaches the others: not at all, as a thread of their process, or from a process of its own.
enum Link {
    Alone,
    Thread(Threads),
    Process(Rendezvous, Carrier),
}

/// The communication library between processes.
#[derive(Clone, Copy)]
enum Carrier {
    Gloo,
    /// NCCL, through the GPU with this ordinal.
    #[cfg(feature = "cuda")]
    Nccl(u8),
}

impl Carrier {
    const fn name(self) -> &'static str {
        match self {
            Self::Gloo => "gloo",
            #[cfg(feature = "cuda")]
            Self::Nccl(_) => "nccl",
        }
    }
}

/// The communication library that a rank asks for, before the ranks have met and can decide together.
#[derive(Clone, Copy)]
enum Wish {
    Gloo,
    /// NCCL, if every rank computes on a GPU of its own and has it; else Gloo.
    #[cfg(feature = "cuda")]
    Auto,
    #[cfg(feature = "cuda")]
    Nccl,
}

impl Wish {
    const fn name(self) -> &'static str {
        match self {
            Self::Gloo => "gloo",
            #[cfg(feature = "cuda")]
            Self::Auto => "auto",
            #[cfg(feature = "cuda")]
            Self::Nccl => "nccl",
        }
    }
}

/// The library that `train.ddp_backend` names; with `auto` ranks on GPUs decide together.
///
/// # Errors
/// It cannot be loaded.
fn wish(train: &TrainConfig, device: DeviceChoice) -> Result<Wish> {
    let gloo = || gloo::provide(&|_| ()).map(|_| Wish::Gloo);
    match train.ddp_backend {
        #[cfg(feature = "cuda")]
        RankBackend::Auto if matches!(device, DeviceChoice::Cuda(_)) => Ok(Wish::Auto),
        RankBackend::Auto | RankBackend::Gloo => gloo(),
        #[cfg(feature = "cuda")]
        RankBackend::Nccl => nccl::probe().map(|_| Wish::Nccl),
        #[cfg(not(feature = "cuda"))]
        RankBackend::Nccl => {
            Err(Error::config("train.ddp_backend: nccl, but this program was built without the feature cuda")
                .hint("build it with the default features, or set train.ddp_backend: gloo"))
        }
    }
}

/// Decides between NCCL and Gloo, the same on all ranks, once they have met. `say` gets one line if NCCL was possible and is
/// not used.
///
/// # Errors
/// [`Kind::Config`]: NCCL was asked for, and ranks share a GPU, or Gloo cannot be loaded; [`Kind::Peer`]: a rank is gone.
fn agree(
    wish: Wish,
    meeting: &Rendezvous,
    device: DeviceChoice,
    limits: Limits,
    say: &dyn Fn(&str),
) -> Result<Carrier> {
    #[cfg(not(feature = "cuda"))]
    let _ = (meeting, device, limits, say);
    match wish {
        Wish::Gloo => Ok(Carrier::Gloo),
        #[cfg(feature = "cuda")]
        Wish::Auto | Wish::Nccl => {
            let ordinal = match device {
                DeviceChoice::Cuda(ordinal) => ordinal.unwrap_or(0),
                // Ranks that compute on the CPU send through the GPU with the number of their local rank.
                DeviceChoice::Cpu | DeviceChoice::Auto => u8::try_from(meeting.world.local_rank).unwrap_or(u8::MAX),
            };
            let offer = nccl::probe().and_then(|_| gpu::uuid(ordinal)).map_err(|error| error.message().to_owned());
            match (gpus::agree(meeting, offer, limits.timeout)?, wish) {
                (Ok(()), _) => Ok(Carrier::Nccl(ordinal)),
                (Err(why), Wish::Nccl) => Err(Error::config(format!("train.ddp_backend: nccl, but {why}"))
                    .hint("start one rank a GPU, or set train.ddp_backend: gloo for ranks that share one")),
                (Err(why), _) => {
                    say(&format!("no NCCL between ranks, gradients go through main memory over Gloo: {why}"));
                    gloo::provide(&|_| ()).map(|_| Carrier::Gloo)
                }
            }
        }
    }
}

/// The facts that ranks compare when they join: the version, and the settings that they need to communicate.
/// [`super::rank_consistency`] compares the rest later.
fn facts(resolved: &Resolved) -> Facts {
    let is_shared = |key: &str| COMMUNICATION.contains(&key) || SIZES.contains(&key);
    let words = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let settings = resolved.settings.iter().filter(|setting| is_shared(&setting.key));
    let settings = settings.map(|setting| (setting.key.clone(), words(&setting.value)));
    settings.chain([("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]).collect()
}

/// The ranks of this process: one, or with `dp` one per thread.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the launcher and `train.strategy` contradict each other, or the communication library is
/// missing. [`tunesmith_base::Kind::Peer`]: the other ranks cannot be found.
pub fn seats(resolved: &Resolved, launch: Option<&Launch>, observer: &dyn Observer) -> Result<Vec<Seat>> {
    let train = &resolved.config.train;
    let limits = Limits { timeout: Duration::from_secs_f64(train.ddp_timeout), bucket: train.ddp_bucket_cap_mb << 20 };
    let alone = |described: &str| {
        vec![Seat { world: World::ALONE, described: described.to_owned(), limits, link: Link::Alone }]
    };
    match (train.strategy, launch) {
        (Strategy::Single | Strategy::Dp, Some(launch)) => {
            let Launch { launcher, world, .. } = launch;
            let message =
                format!("train.strategy: {}, but {launcher} has started {}", train.strategy, count(world.size, "rank"));
            Err(Error::config(message).hint("set train.strategy: ddp (or auto), or start one process"))
        }
        (_, Some(launch)) if train.dp_ranks.is_some() => {
            let Launch { launcher, world, .. } = launch;
            let message = format!(
                "train.dp_ranks starts ranks as threads, but {launcher} has started {}",
                count(world.size, "process")
            );
            Err(Error::config(message).hint("remove train.dp_ranks, or start one process"))
        }
        (_, Some(launch)) => {
            let device = resolved.config.model.device;
            let wish = wish(train, device);
            // The other ranks also learn of it and refuse to run.
            let name = wish.as_ref().map_or("none that can be loaded", |wish| wish.name());
            let mut facts = facts(resolved);
            facts.insert("engine".to_owned(), name.to_owned());
            let say = |text: &str| observer.event(&Event::Notice(text));
            let mut wait = Wait { say: &say, ..Wait::default() };
            if *resolved.source("train.ddp_timeout") != Source::Default {
                wait.limit = limits.timeout;
            }
            let meeting = Rendezvous::join(launch, facts, wait);
            // All ranks report what is missing; this rank also reports why.
            let (wish, meeting) = match (wish, meeting) {
                (Err(why), Err(dispute)) => return Err(dispute.with_more(why.message())),
                (wish, meeting) => (wish?, meeting?),
            };
            let say_once = |text: &str| {
                if meeting.world.is_first() {
                    say(text);
                }
            };
            let carrier = agree(wish, &meeting, device, limits, &say_once)?;
            let name = carrier.name();
            let World { size, local_size, .. } = launch.world;
            let strategy = if train.strategy == Strategy::Auto { Strategy::Ddp } else { train.strategy };
            let described = format!(
                "{strategy}: {size} processes over {name}, {local_size} on this machine, started by {}, meeting at {}",
                launch.launcher,
                meeting.store.host()
            );
            Ok(vec![Seat { world: launch.world, described, limits, link: Link::Process(meeting, carrier) }])
        }
        (Strategy::Dp, None) if train.dp_ranks.is_none() => {
            Err(Error::config("train.strategy: dp needs train.dp_ranks")
                .hint("set it to the number of ranks; each is a thread with its share of the cores"))
        }
        (strategy, None) if strategy != Strategy::Single && train.dp_ranks.is_some() => {
            let size = train.dp_ranks.unwrap_or(1);
            let described = format!("{}: {} as threads of one process", train.strategy, count(size, "rank"));
            let seat = |rank: Threads| Seat {
                world: rank.world(),
                described: described.clone(),
                limits,
                link: Link::Thread(rank),
            };
            Ok(threads::world(size, limits).into_iter().map(seat).collect())
        }
        (Strategy::Auto | Strategy::Single, None) => Ok(alone("one process")),
        (strategy, None) => Ok(alone(&format!("{strategy} without a launcher: one process"))),
    }
}

impl Seat {
    /// Threads for the kernels of one rank: `num_threads`, or this rank's share of the machine's cores. `None` if the rank
    /// may use all cores.
    pub fn threads(&self, num_threads: Option<usize>) -> Option<usize> {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let local = self.world.local_size;
        num_threads.or_else(|| (local > 1).then(|| platform::threads(cores(), local)))
    }

    /// How many processes share the memory of this rank's device: of the CPU those of the machine, of a GPU those that compute there.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Device`]: the GPU is not there; [`tunesmith_base::Kind::Peer`]: a rank is gone or late.
    pub fn sharing(&self, device: Device) -> Result<usize> {
        #[cfg(feature = "cuda")]
        if let Link::Process(meeting, _) = &self.link {
            let uuid = match device {
                Device::Cuda(ordinal) => Some(gpu::uuid(ordinal)?),
                Device::Cpu | Device::Meta => None,
            };
            let there = gpus::sharing(meeting, uuid.as_deref(), self.limits.timeout)?;
            return Ok(if uuid.is_some() { there } else { self.world.local_size });
        }
        #[cfg(not(feature = "cuda"))]
        let _ = device;
        // The threads of a process share its budget.
        Ok(if matches!(self.link, Link::Process(..)) { self.world.local_size } else { 1 })
    }

    /// Calls `act` on the first rank of the machine before the other ranks, so that they find its cache.
    ///
    /// # Errors
    /// Those of `act`, or [`tunesmith_base::Kind::Peer`] if the first rank has failed.
    pub fn in_turn<T>(&self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let main_first: &dyn LocalMainFirst = match &self.link {
            Link::Alone => return act(),
            Link::Thread(rank) => rank,
            Link::Process(meeting, _) => meeting,
        };
        if self.world.local_rank > 0 {
            main_first.wait()?;
            return act();
        }
        let done = act()?;
        main_first.release()?;
        Ok(done)
    }

    /// Connects with the other ranks.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank does not connect.
    pub fn connect(self) -> Result<Box<dyn Collectives>> {
        Ok(match self.link {
            Link::Alone => Box::new(Single),
            Link::Thread(rank) => Box::new(rank),
            Link::Process(meeting, Carrier::Gloo) => Box::new(Gloo::connect(meeting, self.limits)?),
            #[cfg(feature = "cuda")]
            Link::Process(meeting, Carrier::Nccl(ordinal)) => Box::new(Nccl::connect(meeting, ordinal, self.limits)?),
        })
    }
}

/// The result of a run of several ranks: the error that caused the others, or the first result.
///
/// # Errors
/// The first error that is not a lost peer, else the first lost peer.
pub fn cause<T>(results: Vec<Result<T>>) -> Result<T> {
    let mut first: Option<Result<T>> = None;
    for result in results {
        match &first {
            None => first = Some(result),
            Some(Err(known)) if known.kind() != Kind::Peer => {}
            Some(Err(_)) if result.is_ok() => {}
            Some(_) if result.is_err() => first = Some(result),
            Some(_) => {}
        }
    }
    first.expect("a run has a rank")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_the_error_that_is_not_a_lost_peer() {
        let peer = || Err(Error::peer("rank 1 has ended"));
        let results: Vec<Result<()>> = vec![peer(), Err(Error::numeric("NaN")), peer()];
        assert_eq!(cause(results).unwrap_err().kind(), Kind::Numeric);
        assert_eq!(cause::<()>(vec![Ok(()), peer()]).unwrap_err().kind(), Kind::Peer);
        assert_eq!(cause(vec![Ok(1), Ok(2)]).unwrap(), 1);
    }
}

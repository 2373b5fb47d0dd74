//! A rank's communicator: calls of NCCL, their time limits, and what happens when a rank is gone.
use std::collections::VecDeque;
use std::error::Error as StdError;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::library::{Code, Comm, Functions, IN_PROGRESS, SUCCESS};
use crate::rendezvous::Rendezvous;
use crate::{LOST, Limits, World};
use tunesmith_base::error::{Error, Result};
use tunesmith_device::cuda::{Event, Memory};
use tunesmith_device::{Queue, gpu};

/// How long to wait for the last bytes of a rank that has ended.
pub(super) const GONE: Duration = Duration::from_secs(2);
/// The key of NCCL's unique id in the store, which every rank may read.
pub(super) const ID: &str = "nccl/id";

/// Why an operation fails.
pub(super) type Why = Box<dyn StdError + Send + Sync>;

/// State that one thread at a time uses.
#[derive(Debug, Default)]
pub(super) struct Handles {
    /// The communicator; `None` before it is connected and after an abort.
    pub comm: Option<Comm>,
    /// The buffer on the GPU for bytes of the host on their way to and from other ranks.
    pub buffer: Option<Memory>,
}

// SAFETY: the communicator belongs to no thread; a Mutex lets one in at a time.
unsafe impl Send for Handles {}

/// An operation that the GPU runs on its own: only the watch waits for it.
#[derive(Debug)]
pub(super) struct Operation {
    pub name: &'static str,
    /// The start of its work, from which the time limit counts.
    pub began: Event,
    pub ended: Event,
}

/// The operations in progress, in order.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    pub operations: VecDeque<Operation>,
    /// Whether the engine is being dropped.
    pub ending: bool,
}

/// A rank of a communicator.
#[derive(Debug)]
pub(super) struct Link {
    pub functions: Functions,
    handles: Mutex<Handles>,
    /// The queue on which all operations run, in the order of the calls.
    pub queue: Queue,
    pub rendezvous: Rendezvous,
    /// This engine's ranks: all ranks of the run, or those of this machine.
    pub world: World,
    pub limits: Limits,
    under_way: Mutex<UnderWay>,
    pub changed: Condvar,
    failure: OnceLock<Error>,
}

impl Link {
    pub(super) fn new(
        functions: Functions,
        ordinal: u8,
        rendezvous: Rendezvous,
        world: World,
        limits: Limits,
    ) -> Result<Self> {
        Ok(Self {
            functions,
            handles: Mutex::default(),
            queue: Queue::new(ordinal)?,
            rendezvous,
            world,
            limits,
            under_way: Mutex::default(),
            changed: Condvar::new(),
            failure: OnceLock::new(),
        })
    }

    pub(super) fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Link::handles`], but `None` if another thread holds them: that thread then watches the communicator itself.
    pub(super) fn idle_handles(&self) -> Option<MutexGuard<'_, Handles>> {
        self.handles.try_lock().ok()
    }

    pub(super) fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets `act` pass one group of calls to NCCL, and waits until NCCL has enqueued their work, not until it is done.
    pub(super) fn ask(
        &self,
        handles: &Handles,
        vigil: &mut Vigil,
        act: impl FnOnce(&Functions, Comm) -> Code,
    ) -> std::result::Result<(), Why> {
        let Some(comm) = handles.comm else {
            return Err(self.failure.get().map_or("the communicator is closed", Error::message).into());
        };
        self.queue.stream().context().bind()?;
        // SAFETY: takes nothing; the group is this thread's, and is ended below on every way.
        unsafe { (self.functions.group_start)() };
        let code = act(&self.functions, comm);
        // SAFETY: takes nothing; ends what this thread has just begun.
        let ended = unsafe { (self.functions.group_end)() };
        let code = if code == SUCCESS || code == IN_PROGRESS { ended } else { code };
        if code != SUCCESS && code != IN_PROGRESS {
            return Err(self.functions.words(code).into());
        }
        while !self.is_settled(comm)? {
            vigil.look(self)?;
        }
        Ok(())
    }

    /// Whether NCCL has finished its work on the host.
    ///
    /// # Errors
    /// What went wrong between the ranks since the communicator was made.
    pub(super) fn is_settled(&self, comm: Comm) -> std::result::Result<bool, Why> {
        let mut state = SUCCESS;
        // SAFETY: a communicator that is not null, and not destroyed while it is in the handles, which the caller holds;
        // writes one int, which outlives the call.
        match (unsafe { (self.functions.async_error)(comm, &raw mut state) }, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, code) | (code, _) => Err(self.functions.words(code).into()),
        }
    }

    /// Aborts the communicator, so that the GPU's unfinished work on it ends. If operations were in progress, what the
    /// GPU computes from them is useless, so from now on waiting for the GPU fails with the error.
    pub(super) fn fail(&self, handles: &mut Handles, operation: &str, waited: Duration, why: Why) -> Error {
        let cause = self.rendezvous.find_failed(operation);
        let (rank, waited) = (self.rendezvous.world.rank, waited.as_secs_f64());
        let error = Error::peer(format!("rank {rank}: {operation}: {cause}, after {waited:.1} s ({why})"))
            .hint(LOST)
            .with_source(why);
        let error = self.failure.get_or_init(|| error).clone();
        let mut under_way = self.under_way();
        if !under_way.operations.is_empty() {
            gpu::break_off(self.queue.ordinal(), error.clone());
        }
        under_way.operations.clear();
        drop(under_way);
        self.changed.notify_all();
        if let Some(comm) = handles.comm.take() {
            // SAFETY: a living communicator; it was taken out of the handles, so that nothing uses it after this.
            unsafe { (self.functions.abort)(comm) };
        }
        error
    }
}

/// Waits with a time limit, and checks for ranks that have ended: NCCL itself does not notice that a process has died
/// on the same machine.
#[derive(Debug)]
pub(super) struct Vigil {
    began: Instant,
    asked: Instant,
    /// Since when a rank is known to be gone.
    left: Option<Instant>,
    pause: Duration,
    longest: Duration,
}

impl Vigil {
    /// Checks less and less often, at last every `longest`.
    pub(super) fn new(longest: Duration) -> Self {
        let now = Instant::now();
        Self { began: now, asked: now, left: None, pause: Duration::from_micros(5), longest }
    }

    pub(super) fn waited(&self) -> Duration {
        self.began.elapsed()
    }

    /// Whether to keep waiting; sleeps a little.
    ///
    /// # Errors
    /// Time is up, or a rank is gone.
    pub(super) fn look(&mut self, link: &Link) -> std::result::Result<(), Why> {
        if self.began.elapsed() > link.limits.timeout {
            return Err(format!("timed out after {:.1?}", link.limits.timeout).into());
        }
        if self.asked.elapsed() > GONE / 4 {
            self.asked = Instant::now();
            let gone = link.rendezvous.store.get(ID).map_err(|error| error.message().to_owned())?.gone;
            let since = self.left.get_or_insert(self.asked);
            if gone.is_empty() {
                self.left = None;
            } else if since.elapsed() > GONE {
                return Err("a peer has ended".into());
            }
        }
        std::thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(self.longest);
        Ok(())
    }
}

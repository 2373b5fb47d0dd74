//! NCCL between processes that have a GPU each. The communicator is non-blocking, so nothing here waits inside NCCL. If a rank is
//! gone or late, the operation is aborted at its timeout, and the error names the rank.
//!
//! In this version values are in main memory; bytes are sent through a buffer on the GPU.
mod gpu;
mod library;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::result::{self as driver, DriverError};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult, CUstream};
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclUniqueId};

use self::gpu::Gpu;
use self::library::{Code, Functions, IN_PROGRESS, SUCCESS};
use super::rendezvous::Rendezvous;
use super::{Collectives, Group, LOST, Limits, World};
use tunesmith_base::error::{Error, Result};

pub use self::library::LIBRARY_VARIABLE;

/// `NCCL_CONFIG_INITIALIZER` of nccl.h: a configuration whose fields are those of 2.18, and no value of its own in them.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
const CONFIG_VERSION: u32 = 21_801;
const UNDEFINED: i32 = i32::MIN;
const BYTES: ncclDataType_t = ncclDataType_t::ncclUint8;
/// How long to wait for the last bytes of a rank that has ended.
const GONE: Duration = Duration::from_secs(2);
/// The key of NCCL's unique id in the store.
const ID: &str = "nccl/id";

/// One rank of a world of processes with a GPU each.
#[derive(Debug)]
pub struct Nccl {
    functions: Functions,
    gpu: Mutex<Gpu>,
    rendezvous: Rendezvous,
    /// All ranks, or those of this machine.
    world: World,
    limits: Limits,
}

/// Whether NCCL and a GPU's driver can be loaded, and NCCL's version.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], with what to install.
pub fn probe() -> Result<String> {
    // SAFETY: loads the driver's library, whose constructors are NVIDIA's, and closes it.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::config("train.ddp_backend: nccl, but there is no NVIDIA driver (libcuda.so.1)")
            .hint("set train.ddp_backend: gloo, which needs no GPU; `tunesmith gpu-info` says what is here"));
    }
    Functions::load().map(|functions| functions.version())
}

impl Nccl {
    /// Connects this rank with every other, through the GPU of its local number.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: NCCL, the driver or this rank's GPU is missing; [`tunesmith_base::Kind::Peer`]: a rank does not come.
    pub fn connect(rendezvous: Rendezvous, limits: Limits) -> Result<Self> {
        let world = rendezvous.world;
        Self::connect_as(rendezvous, world, ID, limits)
    }

    /// As a rank of `world`, whose first rank puts the NCCL id into the store under the key `group`.
    fn connect_as(rendezvous: Rendezvous, world: World, group: &str, limits: Limits) -> Result<Self> {
        probe()?;
        let functions = Functions::load()?;
        let World { rank, size, local_rank, .. } = world;
        let gpu = Gpu::new(local_rank)?;
        let this = Self { functions, gpu: Mutex::new(gpu), rendezvous, world, limits };
        let id = this.unique_id(group)?;
        let mut config = ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        };
        this.operate("connect", |functions, gpu| {
            let mut comm = std::ptr::null_mut();
            // SAFETY: `comm` and `config` outlive the call, which copies the configuration; its `size`, `magic` and
            // `version` say which fields it has. The id is a plain value.
            let code = unsafe { (functions.init)(&raw mut comm, size as i32, id, rank as i32, &raw mut config) };
            gpu.comm = (!comm.is_null()).then_some(comm);
            code
        })?;
        Ok(this)
    }

    /// Rank 0 makes it, the others find it in the store.
    fn unique_id(&self, group: &str) -> Result<ncclUniqueId> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        if self.world.is_first() {
            // SAFETY: writes the 128 bytes of `id`, which outlives the call.
            let code = unsafe { (self.functions.get_unique_id)(&raw mut id) };
            if code != SUCCESS {
                return Err(Error::peer(format!("rank 0: connect: {}", self.functions.words(code)))
                    .hint("set NCCL_DEBUG=WARN to see why"));
            }
            self.rendezvous.store.set(group, &id.internal.map(|letter| letter as u8))?;
        } else {
            let bytes = self.rendezvous.store.wait(group, Some(self.limits.timeout))?;
            let bytes: [u8; 128] = bytes.try_into().map_err(|_| {
                Error::peer("rank 0 gave no NCCL id of 128 bytes")
                    .hint("start all ranks with the same version of tunesmith")
            })?;
            id.internal = bytes.map(|byte| byte as _);
        }
        Ok(id)
    }

    /// Lets `act` hand NCCL its work, then waits until that is done. After a failure nothing is done any more.
    fn operate(&self, operation: &str, act: impl FnOnce(&Functions, &mut Gpu) -> Code) -> Result<()> {
        let began = Instant::now();
        let mut gpu = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        let done = gpu.enter().map_err(Into::into).and_then(|()| {
            let code = act(&self.functions, &mut gpu);
            self.wait(&gpu, code, began)
        });
        done.map_err(|why| {
            if let Some(comm) = gpu.comm.take() {
                // SAFETY: a living communicator; it was taken out of `gpu`, so that nothing uses it after this.
                unsafe { (self.functions.abort)(comm) };
            }
            let waited = began.elapsed().as_secs_f64();
            let cause = self.rendezvous.find_failed(operation);
            let rank = self.rendezvous.world.rank;
            Error::peer(format!("rank {rank}: {operation}: {cause}, after {waited:.1} s ({why})"))
                .hint(LOST)
                .with_source(why)
        })
    }

    /// Waits for NCCL and then for the stream.
    fn wait(
        &self,
        gpu: &Gpu,
        code: Code,
        began: Instant,
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        if code != SUCCESS && code != IN_PROGRESS {
            return Err(self.functions.words(code).into());
        }
        let Some(comm) = gpu.comm else { return Err("NCCL gave no communicator".into()) };
        let (mut pause, mut asked, mut left) = (Duration::from_micros(5), Instant::now(), None);
        loop {
            let mut state = SUCCESS;
            // SAFETY: a communicator that is not null and not destroyed while it is in `gpu`; writes one int, which
            // outlives the call.
            let code = unsafe { (self.functions.async_error)(comm, &raw mut state) };
            match (code, state) {
                (SUCCESS, SUCCESS) => {
                    // SAFETY: the stream lives as long as `gpu`, whose context is this thread's (`operate` entered
                    // it).
                    match unsafe { sys::cuStreamQuery(gpu.stream) } {
                        CUresult::CUDA_SUCCESS => return Ok(()),
                        CUresult::CUDA_ERROR_NOT_READY => {}
                        other => return Err(DriverError(other).into()),
                    }
                }
                (SUCCESS, IN_PROGRESS) => {}
                (SUCCESS, code) | (code, _) => return Err(self.functions.words(code).into()),
            }
            if began.elapsed() > self.limits.timeout {
                return Err(format!("timed out after {:.1?}", self.limits.timeout).into());
            }
            // NCCL itself does not notice a process that has died on the same machine.
            if asked.elapsed() > GONE / 4 {
                asked = Instant::now();
                let gone = self.rendezvous.store.get(ID).map_err(|error| error.message().to_owned())?.gone;
                let since = left.get_or_insert(asked);
                if gone.is_empty() {
                    left = None;
                } else if since.elapsed() > GONE {
                    return Err("a peer has ended".into());
                }
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Fills in the other ranks' parts of `data`: each is broadcast by its rank, all at once.
    fn gather(&self, operation: &str, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        assert_eq!(parts.len(), self.world.size, "a part for each rank");
        assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), data.len(), "parts cover the data");
        let from = data.to_vec();
        self.through_gpu(operation, &from, 0, data, |functions, comm, stream, buffer| {
            let mut worst = SUCCESS;
            for (root, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
                let at = buffer + part.start as u64;
                // SAFETY: `at` is the part's place in the buffer on the GPU, which holds all of `data`, as was
                // asserted; it lives until the stream is waited for. A broadcast may write where it reads. Communicator
                // and stream are those of `gpu`.
                let code = unsafe {
                    (functions.broadcast)(at as *const _, at as *mut _, part.len(), BYTES, root as i32, comm, stream)
                };
                worst = if code == SUCCESS || code == IN_PROGRESS { worst } else { code };
            }
            worst
        })
    }

    /// Copies `from` to the GPU, lets `act` hand NCCL its work on the address of the buffer there, and copies what then lies behind its
    /// first `skip` bytes into `into`.
    fn through_gpu(
        &self,
        operation: &str,
        from: &[u8],
        skip: usize,
        into: &mut [u8],
        act: impl FnOnce(&Functions, ncclComm_t, CUstream, CUdeviceptr) -> Code,
    ) -> Result<()> {
        let room = from.len().max(skip + into.len());
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner).reserve(room)?;
        let mut copied = Ok(());
        self.operate(operation, |functions, gpu| {
            // SAFETY: `reserve` made the buffer at least as large as `from`, on a context that lives. `from` is pageable memory,
            // which the driver has copied when the call returns.
            copied = unsafe { driver::memcpy_htod_async(gpu.buffer, from, gpu.stream) };
            match (gpu.comm, &copied) {
                (Some(comm), Ok(())) => {
                    // SAFETY: takes nothing; the group is this thread's, and is ended below on every way.
                    unsafe { (functions.group_start)() };
                    let code = act(functions, comm, gpu.stream, gpu.buffer);
                    // SAFETY: takes nothing; ends what this thread has just begun.
                    let ended = unsafe { (functions.group_end)() };
                    if code == SUCCESS { ended } else { code }
                }
                _ => SUCCESS,
            }
        })?;
        let gpu = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the context lives as long as `gpu`. `reserve` made the buffer at least `skip + into.len()` bytes
        // large; nothing runs on the stream, and the call returns when the bytes are there.
        let back = copied.and_then(|()| unsafe {
            driver::ctx::set_current(gpu.context)?;
            driver::memcpy_dtoh_sync(into, gpu.buffer + skip as u64)
        });
        back.map_err(|error| {
            let rank = self.rendezvous.world.rank;
            Error::peer(format!("rank {rank}: {operation}: copying between memory and the GPU: {error:?}"))
                .hint("look at the GPU (nvidia-smi), and at the system's log (dmesg)")
        })
    }
}

impl Collectives for Nccl {
    fn world(&self) -> World {
        self.world
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn name(&self) -> &'static str {
        "nccl"
    }

    fn all_to_all_bytes(&self, send: &[u8], parts: &[Range<usize>], receive: &mut [u8]) -> Result<()> {
        let World { rank, size, .. } = self.world;
        let own = parts[rank].len();
        assert!(parts.len() == size && receive.len() == own * size, "a part for each rank");
        assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), send.len(), "parts cover what is sent");
        // What comes back lies behind what is sent.
        self.through_gpu("all_to_all", send, send.len(), receive, |functions, comm, stream, buffer| {
            let mut worst = SUCCESS;
            for (peer, part) in parts.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                let (from, to) = (buffer + part.start as u64, buffer + (send.len() + peer * own) as u64);
                // SAFETY: `from..` is the peer's part of what is sent, `to..` its place behind that: both within the
                // buffer on the GPU, which has room for `send` and `receive`, and apart. It lives until the stream is
                // waited for.
                let codes = unsafe {
                    let sent = match part.len() {
                        0 => SUCCESS,
                        length => (functions.send)(from as *const _, length, BYTES, peer as i32, comm, stream),
                    };
                    let received = match own {
                        0 => SUCCESS,
                        length => (functions.receive)(to as *mut _, length, BYTES, peer as i32, comm, stream),
                    };
                    [sent, received]
                };
                worst = codes.into_iter().find(|&code| code != SUCCESS && code != IN_PROGRESS).unwrap_or(worst);
            }
            worst
        })?;
        receive[rank * own..][..own].copy_from_slice(&send[parts[rank].clone()]);
        Ok(())
    }

    fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        self.gather("all_gather", data, parts)
    }

    fn broadcast_bytes(&self, data: &mut [u8], root: usize) -> Result<()> {
        let size = self.world.size;
        assert!(root < size, "the root is one of the ranks");
        // As a gathering of which everything is the root's.
        let end = |rank: usize| if rank < root { 0 } else { data.len() };
        let parts: Vec<_> = (0..size).map(|rank| if rank == 0 { 0 } else { end(rank - 1) }..end(rank)).collect();
        self.gather("broadcast", data, &parts)
    }

    fn barrier(&self) -> Result<()> {
        let size = self.world.size;
        let parts: Vec<_> = (0..size).map(|rank| rank..rank + 1).collect();
        self.gather("barrier", &mut vec![0; size], &parts)
    }

    fn new_group(&self, group: Group) -> Result<Box<dyn Collectives>> {
        let World { rank, local_rank, .. } = self.rendezvous.world;
        let key = match group {
            Group::All => format!("{ID} of all"),
            Group::Node => format!("{ID} of rank {}", rank - local_rank.min(rank)),
        };
        let world = self.rendezvous.world.within(group);
        Ok(Box::new(Self::connect_as(self.rendezvous.clone(), world, &key, self.limits)?))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let gpu = self.gpu.get_mut().unwrap_or_else(PoisonError::into_inner);
        if gpu.enter().is_err() {
            return;
        }
        if let Some(comm) = gpu.comm.take() {
            let began = Instant::now();
            // SAFETY: the communicator was taken out of `gpu`, and nobody else has `self`: it lives until it is
            // destroyed or aborted here, once. `state` outlives each call.
            unsafe {
                let mut state = (self.functions.finalize)(comm);
                while state == IN_PROGRESS && began.elapsed() < GONE {
                    std::thread::sleep(Duration::from_millis(1));
                    if (self.functions.async_error)(comm, &raw mut state) != SUCCESS {
                        break;
                    }
                }
                if state == SUCCESS {
                    (self.functions.destroy)(comm)
                } else {
                    (self.functions.abort)(comm)
                };
            }
        }
    }
}

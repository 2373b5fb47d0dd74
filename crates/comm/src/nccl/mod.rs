//! NCCL between processes that have a GPU each. The communicator is non-blocking, so nothing here waits inside NCCL. If a rank is
//! gone or late, the operation is aborted, and the error names the rank.
//!
//! Data in the GPU's memory is sent from there ([`OnDevice`]) without waiting (`watch.rs`). Data in main memory goes
//! through a buffer on the GPU, and the caller waits for it.
mod library;
mod link;
mod on_device;
mod watch;

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::library::{BYTES, Code, Comm, Config, Functions, IN_PROGRESS, SUCCESS, UniqueId};
use self::link::{GONE, Handles, ID, Link, Vigil, Why};
use super::on_device::OnDevice;
use super::rendezvous::Rendezvous;
use super::{Collectives, Group, Limits, World};
use tunesmith_base::error::{Error, Result};
use tunesmith_device::cuda::{Context, Memory};

pub use self::library::LIBRARY_VARIABLE;

/// How often to look at most while the caller waits.
const PAUSE: Duration = Duration::from_millis(1);

/// One rank of a world of processes, each with a GPU.
#[derive(Debug)]
pub struct Nccl {
    link: Arc<Link>,
    watch: Option<JoinHandle<()>>,
}

/// Whether NCCL and a GPU's driver can be loaded, and NCCL's version.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], with what to install.
pub fn probe() -> Result<String> {
    Context::count().map_err(|error| {
        Error::config("train.ddp_backend: nccl, but there is no NVIDIA driver (libcuda.so.1)")
            .caused_by(error)
            .hint("set train.ddp_backend: gloo, which needs no GPU; `tunesmith gpu-info` says what is here")
    })?;
    Functions::load().map(|functions| functions.version())
}

/// The result of several calls of NCCL, or the first failure.
fn worst(codes: impl IntoIterator<Item = Code>) -> Code {
    codes.into_iter().find(|&code| code != SUCCESS && code != IN_PROGRESS).unwrap_or(SUCCESS)
}

impl Nccl {
    /// Connects this rank with every other, through the GPU of that number, which no other rank uses.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: NCCL or the driver is missing; [`tunesmith_base::Kind::Device`]: there is no such GPU;
    /// [`tunesmith_base::Kind::Peer`]: a rank does not come.
    pub fn connect(rendezvous: Rendezvous, ordinal: u8, limits: Limits) -> Result<Self> {
        let world = rendezvous.world;
        Self::connect_as(rendezvous, ordinal, world, ID, limits)
    }

    /// Connects as a rank of `world`, whose first rank puts the NCCL id into the store under the key `group`.
    fn connect_as(rendezvous: Rendezvous, ordinal: u8, world: World, group: &str, limits: Limits) -> Result<Self> {
        probe()?;
        let link = Arc::new(Link::new(Functions::load()?, ordinal, rendezvous, world, limits)?);
        let id = unique_id(&link, group)?;
        let mut handles = link.handles();
        let mut vigil = Vigil::new(PAUSE);
        let connected = connect(&link, &mut handles, id, &mut vigil);
        if let Err(why) = connected {
            return Err(link.fail(&mut handles, "connect", vigil.waited(), why));
        }
        drop(handles);
        let watched = Arc::clone(&link);
        let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || watch::watch(&watched));
        let watch = Some(thread.map_err(|error| Error::no_thread(&error))?);
        Ok(Self { link, watch })
    }

    /// Fills in the other ranks' parts of `data`: each is broadcast by its rank, all at once.
    fn gather(&self, operation: &str, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        assert_eq!(parts.len(), self.link.world.size, "a part for each rank");
        assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), data.len(), "parts cover the data");
        let stream = self.link.queue.stream().handle();
        let from = data.to_vec();
        self.through_gpu(operation, &from, 0, data, |functions, comm, buffer| {
            worst(parts.iter().enumerate().filter(|(_, part)| !part.is_empty()).map(|(root, part)| {
                let at = buffer + part.start as u64;
                // SAFETY: `at` is the part's place in the buffer on the GPU, which holds all of `data`, as was
                // asserted; it lives until the stream is waited for. A broadcast may write where it reads.
                unsafe {
                    (functions.broadcast)(at as *const _, at as *mut _, part.len(), BYTES, root as i32, comm, stream)
                }
            }))
        })
    }

    /// Copies `from` to the GPU, lets `act` pass work on the buffer's address there to NCCL, and waits for it. Then
    /// copies the buffer, without its first `skip` bytes, into `into`. After a failure it does nothing any more.
    fn through_gpu(
        &self,
        operation: &str,
        from: &[u8],
        skip: usize,
        into: &mut [u8],
        act: impl FnOnce(&Functions, Comm, u64) -> Code,
    ) -> Result<()> {
        let link = &*self.link;
        let mut handles = link.handles();
        let room = from.len().max(skip + into.len());
        let buffer = reserve(link, &mut handles, room)?;
        let mut vigil = Vigil::new(PAUSE);
        // What the host sends waits for nothing that the GPU computes.
        let done = link.queue.run(|| -> std::result::Result<(), Why> {
            let stream = link.queue.stream();
            if !from.is_empty() {
                // SAFETY: `reserve` made the buffer at least as large as `from`, which is pageable memory: the driver has copied
                // it when the call returns.
                unsafe { stream.copy_to_device(buffer, from.as_ptr(), from.len()) }?;
            }
            link.ask(&handles, &mut vigil, |functions, comm| act(functions, comm, buffer))?;
            let ended = stream.record()?;
            while !ended.done()? {
                if let Some(comm) = handles.comm {
                    link.is_settled(comm)?;
                }
                vigil.look(link)?;
            }
            download(link, buffer + skip as u64, into)
        });
        done.map_err(|why| link.fail(&mut handles, operation, vigil.waited(), why))
    }
}

/// Makes the NCCL communicator, and waits until all ranks have joined it.
fn connect(link: &Link, handles: &mut Handles, id: UniqueId, vigil: &mut Vigil) -> std::result::Result<(), Why> {
    let World { rank, size, .. } = link.world;
    link.queue.stream().context().bind()?;
    let (mut comm, mut config) = (std::ptr::null_mut(), Config::non_blocking());
    // SAFETY: `comm` and `config` outlive the call, which copies the configuration; its `size`, `magic` and `version` say which
    // fields it has. The id is a plain value.
    let code = unsafe { (link.functions.init)(&raw mut comm, size as i32, id, rank as i32, &raw mut config) };
    handles.comm = (!comm.is_null()).then_some(comm);
    if code != SUCCESS && code != IN_PROGRESS {
        return Err(link.functions.words(code).into());
    }
    let Some(comm) = handles.comm else { return Err("NCCL gave no communicator".into()) };
    while !link.is_settled(comm)? {
        vigil.look(link)?;
    }
    Ok(())
}

/// NCCL's unique id for the communicator: rank 0 makes it, the others read it from the store.
fn unique_id(link: &Link, group: &str) -> Result<UniqueId> {
    let mut id = UniqueId([0; 128]);
    if link.world.is_first() {
        // SAFETY: writes the 128 bytes of `id`, which outlives the call.
        let code = unsafe { (link.functions.get_unique_id)(&raw mut id) };
        if code != SUCCESS {
            return Err(Error::peer(format!("rank 0: connect: {}", link.functions.words(code)))
                .hint("set NCCL_DEBUG=WARN to see why"));
        }
        link.rendezvous.store.set(group, &id.0)?;
    } else {
        let bytes = link.rendezvous.store.wait(group, Some(link.limits.timeout))?;
        id.0 = bytes.try_into().map_err(|_| {
            Error::peer("rank 0 gave no NCCL id of 128 bytes")
                .hint("start all ranks with the same version of tunesmith")
        })?;
    }
    Ok(id)
}

/// The address of a buffer on the GPU with at least this number of bytes.
fn reserve(link: &Link, handles: &mut Handles, room: usize) -> Result<u64> {
    if let Some(buffer) = handles.buffer.as_ref().filter(|buffer| buffer.bytes() >= room) {
        return Ok(buffer.address());
    }
    // The old buffer is freed first.
    handles.buffer = None;
    let buffer = Memory::new(link.queue.stream(), room.max(1)).map_err(|error| {
        error.hint("lower train.ddp_bucket_cap_mb, or leave the GPU more room (train.memory_budget)")
    })?;
    Ok(handles.buffer.insert(buffer).address())
}

/// Copies bytes from an address on the GPU.
fn download(link: &Link, at: u64, into: &mut [u8]) -> std::result::Result<(), Why> {
    if into.is_empty() {
        return Ok(());
    }
    let (stream, mut copied) = (link.queue.stream(), vec![0u8; into.len()]);
    // SAFETY: the buffer there is as large as its owner says, and nothing touches the copy until the stream is waited for.
    let done = unsafe { stream.copy_to_host(copied.as_mut_ptr(), at, copied.len()) };
    if let Err(error) = done.and_then(|()| stream.synchronize()) {
        // A GPU that fails may still write there.
        std::mem::forget(copied);
        return Err(error.into());
    }
    into.copy_from_slice(&copied);
    Ok(())
}

impl Collectives for Nccl {
    fn world(&self) -> World {
        self.link.world
    }

    fn limits(&self) -> Limits {
        self.link.limits
    }

    fn name(&self) -> &'static str {
        "nccl"
    }

    fn on_device(&self) -> Option<&dyn OnDevice> {
        Some(self)
    }

    fn all_to_all_bytes(&self, send: &[u8], parts: &[Range<usize>], receive: &mut [u8]) -> Result<()> {
        let World { rank, size, .. } = self.link.world;
        let own = parts[rank].len();
        assert!(parts.len() == size && receive.len() == own * size, "a part for each rank");
        assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), send.len(), "parts cover what is sent");
        let stream = self.link.queue.stream().handle();
        // In the buffer, what is received lies behind what is sent.
        self.through_gpu("all_to_all", send, send.len(), receive, |functions, comm, buffer| {
            worst(parts.iter().enumerate().filter(|(peer, _)| *peer != rank).flat_map(|(peer, part)| {
                let (from, to) = (buffer + part.start as u64, buffer + (send.len() + peer * own) as u64);
                // SAFETY: `from..` is the peer's part of what is sent, `to..` its place behind that: both within the
                // buffer on the GPU, which has room for `send` and `receive`, and apart. It lives until the stream is
                // waited for.
                unsafe {
                    let sent = match part.len() {
                        0 => SUCCESS,
                        length => (functions.send)(from as *const _, length, BYTES, peer as i32, comm, stream),
                    };
                    let received = match own {
                        0 => SUCCESS,
                        length => (functions.receive)(to as *mut _, length, BYTES, peer as i32, comm, stream),
                    };
                    [sent, received]
                }
            }))
        })?;
        receive[rank * own..][..own].copy_from_slice(&send[parts[rank].clone()]);
        Ok(())
    }

    fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        self.gather("all_gather", data, parts)
    }

    fn broadcast_bytes(&self, data: &mut [u8], root: usize) -> Result<()> {
        let size = self.link.world.size;
        assert!(root < size, "the root is one of the ranks");
        // Like an all-gather in which all data belongs to the root.
        let end = |rank: usize| if rank < root { 0 } else { data.len() };
        let parts: Vec<_> = (0..size).map(|rank| if rank == 0 { 0 } else { end(rank - 1) }..end(rank)).collect();
        self.gather("broadcast", data, &parts)
    }

    fn barrier(&self) -> Result<()> {
        let size = self.link.world.size;
        let parts: Vec<_> = (0..size).map(|rank| rank..rank + 1).collect();
        self.gather("barrier", &mut vec![0; size], &parts)
    }

    fn new_group(&self, group: Group) -> Result<Box<dyn Collectives>> {
        let Link { rendezvous, queue, limits, .. } = &*self.link;
        let World { rank, local_rank, .. } = rendezvous.world;
        let key = match group {
            Group::All => format!("{ID} of all"),
            Group::Node => format!("{ID} of rank {}", rank - local_rank.min(rank)),
        };
        let world = rendezvous.world.within(group);
        Ok(Box::new(Self::connect_as(rendezvous.clone(), queue.ordinal(), world, &key, *limits)?))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let link = &*self.link;
        link.under_way().ending = true;
        link.changed.notify_all();
        // The watch waits a little for operations in progress.
        self.watch.take().map(JoinHandle::join);
        let whole = link.under_way().operations.is_empty();
        let mut handles = link.handles();
        let Some(comm) = handles.comm.take() else { return };
        if link.queue.stream().context().bind().is_err() {
            return;
        }
        let began = Instant::now();
        // SAFETY: the communicator was taken out of the handles, and nobody else has `self`: it lives until it is destroyed or
        // aborted here, once. `state` outlives each call.
        unsafe {
            let mut state = if whole { (link.functions.finalize)(comm) } else { IN_PROGRESS };
            while whole && state == IN_PROGRESS && began.elapsed() < GONE {
                std::thread::sleep(Duration::from_millis(1));
                if (link.functions.async_error)(comm, &raw mut state) != SUCCESS {
                    break;
                }
            }
            if state == SUCCESS {
                (link.functions.destroy)(comm)
            } else {
                (link.functions.abort)(comm)
            };
        }
    }
}

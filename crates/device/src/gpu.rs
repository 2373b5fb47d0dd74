//! GPUs in use. Each has one context and one stream, on which everything runs in the order of the calls, except for
//! what a thread enqueues on a [`crate::Queue`].
//!
//! So freed memory may be reused at once, because its next user comes later on the stream. A failure unwinds to the
//! nearest [`memory::guarded`], as a refusal by the budget does. Launches return no `Result`, because a GPU reports
//! most failures later and elsewhere.
//!
//! On a [`crate::CountedGpu`], memory is only counted, and everything else does nothing.
use crate::counted::counts;
use crate::cuda::{Arg, Blas, Context, Event, Function, Grid, Module, Number, PinnedMemory, Product, Source, Stream};
use crate::{Device, cuda, current, memory};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tunesmith_base::error::{Error, Result};

pub use crate::cuda::WORKSPACE;

/// The number of GPUs that a process can use.
const GPUS: usize = 256;

static OPEN: [OnceLock<Gpu>; GPUS] = [const { OnceLock::new() }; GPUS];

/// Held while a GPU is opened, so that two threads open it only once.
static OPENING: Mutex<()> = Mutex::new(());

/// Who uses pinned memory. What one has given back, the other does not get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PinnedFor {
    /// The GPU's copies alone, which run in order: it may be given back while one still reads it. It begins with anything.
    Copies,
    /// The host too: nothing copies from or to it once it is given back. It begins with zeros.
    Host,
}

type IdlePinned = HashMap<(PinnedFor, usize), Vec<PinnedMemory>>;

/// A GPU in use.
struct Gpu {
    context: Arc<Context>,
    stream: Arc<Stream>,
    blas: OnceLock<Blas>,
    kernels: Mutex<Kernels>,
    /// Copies to the host and back, on a second stream.
    side: OnceLock<Arc<Stream>>,
    /// Free pinned memory for reuse, by its user and size.
    pinned: Mutex<IdlePinned>,
    /// Pinned memory of pending uploads, the oldest first.
    staged: Mutex<VecDeque<Staged>>,
}

/// Bytes on the host that the GPU copies by itself when it reaches them.
struct Staged {
    place: PinnedMemory,
    copied: Event,
}

/// Uploads of up to this many bytes are staged in pinned memory. The driver itself stages less; for larger ones, such
/// as loaded weights, the host may wait.
const STAGED: RangeInclusive<usize> = (32 << 10)..=(4 << 20);
/// The limit of staged bytes; beyond it the host waits for the oldest upload.
const STAGED_AT_MOST: usize = 64 << 20;

/// The key of a source: its name, and the type that it is compiled for.
type Key = (&'static str, Option<Number>);

/// Compiled and loaded sources.
#[derive(Default)]
struct Kernels {
    modules: HashMap<Key, Module>,
    functions: HashMap<(Key, &'static str), Function>,
}

/// The alignment of a GPU's memory in bytes. Each request is counted as a multiple of it.
const GRAIN: usize = 512;

/// Opens a GPU, unless it is already open.
///
/// # Errors
/// [`tunesmith_base::Kind::Device`]: no driver, one that is too old, or no such GPU.
pub fn open(ordinal: u8) -> Result<()> {
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if OPEN[usize::from(ordinal)].get().is_none() {
        let context = Context::new(u32::from(ordinal))?;
        supported(&context)?;
        let stream = Stream::new(&context)?;
        let gpu = Gpu {
            context,
            stream,
            blas: OnceLock::new(),
            kernels: Mutex::default(),
            side: OnceLock::new(),
            pinned: Mutex::default(),
            staged: Mutex::default(),
        };
        // The lock makes this the only thread that sets it.
        let _ = OPEN[usize::from(ordinal)].set(gpu);
    }
    Ok(())
}

/// The oldest GPUs that the kernels are written for: Ampere, whose tensor cores multiply bfloat16.
const OLDEST: (u32, u32) = (8, 0);

/// # Errors
/// [`tunesmith_base::Kind::Device`]: the kernels need a newer GPU.
fn supported(context: &Context) -> Result<()> {
    let (major, minor) = context.capability();
    if (major, minor) >= OLDEST {
        return Ok(());
    }
    let (ordinal, name) = (context.ordinal(), context.name());
    Err(Error::device(format!(
        "GPU {ordinal} ({name}) has compute capability {major}.{minor}, and {}.{} is needed",
        OLDEST.0, OLDEST.1
    ))
    .hint("use a GPU of the Ampere generation or newer (A100, RTX 30, …), or set model.device: cpu"))
}

/// The GPU of this number, with its context current on this thread. Opens it if needed.
fn gpu(ordinal: u8) -> &'static Gpu {
    let place = &OPEN[usize::from(ordinal)];
    let gpu = place.get().unwrap_or_else(|| {
        checked(open(ordinal));
        place.get().expect("`open` sets it")
    });
    checked(gpu.context.bind());
    gpu
}

/// Returns the value, or unwinds with the failure to the nearest [`memory::guarded`].
pub(crate) fn checked<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| memory::fail(error))
}

impl Gpu {
    /// The stream of this thread's work: that of the ops, unless the thread has entered a queue.
    fn stream(&self) -> Arc<Stream> {
        current::stream(self.context.ordinal() as u8).unwrap_or_else(|| Arc::clone(&self.stream))
    }

    fn kernels(&self) -> MutexGuard<'_, Kernels> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Matrix products, whose scratch is allocated at their first use.
    fn blas(&self, ordinal: u8) -> Result<&Blas> {
        if let Some(blas) = self.blas.get() {
            return Ok(blas);
        }
        let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        if self.blas.get().is_none() {
            let new = memory::admit(Device::Cuda(ordinal), WORKSPACE, || {
                let new = Blas::new(&self.stream);
                if new.is_ok() {
                    memory::taken(ordinal, WORKSPACE);
                }
                new
            })?;
            // The lock makes this the only thread that sets it.
            let _ = self.blas.set(new);
        }
        Ok(self.blas.get().expect("it was set"))
    }

    /// The second stream, for copies.
    fn side(&self) -> Result<&Arc<Stream>> {
        if self.side.get().is_none() {
            let new = Stream::new(&self.context)?;
            let _ = self.side.set(new);
        }
        Ok(self.side.get().expect("it was set"))
    }

    fn pinned(&self) -> MutexGuard<'_, IdlePinned> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies bytes to the GPU in the stream's order, through pinned memory, so that the host does not wait for the
    /// stream.
    ///
    /// # Safety
    /// There is memory of the GPU for all of `from` at `to`.
    unsafe fn stage(&self, to: u64, from: &[u8]) -> Result<()> {
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        let held: usize = staged.iter().map(|it| it.place.as_slice().len()).sum();
        let mut idle = None;
        for (index, it) in staged.iter().enumerate() {
            if it.place.as_slice().len() >= from.len() && it.copied.done()? {
                idle = Some(index);
                break;
            }
        }
        if let Some(oldest) = staged.front().filter(|_| idle.is_none() && held + from.len() > STAGED_AT_MOST) {
            oldest.copied.synchronize()?;
            staged.pop_front();
        }
        let mut place = match idle.and_then(|index| staged.remove(index)) {
            Some(it) => it.place,
            None => PinnedMemory::new(&self.context, from.len().next_power_of_two())?,
        };
        place.as_mut_slice()[..from.len()].copy_from_slice(from);
        let stream = self.stream();
        // SAFETY: as the caller says; the place is not touched again before the event.
        let copied = unsafe { stream.copy_to_device(to, place.as_slice().as_ptr(), from.len()) };
        match copied.and_then(|()| stream.record()) {
            Ok(copied) => staged.push_back(Staged { place, copied }),
            Err(error) => {
                // A GPU that fails may still read there.
                std::mem::forget(place);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Runs `copy` on the second stream, after all work requested so far. The event is its end.
    fn aside(&self, copy: impl FnOnce(&Stream) -> Result<()>) -> Result<Event> {
        let side = self.side()?;
        side.wait(&self.stream.record()?)?;
        let copied = copy(side).and_then(|()| side.record());
        if copied.is_err() {
            // Its places may be given back from here on.
            let _ = side.synchronize();
        }
        copied
    }

    /// A kernel, compiled at its first use.
    fn function(&self, source: &'static Source, name: &'static str) -> Result<Function> {
        let module = (source.name(), source.number());
        let key = (module, name);
        let mut kernels = self.kernels();
        if let Some(function) = kernels.functions.get(&key) {
            return Ok(function.clone());
        }
        let loaded = match kernels.modules.entry(module) {
            Entry::Occupied(loaded) => loaded.into_mut(),
            Entry::Vacant(place) => place.insert(Module::load(&self.context, source)?),
        };
        let function = match source.number() {
            Some(number) => loaded.function(&format!("{name}_{}", number.name()))?,
            None => loaded.function(name)?,
        };
        kernels.functions.insert(key, function.clone());
        Ok(function)
    }
}

/// Launches a kernel on the GPU's stream. A grid without blocks does nothing.
///
/// The kernels are this program's own. Each states its arguments, and an op must pass exactly these: the same number
/// and types, with room for what the kernel writes.
pub fn launch(ordinal: u8, source: &'static Source, name: &'static str, grid: &Grid, args: &[Arg]) {
    if grid.blocks.contains(&0) || counts(ordinal) {
        return;
    }
    let gpu = gpu(ordinal);
    let function = checked(gpu.function(source, name));
    // SAFETY: the arguments are addresses of memory that lives until the stream has come to its release, which this launch
    // precedes, and numbers; the op passes what the kernel's parameters say.
    checked(unsafe { function.launch(&gpu.stream(), grid, args) });
}

/// Enqueues a matrix product on the GPU's stream. Its operands must have room for its shapes.
///
/// # Panics
/// Within [`crate::Queue::run`]: products share one scratch.
pub fn matmul(ordinal: u8, product: &Product) {
    if !counts(ordinal) {
        assert!(current::stream(ordinal).is_none(), "products are on the stream of the ops");
        let gpu = gpu(ordinal);
        checked(gpu.blas(ordinal).and_then(|blas| blas.product(&gpu.stream, product)));
    }
}

/// Allocates what every run on a GPU needs, so that it is not allocated later: the scratch of products ([`WORKSPACE`]).
///
/// # Errors
/// As [`open`]; no cublasLt; no room.
pub fn prepare(ordinal: u8) -> Result<()> {
    open(ordinal)?;
    memory::guarded(|| gpu(ordinal).blas(ordinal).map(drop))
}

/// Waits until the GPU has finished all its work. Earlier failures surface here.
pub fn synchronize(ordinal: u8) {
    if !counts(ordinal) {
        checked(gpu(ordinal).stream().synchronize());
    }
}

/// A place in the stream, which the GPU reaches when it has finished all work requested before.
pub fn record(ordinal: u8) -> Event {
    checked(gpu(ordinal).stream().record())
}

/// Makes the GPU's later work wait for an event of another stream. If that is impossible, the host waits.
///
/// # Errors
/// Errors of the driver: the GPU is lost.
pub(crate) fn wait(ordinal: u8, event: &Event) -> Result<()> {
    if OPEN[usize::from(ordinal)].get().is_none() {
        return Ok(());
    }
    gpu(ordinal).stream().wait(event).or_else(|_| event.synchronize())
}

/// The context of a GPU.
pub(crate) fn context(ordinal: u8) -> Arc<Context> {
    Arc::clone(&gpu(ordinal).context)
}

/// Its UUID, the same in every process: `GPU-…`, as `nvidia-smi -L` prints it.
///
/// # Errors
/// As [`open`].
pub fn uuid(ordinal: u8) -> Result<String> {
    open(ordinal)?;
    Ok(gpu(ordinal).context.uuid().to_owned())
}

/// From now on, waiting for the GPU fails with this error, because its results lack another rank's part. The first
/// error stays.
pub fn break_off(ordinal: u8, error: Error) {
    context(ordinal).break_off(error);
}

/// Free and total bytes of the GPU's memory, for all programs together.
///
/// # Errors
/// Errors of the driver.
pub fn free_and_total(ordinal: u8) -> Result<(u64, u64)> {
    open(ordinal)?;
    let gpu = gpu(ordinal);
    gpu.context.bind()?;
    gpu.context.memory()
}

/// The GPU's name, as the driver reports it.
///
/// # Errors
/// As [`open`].
pub fn name(ordinal: u8) -> Result<String> {
    open(ordinal)?;
    Ok(gpu(ordinal).context.name().to_owned())
}

/// Everything that affects the last bits of results there: the GPU, its architecture, and the libraries' versions.
///
/// # Errors
/// As [`open`]; a library is missing.
pub fn identity(ordinal: u8) -> Result<String> {
    open(ordinal)?;
    let context = &gpu(ordinal).context;
    let (major, minor) = context.capability();
    let mut words = vec![format!("{} (sm_{major}{minor})", context.name())];
    for report in cuda::library::report() {
        words.push(format!("{} {}", report.name, report.found?.0));
    }
    Ok(words.join(", "))
}

/// Whether its tensor cores multiply FP8: from compute capability 8.9 on, and on a GPU that only counts.
pub fn multiplies_fp8(ordinal: u8) -> bool {
    counts(ordinal) || gpu(ordinal).context.capability() >= (8, 9)
}

/// Returns unused memory to the driver.
pub fn release(ordinal: u8) {
    checked(cuda::release(&gpu(ordinal).stream));
}

/// Owned memory of a GPU, freed in stream order.
#[derive(Debug)]
pub(crate) struct Memory {
    /// None for no bytes, and if they are only counted.
    taken: Option<cuda::Memory>,
    ordinal: u8,
    bytes: usize,
}

impl Memory {
    /// Allocates uninitialized bytes, within the budget.
    pub(crate) fn new(ordinal: u8, bytes: usize) -> Self {
        if bytes == 0 {
            return Self { taken: None, ordinal, bytes };
        }
        let gpu = (!counts(ordinal)).then(|| gpu(ordinal));
        let taken = memory::admit(Device::Cuda(ordinal), held(bytes), || {
            let taken = gpu.map(|gpu| cuda::Memory::new(&gpu.stream(), bytes)).transpose();
            if taken.is_ok() {
                memory::taken(ordinal, held(bytes));
            }
            taken
        });
        Self { taken: checked(taken), ordinal, bytes }
    }

    /// Its address; 0 if it has no bytes or is only counted.
    pub(crate) fn address(&self) -> u64 {
        self.taken.as_ref().map_or(0, cuda::Memory::address)
    }

    pub(crate) const fn ordinal(&self) -> u8 {
        self.ordinal
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        drop(self.taken.take());
        memory::given_back(self.ordinal, held(self.bytes));
    }
}

/// The bytes that a request counts as.
const fn held(bytes: usize) -> usize {
    bytes.next_multiple_of(GRAIN)
}

/// Copies host bytes to an address of the GPU, in the stream's order. `from` may change as soon as this returns.
///
/// # Safety
/// There is memory of the GPU for all of `from` at `to`.
pub(crate) unsafe fn upload(ordinal: u8, to: u64, from: &[u8]) {
    if from.is_empty() || counts(ordinal) {
        return;
    }
    let gpu = gpu(ordinal);
    checked(if STAGED.contains(&from.len()) {
        // SAFETY: as the caller says.
        unsafe { gpu.stage(to, from) }
    } else {
        // SAFETY: as the caller says; the driver stages pageable memory before it returns.
        unsafe { gpu.stream().copy_to_device(to, from.as_ptr(), from.len()) }
    });
}

/// Waits for the stream and copies bytes of the GPU to the host.
///
/// # Safety
/// There is memory of the GPU for all of `to` at `from`.
pub(crate) unsafe fn download(ordinal: u8, from: u64, to: &mut [u8]) {
    if counts(ordinal) {
        to.fill(0);
    } else if !to.is_empty() {
        let stream = gpu(ordinal).stream();
        let mut copied = vec![0u8; to.len()];
        // SAFETY: as the caller says; nothing touches the copy until the stream is synchronised.
        let done = unsafe { stream.copy_to_host(copied.as_mut_ptr(), from, copied.len()) };
        if let Err(error) = done.and_then(|()| stream.synchronize()) {
            // A GPU that fails may still write there.
            std::mem::forget(copied);
            memory::fail(error);
        }
        to.copy_from_slice(&copied);
    }
}

/// Copies bytes within the GPU, in the stream's order.
///
/// # Safety
/// There is memory of the GPU for so many bytes at both, which do not overlap.
pub(crate) unsafe fn copy(ordinal: u8, to: u64, from: u64, bytes: usize) {
    if bytes > 0 && !counts(ordinal) {
        // SAFETY: as the caller says.
        checked(unsafe { gpu(ordinal).stream().copy_on_device(to, from, bytes) });
    }
}

/// Sets bytes of the GPU to zero, in the stream's order.
///
/// # Safety
/// There is memory of the GPU for so many bytes at `at`.
pub(crate) unsafe fn zero(ordinal: u8, at: u64, bytes: usize) {
    if bytes > 0 && !counts(ordinal) {
        // SAFETY: as the caller says.
        checked(unsafe { gpu(ordinal).stream().fill(at, 0, bytes) });
    }
}

/// Pinned memory of this number of bytes, for copies of a GPU's; none if they are only counted.
pub(crate) fn pinned(ordinal: u8, bytes: usize, user: PinnedFor) -> Option<PinnedMemory> {
    let place = (!counts(ordinal)).then(|| {
        let gpu = gpu(ordinal);
        let idle = gpu.pinned().get_mut(&(user, bytes)).and_then(Vec::pop);
        let Some(mut used) = idle else { return checked(PinnedMemory::new(&gpu.context, bytes)) };
        if user == PinnedFor::Host {
            used.as_mut_slice().fill(0);
        }
        used
    });
    memory::put_on_host(ordinal, bytes);
    place
}

/// Takes memory of [`pinned`] back for reuse by the same kind of user.
pub(crate) fn unpin(ordinal: u8, place: Option<PinnedMemory>, bytes: usize, user: PinnedFor) {
    memory::taken_from_host(ordinal, bytes);
    if let (Some(place), Some(gpu)) = (place, OPEN[usize::from(ordinal)].get()) {
        gpu.pinned().entry((user, bytes)).or_default().push(place);
    }
}

/// Copies bytes of the GPU to the host while the GPU computes, after all work requested so far. The event is the end of
/// the copy.
///
/// # Safety
/// There is memory of the GPU for as many bytes at `from` as `to` has, which are pinned; nothing changes the first or reads the
/// second before the event.
pub(crate) unsafe fn copy_out(ordinal: u8, to: &mut [u8], from: u64) -> Event {
    let (to, bytes) = (to.as_mut_ptr(), to.len());
    // SAFETY: as the caller says.
    checked(gpu(ordinal).aside(|side| unsafe { side.copy_to_host(to, from, bytes) }))
}

/// Copies bytes of the host to the GPU; the reverse of [`copy_out`].
///
/// # Safety
/// There is memory of the GPU for as many bytes at `to` as `from` has, which are pinned; nothing uses the first or changes the second
/// before the event.
pub(crate) unsafe fn copy_in(ordinal: u8, to: u64, from: &[u8]) -> Event {
    let (from, bytes) = (from.as_ptr(), from.len());
    // SAFETY: as the caller says.
    checked(gpu(ordinal).aside(|side| unsafe { side.copy_to_device(to, from, bytes) }))
}

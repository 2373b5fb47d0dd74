//! GPUs in use: each has one context and one stream, on which everything runs in the order in which it was asked for, but for
//! what a thread puts on a [`crate::Queue`] of its own.
//!
//! So memory that is freed may be taken again at once: what comes later on the stream runs later. What fails unwinds to the
//! nearest [`memory::guarded`], as a budget's refusal does: between a launch and its failure stands no `Result`, because a GPU
//! reports most failures later and elsewhere.
use crate::cuda::{Arg, Blas, Context, Event, Function, Grid, Module, Product, Source, Stream};
use crate::{Device, cuda, current, memory};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tunesmith_base::error::{Error, Result};

/// How many GPUs a process can number.
const GPUS: usize = 256;

static OPEN: [OnceLock<Gpu>; GPUS] = [const { OnceLock::new() }; GPUS];

/// Held while a GPU is opened: two threads that ask at once open it once.
static OPENING: Mutex<()> = Mutex::new(());

/// A GPU in use.
struct Gpu {
    context: Arc<Context>,
    stream: Arc<Stream>,
    blas: OnceLock<Blas>,
    kernels: Mutex<Kernels>,
}

/// What was compiled and loaded.
#[derive(Default)]
struct Kernels {
    modules: HashMap<&'static str, Module>,
    functions: HashMap<(&'static str, &'static str), Function>,
}

/// Takes a GPU into use, if it is not yet.
///
/// # Errors
/// [`tunesmith_base::Kind::Device`]: no driver, one that is too old, or no such GPU.
pub fn open(ordinal: u8) -> Result<()> {
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if OPEN[usize::from(ordinal)].get().is_none() {
        let context = Context::new(u32::from(ordinal))?;
        let stream = Stream::new(&context)?;
        let gpu = Gpu { context, stream, blas: OnceLock::new(), kernels: Mutex::default() };
        // The lock makes this the only thread that sets it.
        let _ = OPEN[usize::from(ordinal)].set(gpu);
    }
    Ok(())
}

/// The GPU of that number, with its context current on this thread; opened if it is not yet.
fn gpu(ordinal: u8) -> &'static Gpu {
    let place = &OPEN[usize::from(ordinal)];
    let gpu = place.get().unwrap_or_else(|| {
        checked(open(ordinal));
        place.get().expect("`open` sets it")
    });
    checked(gpu.context.bind());
    gpu
}

/// The value, or the failure to the nearest [`memory::guarded`].
fn checked<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| memory::fail(error))
}

impl Gpu {
    /// The stream of this thread's work: the one of the ops, unless the thread has entered a queue.
    fn stream(&self) -> Arc<Stream> {
        current::stream(self.context.ordinal() as u8).unwrap_or_else(|| Arc::clone(&self.stream))
    }

    fn kernels(&self) -> MutexGuard<'_, Kernels> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A kernel, compiled at its first use.
    fn function(&self, source: &'static Source, name: &'static str) -> Result<Function> {
        let key = (source.name(), name);
        let mut kernels = self.kernels();
        if let Some(function) = kernels.functions.get(&key) {
            return Ok(function.clone());
        }
        if !kernels.modules.contains_key(source.name()) {
            let module = Module::load(&self.context, source)?;
            kernels.modules.insert(source.name(), module);
        }
        let function = kernels.modules[source.name()].function(name)?;
        kernels.functions.insert(key, function.clone());
        Ok(function)
    }
}

/// Puts a kernel on the GPU's stream. A grid without blocks does nothing.
///
/// The kernels are this program's own. Each states what its arguments must be, and an op passes them so: as many, of those types,
/// with room for what the kernel writes.
pub fn launch(ordinal: u8, source: &'static Source, name: &'static str, grid: &Grid, args: &[Arg]) {
    if grid.blocks.contains(&0) {
        return;
    }
    let gpu = gpu(ordinal);
    let function = checked(gpu.function(source, name));
    // SAFETY: the arguments are addresses of memory that lives until the stream has come to its release, which this launch
    // precedes, and numbers; the op passes what the kernel's parameters say.
    checked(unsafe { function.launch(&gpu.stream(), grid, args) });
}

/// Puts a product of matrices on the GPU's stream. Its operands have room for the shapes it names.
///
/// # Panics
/// Within [`crate::Queue::run`]: products share one scratch.
pub fn matmul(ordinal: u8, product: &Product) {
    let gpu = gpu(ordinal);
    assert!(current::stream(ordinal).is_none(), "products are on the stream of the ops");
    let blas = gpu.blas.get().unwrap_or_else(|| {
        let new = checked(Blas::new(&gpu.stream));
        gpu.blas.get_or_init(|| new)
    });
    checked(blas.product(&gpu.stream, product));
}

/// Waits until the GPU has done all that it was given; what failed meanwhile fails here.
pub fn synchronize(ordinal: u8) {
    checked(gpu(ordinal).stream().synchronize());
}

/// A place in the stream: it is reached when the GPU has done all that it was given before.
pub fn record(ordinal: u8) -> Event {
    checked(gpu(ordinal).stream().record())
}

/// Lets what the GPU is given from now on wait for an event of another queue.
pub(crate) fn wait(ordinal: u8, event: &Event) {
    checked(gpu(ordinal).stream().wait(event));
}

/// The context of a GPU.
pub(crate) fn context(ordinal: u8) -> Arc<Context> {
    Arc::clone(&gpu(ordinal).context)
}

/// What it is known by in every process: `GPU-…`, as `nvidia-smi -L` prints it.
///
/// # Errors
/// As [`open`].
pub fn uuid(ordinal: u8) -> Result<String> {
    open(ordinal)?;
    Ok(gpu(ordinal).context.uuid().to_owned())
}

/// From now on whoever waits for the GPU gets this error: what it has computed is of no use, because another rank's part is
/// missing in it. The first error stays.
pub fn break_off(ordinal: u8, error: Error) {
    context(ordinal).break_off(error);
}

/// Bytes of the GPU's memory that are free, and that there are, for all programs together.
///
/// # Errors
/// The driver's.
pub fn free_and_total(ordinal: u8) -> Result<(u64, u64)> {
    open(ordinal)?;
    let gpu = gpu(ordinal);
    gpu.context.bind()?;
    gpu.context.memory()
}

/// The GPU's name, as its driver says it.
///
/// # Errors
/// As [`open`].
pub fn name(ordinal: u8) -> Result<String> {
    open(ordinal)?;
    Ok(gpu(ordinal).context.name().to_owned())
}

/// What computes there, as far as it decides last bits: the GPU, its architecture, and the libraries' versions.
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

/// Gives memory that nothing uses back to the driver.
pub fn release(ordinal: u8) {
    checked(cuda::release(&gpu(ordinal).stream));
}

/// Owned memory of a GPU, freed on its stream: after all that was asked for before.
#[derive(Debug)]
pub(crate) struct Memory {
    /// None for no bytes.
    taken: Option<cuda::Memory>,
    ordinal: u8,
    bytes: usize,
}

impl Memory {
    /// Undefined bytes, where the budget has room for them.
    pub(crate) fn new(ordinal: u8, bytes: usize) -> Self {
        if bytes == 0 {
            return Self { taken: None, ordinal, bytes };
        }
        let gpu = gpu(ordinal);
        let taken = memory::admit(Device::Cuda(ordinal), bytes, || {
            let taken = cuda::Memory::new(&gpu.stream(), bytes);
            if taken.is_ok() {
                memory::taken(ordinal, bytes);
            }
            taken
        });
        Self { taken: Some(checked(taken)), ordinal, bytes }
    }

    /// Where it begins; 0 if it has no bytes.
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
        if let Some(taken) = self.taken.take() {
            drop(taken);
            memory::given_back(self.ordinal, self.bytes);
        }
    }
}

/// Copies host bytes to an address of the GPU, in the stream's order. `from` may change as soon as this returns.
///
/// # Safety
/// There is memory of the GPU for all of `from` at `to`.
pub(crate) unsafe fn upload(ordinal: u8, to: u64, from: &[u8]) {
    if !from.is_empty() {
        // SAFETY: as the caller says; the driver stages pageable memory before it returns.
        checked(unsafe { gpu(ordinal).stream().copy_to_device(to, from.as_ptr(), from.len()) });
    }
}

/// Waits for the stream and copies bytes of the GPU to the host.
///
/// # Safety
/// There is memory of the GPU for all of `to` at `from`.
pub(crate) unsafe fn download(ordinal: u8, from: u64, to: &mut [u8]) {
    if !to.is_empty() {
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
    if bytes > 0 {
        // SAFETY: as the caller says.
        checked(unsafe { gpu(ordinal).stream().copy_on_device(to, from, bytes) });
    }
}

/// Sets bytes of the GPU to zero, in the stream's order.
///
/// # Safety
/// There is memory of the GPU for so many bytes at `at`.
pub(crate) unsafe fn zero(ordinal: u8, at: u64, bytes: usize) {
    if bytes > 0 {
        // SAFETY: as the caller says.
        checked(unsafe { gpu(ordinal).stream().fill(at, 0, bytes) });
    }
}

//! GPU memory, allocated and freed in stream order, and pinned host memory, which a GPU can access.
use super::context::Context;
use super::library::driver;
use super::stream::Stream;
use std::ffi::c_void;
use std::sync::Arc;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::memory::human_bytes;

/// Bytes of a GPU's memory, for use by later work on the stream.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: usize,
    stream: Arc<Stream>,
}

impl Memory {
    /// Allocates uninitialized bytes from the GPU's default pool. The pool keeps freed memory until [`release`].
    ///
    /// # Errors
    /// [`Kind::Memory`]: the GPU has no more. Others of the driver.
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<Self> {
        let context = stream.context();
        context.bind()?;
        let driver = driver()?;
        let mut address = 0;
        // SAFETY: it writes one address; the stream is alive.
        let code = unsafe { (driver.allocate)(&raw mut address, bytes, stream.handle()) };
        driver.check("cuMemAllocAsync", code).map_err(|error| match error.kind() {
            Kind::Memory => {
                let free = context.memory().map_or(0, |(free, _)| free);
                Error::memory(format!(
                    "GPU {} has no {} more: {} are free",
                    context.ordinal(),
                    human_bytes(bytes as u64),
                    human_bytes(free)
                ))
                .hint("use less memory (docs/auto-batch.md), or end other programs on this GPU")
            }
            _ => error,
        })?;
        Ok(Self { address, bytes, stream: Arc::clone(stream) })
    }

    /// Its address in the GPU's memory.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Ok(driver), Ok(())) = (driver(), self.stream.context().bind()) {
            // SAFETY: nothing else has the address; what uses it stands before this on the stream.
            unsafe { (driver.free)(self.address, self.stream.handle()) };
        }
    }
}

/// Waits for the stream, then returns the pool's unused memory to the system.
///
/// # Errors
/// Errors of the driver.
pub fn release(stream: &Stream) -> Result<()> {
    stream.synchronize()?;
    let pool = stream.context().default_pool()?;
    let driver = driver()?;
    // SAFETY: the pool is the driver's own.
    driver.check("cuMemPoolTrimTo", unsafe { (driver.trim_pool)(pool, 0) })
}

/// Pinned bytes of the host's memory, which a GPU copies from and to by itself.
#[derive(Debug)]
pub struct PinnedMemory {
    start: *mut u8,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: it owns its bytes, which belong to no thread.
unsafe impl Send for PinnedMemory {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates this number of zeros.
    ///
    /// # Errors
    /// [`Kind::Memory`]: the system gives no more such memory.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        let driver = driver()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: it writes one address.
        driver.check("cuMemHostAlloc", unsafe { (driver.allocate_host)(&raw mut start, bytes.max(1), 0) })?;
        // SAFETY: the driver gave so many bytes there.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { start: start.cast(), bytes, context: Arc::clone(context) })
    }

    /// All bytes, to read.
    pub const fn as_slice(&self) -> &[u8] {
        // SAFETY: so many bytes, initialised by `new`, are there as long as this lives.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// All bytes, to write.
    pub const fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; the borrow for writing makes this the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let (Ok(driver), Ok(())) = (driver(), self.context.bind()) {
            // SAFETY: nothing else has the address.
            unsafe { (driver.free_host)(self.start.cast()) };
        }
    }
}

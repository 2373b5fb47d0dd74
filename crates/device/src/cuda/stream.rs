//! Streams, events, and copies on a stream.
use super::context::Context;
use super::library::{Handle, driver};
use std::sync::Arc;
use tunesmith_base::error::Result;

/// A queue of work for one GPU, which runs in order.
#[derive(Debug)]
pub struct Stream {
    handle: Handle,
    context: Arc<Context>,
}

// SAFETY: the driver's streams may be used by any thread whose context is theirs.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks them itself.
unsafe impl Sync for Stream {}

/// `CU_STREAM_NON_BLOCKING`: it does not wait for the stream that programs share by default.
const NON_BLOCKING: u32 = 1;

impl Stream {
    /// An empty stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        context.bind()?;
        let driver = driver()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: it writes one handle.
        driver.check("cuStreamCreate", unsafe { (driver.create_stream)(&raw mut handle, NON_BLOCKING) })?;
        Ok(Arc::new(Self { handle, context: Arc::clone(context) }))
    }

    /// The driver's handle, `CUstream`, for libraries that enqueue work on it. It is valid as long as this lives.
    pub const fn handle(&self) -> *mut std::ffi::c_void {
        self.handle
    }

    /// The context of the GPU that the stream belongs to.
    pub const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits until all work enqueued so far is done.
    ///
    /// # Errors
    /// Errors of the driver, and of the work: a GPU reports them late.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        let driver = driver()?;
        // SAFETY: the stream is alive.
        driver.check("cuStreamSynchronize", unsafe { (driver.synchronize)(self.handle) })?;
        self.context.unbroken()
    }

    /// Makes later work wait for an event of any stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.context.bind()?;
        let driver = driver()?;
        // SAFETY: both are alive; the driver keeps the event's state for the wait.
        driver.check("cuStreamWaitEvent", unsafe { (driver.wait_event)(self.handle, event.handle, 0) })
    }

    /// Records an event that happens when all work enqueued so far is done.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn record(&self) -> Result<Event> {
        self.context.bind()?;
        let driver = driver()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: it writes one handle; flag 0 keeps times.
        driver.check("cuEventCreate", unsafe { (driver.create_event)(&raw mut handle, 0) })?;
        let event = Event { handle, context: Arc::clone(&self.context) };
        // SAFETY: both are alive.
        driver.check("cuEventRecord", unsafe { (driver.record_event)(handle, self.handle) })?;
        Ok(event)
    }

    /// Copies bytes of the host. Pageable memory is staged before this returns; pinned memory is read later.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// There are so many bytes at `from`, and so many of the GPU's memory at `to`.
    pub unsafe fn copy_to_device(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        self.context.bind()?;
        let driver = driver()?;
        // SAFETY: as the caller says.
        driver.check("cuMemcpyHtoDAsync", unsafe { (driver.to_device)(to, from.cast(), bytes, self.handle) })
    }

    /// Copies bytes to the host; they are there after [`Stream::synchronize`].
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// There are so many bytes of the GPU's memory at `from`, and so many at `to`, which nothing touches until then.
    pub unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        self.context.bind()?;
        let driver = driver()?;
        // SAFETY: as the caller says.
        driver.check("cuMemcpyDtoHAsync", unsafe { (driver.to_host)(to.cast(), from, bytes, self.handle) })
    }

    /// Copies bytes within the GPU.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// There are so many bytes of the GPU's memory at both, which do not overlap.
    pub unsafe fn copy_on_device(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.context.bind()?;
        let driver = driver()?;
        // SAFETY: as the caller says.
        driver.check("cuMemcpyDtoDAsync", unsafe { (driver.on_device)(to, from, bytes, self.handle) })
    }

    /// Sets `bytes` bytes of the GPU's memory to `byte`.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// There are so many bytes of the GPU's memory at `at`.
    pub unsafe fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<()> {
        self.context.bind()?;
        let driver = driver()?;
        // SAFETY: as the caller says.
        driver.check("cuMemsetD8Async", unsafe { (driver.fill)(at, byte, bytes, self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let (Ok(driver), Ok(())) = (driver(), self.context.bind()) {
            // SAFETY: nothing else has the handle; the driver ends its work first.
            unsafe { (driver.destroy_stream)(self.handle) };
        }
    }
}

/// A point on a stream, which happens when the stream's work reaches it.
#[derive(Debug)]
pub struct Event {
    handle: Handle,
    context: Arc<Context>,
}

// SAFETY: the driver's events may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks them itself.
unsafe impl Sync for Event {}

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: i32 = 600;

impl Event {
    /// Whether it has happened.
    ///
    /// # Errors
    /// Errors of the driver, and of the work before it.
    pub fn done(&self) -> Result<bool> {
        self.context.bind()?;
        let driver = driver()?;
        // SAFETY: the event is alive.
        match unsafe { (driver.query_event)(self.handle) } {
            NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).and_then(|()| self.context.unbroken()).map(|()| true),
        }
    }

    /// Waits for it.
    ///
    /// # Errors
    /// As [`Event::done`].
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        let driver = driver()?;
        // SAFETY: the event is alive.
        driver.check("cuEventSynchronize", unsafe { (driver.synchronize_event)(self.handle) })?;
        self.context.unbroken()
    }

    /// Milliseconds from `start` to this one; both have happened.
    ///
    /// # Errors
    /// Errors of the driver: one has not happened.
    pub fn milliseconds_since(&self, start: &Self) -> Result<f32> {
        self.context.bind()?;
        let driver = driver()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are alive; it writes one number.
        let code = unsafe { (driver.elapsed)(&raw mut milliseconds, start.handle, self.handle) };
        driver.check("cuEventElapsedTime", code).map(|()| milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let (Ok(driver), Ok(())) = (driver(), self.context.bind()) {
            // SAFETY: nothing else has the handle; the driver frees it when it has happened.
            unsafe { (driver.destroy_event)(self.handle) };
        }
    }
}

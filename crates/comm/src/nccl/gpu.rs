//! The GPU of a rank as NCCL uses it: context, stream, and a buffer for bytes on their way between main memory and the
//! other ranks.
use cudarc::driver::result::{self as driver, DriverError};
use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUstream};
use cudarc::nccl::sys::ncclComm_t;

use tunesmith_base::error::{Error, Result};

/// The handles of a rank, used by one thread at a time. Dropping them gives buffer, stream and context back; the
/// communicator must be finalized or aborted before.
#[derive(Debug)]
pub(super) struct Gpu {
    /// The NCCL communicator; `None` after an abort.
    pub comm: Option<ncclComm_t>,
    device: CUdevice,
    pub context: CUcontext,
    pub stream: CUstream,
    pub buffer: CUdeviceptr,
    /// Size of the buffer in bytes.
    room: usize,
}

// SAFETY: the handles belong to no thread; a Mutex lets one in at a time, and each sets the context before it does
// anything.
unsafe impl Send for Gpu {}

/// What the driver says, as an error of the configuration: the GPU is not what was asked for.
fn of_driver(what: &str) -> impl Fn(DriverError) -> Error {
    move |error| Error::config(format!("train.ddp_backend: nccl: {what}")).caused_by(error)
}

impl Gpu {
    /// Opens the GPU with this number.
    pub fn new(ordinal: usize) -> Result<Self> {
        driver::init().map_err(of_driver("starting the driver"))?;
        let count = driver::device::get_count().map_err(of_driver("counting GPUs"))?;
        if ordinal as i64 >= i64::from(count) {
            let message = format!("train.ddp_backend: nccl: local rank {ordinal} has no GPU of its own: {count} here");
            return Err(Error::config(message)
                .hint("start one rank a GPU, or set train.ddp_backend: gloo for ranks that share one"));
        }
        let device = driver::device::get(ordinal as i32).map_err(of_driver("opening the GPU"))?;
        // SAFETY: the driver just gave the device; the context is released once, when this value is dropped.
        let context = unsafe { driver::primary_ctx::retain(device) }.map_err(of_driver("opening the GPU"))?;
        let mut gpu = Self { comm: None, device, context, stream: std::ptr::null_mut(), buffer: 0, room: 0 };
        // SAFETY: the context was just retained, so that it lives.
        unsafe { driver::ctx::set_current(context) }.map_err(of_driver("opening the GPU"))?;
        gpu.stream =
            driver::stream::create(driver::stream::StreamKind::NonBlocking).map_err(of_driver("making a stream"))?;
        Ok(gpu)
    }

    /// Makes the GPU this thread's.
    pub fn enter(&self) -> std::result::Result<(), DriverError> {
        // SAFETY: the context is retained as long as this value lives; to make it a thread's own touches no memory of
        // this program.
        unsafe { driver::ctx::set_current(self.context) }
    }

    /// Makes the buffer at least so large.
    pub fn reserve(&mut self, room: usize) -> Result<()> {
        if room <= self.room {
            return Ok(());
        }
        let no_room = |error: DriverError| {
            Error::memory(format!("{room} bytes of GPU memory for what travels between ranks"))
                .caused_by(error)
                .hint("lower train.ddp_bucket_cap_mb")
        };
        // SAFETY: the context lives as long as this value. Nothing runs on the stream, so that nothing uses the old
        // buffer; it is freed once, for `room` says that there is none before the call that could fail.
        unsafe {
            driver::ctx::set_current(self.context).map_err(no_room)?;
            if self.room > 0 {
                self.room = 0;
                driver::free_sync(self.buffer).map_err(no_room)?;
            }
            self.buffer = driver::malloc_sync(room).map_err(no_room)?;
        }
        self.room = room;
        Ok(())
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        // SAFETY: buffer, stream and context are this value's own, whose context is this thread's; each is given back
        // once. Nothing runs on the stream any more: the communicator is finalized or aborted.
        unsafe {
            if self.room > 0 {
                let _ = driver::free_sync(self.buffer);
            }
            if !self.stream.is_null() {
                let _ = driver::stream::destroy(self.stream);
            }
            let _ = driver::primary_ctx::release(self.device);
        }
    }
}

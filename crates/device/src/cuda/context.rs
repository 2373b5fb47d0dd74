//! A GPU's primary context.
use super::library::{Driver, Handle, driver};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};
use tunesmith_base::error::{Error, Result};

/// A GPU's primary context, which all libraries in this process share. It is held until the process ends.
#[derive(Debug)]
pub struct Context {
    handle: Handle,
    device: c_int,
    ordinal: u32,
    name: String,
    uuid: String,
    capability: (u32, u32),
    multiprocessors: u32,
    shared_memory: u32,
    broken: OnceLock<Error>,
}

// SAFETY: the driver's contexts may be used by any thread that makes them current.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks them itself.
unsafe impl Sync for Context {}

thread_local! {
    /// The context that is current on this thread.
    static CURRENT: Cell<Handle> = const { Cell::new(std::ptr::null_mut()) };
}

impl Context {
    /// How many GPUs the driver shows to this process.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Device`]: no driver, or one that is too old.
    pub fn count() -> Result<u32> {
        let driver = driver()?;
        let mut count = 0;
        // SAFETY: it writes one number.
        driver.check("cuDeviceGetCount", unsafe { (driver.device_count)(&raw mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// The context of the GPU of that number, current on this thread.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Device`]: no driver, no such GPU, or the driver does not give it.
    pub fn new(ordinal: u32) -> Result<Arc<Self>> {
        let driver = driver()?;
        let count = Self::count()?;
        if ordinal >= count {
            let there = match count {
                0 => "the driver shows none".to_owned(),
                1 => "the driver shows one, number 0".to_owned(),
                _ => format!("the driver shows {count}, numbers 0 to {}", count - 1),
            };
            return Err(Error::device(format!("there is no GPU {ordinal}: {there}"))
                .hint("choose another with model.device, or look at CUDA_VISIBLE_DEVICES"));
        }
        let mut device = 0;
        // SAFETY: it writes one number; the GPU exists.
        driver.check("cuDeviceGet", unsafe { (driver.device)(&raw mut device, ordinal as c_int) })?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: it writes one handle; the device is the driver's.
        driver.check("cuDevicePrimaryCtxRetain", unsafe { (driver.retain_context)(&raw mut handle, device) })?;
        let attribute = |which: c_int| -> Result<u32> {
            let mut value = 0;
            // SAFETY: it writes one number.
            let code = unsafe { (driver.device_attribute)(&raw mut value, which, device) };
            driver.check("cuDeviceGetAttribute", code)?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        // CU_DEVICE_ATTRIBUTE_: COMPUTE_CAPABILITY_MAJOR and MINOR, MULTIPROCESSOR_COUNT, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        let [major, minor, multiprocessors, shared_memory] = [75, 76, 16, 97].map(attribute);
        let context = Self {
            handle,
            device,
            ordinal,
            name: name(driver, device)?,
            uuid: uuid(driver, device)?,
            capability: (major?, minor?),
            multiprocessors: multiprocessors?,
            shared_memory: shared_memory?,
            broken: OnceLock::new(),
        };
        context.bind()?;
        context.keep_freed_memory()?;
        Ok(Arc::new(context))
    }

    /// Makes the context current on this thread, unless it is already.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn bind(&self) -> Result<()> {
        if CURRENT.get() != self.handle {
            let driver = driver()?;
            // SAFETY: the handle is that of a context which is never released.
            driver.check("cuCtxSetCurrent", unsafe { (driver.set_context)(self.handle) })?;
            CURRENT.set(self.handle);
        }
        Ok(())
    }

    /// From now on, waiting for one of its streams or events fails with this error. The first error stays.
    pub fn break_off(&self, error: Error) {
        let _ = self.broken.set(error);
    }

    /// The error of [`Context::break_off`].
    pub(super) fn unbroken(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Its number among the GPUs that `CUDA_VISIBLE_DEVICES` leaves visible.
    pub const fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its UUID, as `nvidia-smi -L` prints it. It tells two processes whether they share a GPU.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Compute capability: (9, 0) is `sm_90`.
    pub const fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// The number of streaming multiprocessors.
    pub const fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The most bytes of shared memory that a block can have.
    pub const fn shared_memory_per_block(&self) -> u32 {
        self.shared_memory
    }

    /// Free and total bytes of its memory, for all programs together.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let driver = driver()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: it writes two numbers.
        driver.check("cuMemGetInfo", unsafe { (driver.memory_info)(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const RELEASE_THRESHOLD: c_int = 4;

impl Context {
    /// The GPU's default memory pool, from which all memory comes.
    pub(super) fn default_pool(&self) -> Result<Handle> {
        self.bind()?;
        let driver = driver()?;
        let mut pool: Handle = std::ptr::null_mut();
        // SAFETY: it writes one handle.
        let code = unsafe { (driver.default_pool)(&raw mut pool, self.device) };
        driver.check("cuDeviceGetDefaultMemPool", code)?;
        Ok(pool)
    }

    /// Makes the pool keep freed memory, so that allocating it again needs no system call.
    fn keep_freed_memory(&self) -> Result<()> {
        let pool = self.default_pool()?;
        let driver = driver()?;
        let mut threshold = u64::MAX;
        // SAFETY: the attribute is a 64-bit number.
        let code =
            unsafe { (driver.set_pool_attribute)(pool, RELEASE_THRESHOLD, (&raw mut threshold).cast::<c_void>()) };
        driver.check("cuMemPoolSetAttribute", code)
    }
}

fn name(driver: &Driver, device: c_int) -> Result<String> {
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: it writes a C string of at most 255 characters.
    driver.check("cuDeviceGetName", unsafe { (driver.device_name)(name.as_mut_ptr(), 255, device) })?;
    // SAFETY: the last byte is 0.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

fn uuid(driver: &Driver, device: c_int) -> Result<String> {
    let mut bytes = [0u8; 16];
    // SAFETY: it writes 16 bytes.
    driver.check("cuDeviceGetUuid", unsafe { (driver.device_uuid)(&raw mut bytes, device) })?;
    let mut text = String::from("GPU-");
    for (index, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

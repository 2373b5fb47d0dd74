//! Kernels: their source, compiled for the machine's GPU, and launches.
use super::context::Context;
use super::library::{Handle, driver};
use super::nvrtc::{Program, Source};
use super::stream::Stream;
use std::ffi::{CString, c_void};
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};

/// Compiled kernels on a GPU.
#[derive(Debug, Clone)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    handle: Handle,
    context: Arc<Context>,
}

// SAFETY: the driver's modules may be used by any thread whose context is theirs.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Module {
    /// Compiles the source, or takes an earlier process's result, and loads it.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Device`]: no NVRTC, it refuses the source, or the driver refuses what it made.
    pub fn load(context: &Arc<Context>, source: &Source) -> Result<Self> {
        context.bind()?;
        let program = Program::new(source, context.capability())?;
        // What was kept may be damaged, or of another driver: then it is compiled again.
        if let Some(kept) = program.kept()
            && let Ok(module) = Self::of_image(context, &kept)
        {
            return Ok(module);
        }
        let image = program.compile()?;
        let module = Self::of_image(context, &image)?;
        program.keep(&image);
        Ok(module)
    }

    /// Loads compiled code: a cubin, or PTX.
    fn of_image(context: &Arc<Context>, image: &[u8]) -> Result<Self> {
        let driver = driver()?;
        let mut ended = image.to_vec();
        ended.push(0); // PTX is a C string
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: it writes one handle; the image ends with a 0 and is copied by the call.
        driver.check("cuModuleLoadData", unsafe { (driver.load_module)(&raw mut handle, ended.as_ptr().cast()) })?;
        Ok(Self(Arc::new(Loaded { handle, context: Arc::clone(context) })))
    }

    /// Finds a kernel of the module.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Device`]: there is no kernel of that name.
    pub fn function(&self, name: &str) -> Result<Function> {
        let driver = driver()?;
        let symbol = CString::new(name).map_err(|_| Error::device(format!("no kernel is named {name:?}")))?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the module is alive, `symbol` is a C string, and it writes one handle.
        let code = unsafe { (driver.get_function)(&raw mut handle, self.0.handle, symbol.as_ptr()) };
        driver.check("cuModuleGetFunction", code).map_err(|error| error.context(format!("kernel {name}")))?;
        Ok(Function { handle, name: name.into(), module: self.clone() })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let (Ok(driver), Ok(())) = (driver(), self.context.bind()) {
            // SAFETY: no function of it is left: each holds the module.
            unsafe { (driver.unload_module)(self.handle) };
        }
    }
}

/// A kernel of a loaded module, which it keeps loaded.
#[derive(Debug, Clone)]
pub struct Function {
    handle: Handle,
    name: Arc<str>,
    module: Module,
}

// SAFETY: as of the module, which it holds.
unsafe impl Send for Function {}
// SAFETY: as of the module, which it holds.
unsafe impl Sync for Function {}

/// The number of blocks, and of threads in each, that run a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block, up to 1,024.
    pub threads: u32,
    /// Bytes of a block's dynamic shared memory.
    pub shared: u32,
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// An address in the GPU's memory.
    Address(u64),
    /// `unsigned int`.
    U32(u32),
    /// `int`.
    I32(i32),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
}

impl Arg {
    /// A pointer to the value.
    const fn place(&self) -> *mut c_void {
        match self {
            Self::Address(value) | Self::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::F64(value) => std::ptr::from_ref(value).cast_mut().cast(),
        }
    }
}

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: i32 = 8;

/// Bytes of dynamic shared memory that a kernel has by default.
const SHARED_BY_DEFAULT: u32 = 48 << 10;

impl Function {
    /// Launches the kernel on the stream.
    ///
    /// # Errors
    /// Errors of the driver: a grid that the GPU does not take.
    ///
    /// # Safety
    /// The arguments are as many as the kernel's parameters and of their types, and the kernel stays within the memory they name,
    /// which lives until the stream has done it.
    pub unsafe fn launch(&self, stream: &Stream, grid: &Grid, args: &[Arg]) -> Result<()> {
        stream.context().bind()?;
        let driver = driver()?;
        if grid.shared > SHARED_BY_DEFAULT {
            // SAFETY: the function is alive while its module is.
            let code = unsafe { (driver.set_function_attribute)(self.handle, MAX_DYNAMIC_SHARED, grid.shared as i32) };
            driver.check("cuFuncSetAttribute", code).map_err(|error| error.context(format!("kernel {}", self.name)))?;
        }
        let mut places: Vec<*mut c_void> = args.iter().map(Arg::place).collect();
        let [x, y, z] = grid.blocks;
        // SAFETY: as the caller says; the driver copies the arguments before it returns.
        let code = unsafe {
            (driver.launch)(
                self.handle,
                x,
                y,
                z,
                grid.threads,
                1,
                1,
                grid.shared,
                stream.handle(),
                places.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        driver.check("cuLaunchKernel", code).map_err(|error| error.context(format!("kernel {}", self.name)))
    }

    /// The module that the kernel is in.
    pub const fn module(&self) -> &Module {
        &self.module
    }
}

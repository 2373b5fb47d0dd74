//! Finds and loads `libcuda`, NVRTC and cublasLt, each once per process.
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, RwLock};
use tunesmith_base::error::{Error, Result};

/// The variable that names the only folder to load CUDA's libraries from.
pub const FOLDER_VARIABLE: &str = "TUNESMITH_CUDA_LIBRARIES";

/// The oldest supported driver, as a number of `cuDriverGetVersion`: CUDA 12.0.
const OLDEST_DRIVER: c_int = 12_000;

/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: Code = 100;

/// A library, its file names in order of preference, and what to do if it is missing.
struct Wanted {
    name: &'static str,
    files: &'static [&'static str],
    hint: &'static str,
}

const DRIVER: Wanted = Wanted {
    name: "CUDA driver",
    files: &["libcuda.so.1"],
    hint: "install NVIDIA's driver (525 or newer), or set model.device: cpu",
};
const NVRTC: Wanted = Wanted {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12"],
    hint: "`pip install nvidia-cuda-nvrtc-cu12` in the active environment, or install a CUDA toolkit; docs/gpu.md says where it is looked for",
};
const CUBLASLT: Wanted = Wanted {
    name: "cublasLt",
    files: &["libcublasLt.so.13", "libcublasLt.so.12"],
    hint: "`pip install nvidia-cublas-cu12` in the active environment, or install a CUDA toolkit; docs/gpu.md says where it is looked for",
};

/// A folder from which tests load instead.
static TEST_FOLDER: RwLock<Option<PathBuf>> = RwLock::new(None);

/// From now on, libraries that are not loaded yet come only from this folder.
pub(super) fn load_from(folder: &Path) {
    *TEST_FOLDER.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(folder.to_owned());
}

/// The folder of [`load_from`].
pub(super) fn test_folder() -> Option<PathBuf> {
    TEST_FOLDER.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
}

/// The only folder to load from, if one is set.
fn only_folder() -> Option<PathBuf> {
    let set = || variable(FOLDER_VARIABLE);
    // A name without a slash would be looked up by the loader.
    let whole = |folder| std::path::absolute(&folder).unwrap_or(folder);
    test_folder().or_else(set).map(whole)
}

/// Folders that may contain a toolkit's libraries, in search order. `variable` reads a variable of the environment; `local` is
/// `/usr/local`.
fn folders(variable: impl Fn(&str) -> Option<PathBuf>, local: &Path) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(&variable).collect();
    let mut toolkits = entries(local);
    toolkits.retain(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"cuda")));
    toolkits.reverse(); // the newest version first
    roots.extend(toolkits);
    // Conda's own packages of CUDA.
    roots.extend(variable("CONDA_PREFIX"));
    let mut folders: Vec<PathBuf> =
        roots.iter().flat_map(|root| ["lib64", "targets/x86_64-linux/lib", "lib"].map(|lib| root.join(lib))).collect();
    let mut environments: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(&variable).collect();
    environments.extend(variable("PATH").iter().flat_map(|path| python_prefixes(path)));
    environments.push(local.to_owned());
    environments.extend(variable("HOME").map(|home| home.join(".local")));
    for environment in environments {
        for lib in ["lib", "lib64"] {
            for python in entries(&environment.join(lib)) {
                if !python.file_name().is_some_and(|name| name.as_bytes().starts_with(b"python")) {
                    continue;
                }
                for packages in ["site-packages", "dist-packages"] {
                    for package in entries(&python.join(packages).join("nvidia")) {
                        folders.push(package.join("lib"));
                    }
                }
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    folders.retain(|folder| folder.is_dir() && seen.insert(folder.clone()));
    folders
}

/// A folder's entries, sorted; empty if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = found.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Environments that the first `python3` on `path` may be of: the one around it, that of the file it links to, and those of pyenv,
/// whose `python3` is a script in a folder `shims`.
fn python_prefixes(path: &Path) -> Vec<PathBuf> {
    let Some(python) = std::env::split_paths(path).map(|folder| folder.join("python3")).find(|file| file.is_file())
    else {
        return Vec::new();
    };
    let prefix = |file: &Path| Some(file.parent()?.parent()?.to_owned());
    let mut found: Vec<PathBuf> = prefix(&python).into_iter().collect();
    if python.parent().is_some_and(|folder| folder.ends_with("shims")) {
        found = found.iter().flat_map(|pyenv| entries(&pyenv.join("versions"))).collect();
    }
    found.extend(python.canonicalize().ok().as_deref().and_then(prefix));
    found
}

/// A variable of the environment, unless it is empty.
fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// An open library. It is never closed: the driver has threads of its own.
#[derive(Debug)]
struct Library {
    handle: *mut c_void,
    name: &'static str,
    hint: &'static str,
    path: PathBuf,
}

// SAFETY: a handle of dlopen may be used by any thread.
unsafe impl Send for Library {}
// SAFETY: as above; dlsym changes nothing.
unsafe impl Sync for Library {}

/// Paths at which a library with one of these file names may be, the likeliest first. Bare names are for the system's
/// loader.
pub fn candidates(files: &[&str]) -> Vec<PathBuf> {
    candidates_in(files, only_folder())
}

fn candidates_in(files: &[&str], only: Option<PathBuf>) -> Vec<PathBuf> {
    if let Some(folder) = only {
        return files.iter().map(|file| folder.join(file)).collect();
    }
    let mut candidates: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
    for folder in folders(variable, Path::new("/usr/local")) {
        candidates.extend(files.iter().map(|file| folder.join(file)).filter(|path| path.exists()));
    }
    candidates
}

/// Loads the library from this folder, or else searches for it; `driver` is the driver's version, if there is one.
fn open(wanted: &Wanted, only: Option<PathBuf>, driver: Option<c_int>) -> Result<Library> {
    let mut why: Option<String> = None;
    let files: Vec<&str> = wanted.files.iter().copied().filter(|file| runs_on(file, driver)).collect();
    for path in candidates_in(&files, only) {
        preload_builtins(&path);
        match dlopen(&path, libc::RTLD_NOW | libc::RTLD_LOCAL) {
            Ok(handle) => {
                return Ok(Library { handle, name: wanted.name, hint: wanted.hint, path: loaded_from(handle, path) });
            }
            // A file that is there and does not load says more than the names that are not.
            Err(error) if path.is_absolute() && path.exists() => why = Some(error),
            Err(error) => why = why.or(Some(error)),
        }
    }
    let why = why.unwrap_or_else(|| format!("no {}", files.join(" or ")));
    Err(Error::device(format!("the {} cannot be loaded: {why}", wanted.name)).hint(wanted.hint))
}

/// Whether a toolkit's library, whose file name ends in the toolkit's major version, runs on this driver. A driver
/// supports its own and older major versions.
fn runs_on(file: &str, driver: Option<c_int>) -> bool {
    let major = file.rsplit('.').next().and_then(|end| end.parse::<c_int>().ok());
    !matches!((major, driver), (Some(major), Some(driver)) if major > driver / 1000)
}

/// NVRTC opens its builtins by name. If they are not on the loader's path, they must be loaded first.
fn preload_builtins(path: &Path) {
    let Some(folder) = path.parent().filter(|_| path.is_absolute()) else { return };
    for entry in entries(folder) {
        if entry.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libnvrtc-builtins.so")) {
            let _ = dlopen(&entry, libc::RTLD_NOW | libc::RTLD_GLOBAL);
        }
    }
}

fn dlopen(path: &Path, flags: c_int) -> std::result::Result<*mut c_void, String> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| "a path with a NUL byte".to_owned())?;
    // SAFETY: `name` is a C string; the libraries' initialisers are NVIDIA's, or of a file that the user named.
    let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror returns null or a C string that is good until the next call of this thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return Err(format!("{} cannot be opened", path.display()));
    }
    // SAFETY: not null, see above.
    Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// The beginning of glibc's `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
}

/// The file that a library was loaded from; `asked` if the loader does not tell.
fn loaded_from(handle: *mut c_void, asked: PathBuf) -> PathBuf {
    if asked.is_absolute() {
        return asked;
    }
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: the handle is open, and RTLD_DI_LINKMAP writes one pointer.
    let failed = unsafe { libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) } != 0;
    if failed || map.is_null() {
        return asked;
    }
    // SAFETY: the entry lives as long as the library, which is never closed; its name is null or a C string.
    let name = unsafe { (*map).name };
    if name.is_null() {
        return asked;
    }
    // SAFETY: not null, see above.
    let name = unsafe { CStr::from_ptr(name) };
    PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()))
}

impl Library {
    fn find(&self, name: &CStr) -> Result<*mut c_void> {
        // SAFETY: the handle is open, and `name` is a C string.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if found.is_null() {
            let message =
                format!("the {} ({}) lacks {}: it is too old", self.name, self.path.display(), name.to_string_lossy());
            return Err(Error::device(message).hint(self.hint));
        }
        Ok(found)
    }
}

/// A result code of any of the libraries; 0 is success.
pub(super) type Code = c_int;

macro_rules! functions {
    ($(#[$doc:meta])* $table:ident: $($field:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $table {
            path: PathBuf,
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            fn find(library: &Library) -> Result<Self> {
                Ok(Self {
                    path: library.path.clone(),
                    $($field: {
                        let found = library.find(const {
                            match CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes()) {
                                Ok(name) => name,
                                Err(_) => panic!("a symbol's name"),
                            }
                        })?;
                        // SAFETY: the symbol is a function of that signature in the library's header, and not null.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(found) }
                    },)*
                })
            }
        }
    };
}

/// An opaque handle of a library.
pub(super) type Handle = *mut c_void;

functions! {
    /// The driver's functions (`cuda.h` of CUDA 12.0).
    Driver:
    init = "cuInit"(c_uint) -> Code;
    version = "cuDriverGetVersion"(*mut c_int) -> Code;
    device_count = "cuDeviceGetCount"(*mut c_int) -> Code;
    device = "cuDeviceGet"(*mut c_int, c_int) -> Code;
    device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int) -> Code;
    device_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], c_int) -> Code;
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int) -> Code;
    retain_context = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int) -> Code;
    set_context = "cuCtxSetCurrent"(Handle) -> Code;
    memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize) -> Code;
    default_pool = "cuDeviceGetDefaultMemPool"(*mut Handle, c_int) -> Code;
    set_pool_attribute = "cuMemPoolSetAttribute"(Handle, c_int, *mut c_void) -> Code;
    trim_pool = "cuMemPoolTrimTo"(Handle, usize) -> Code;
    allocate = "cuMemAllocAsync"(*mut u64, usize, Handle) -> Code;
    free = "cuMemFreeAsync"(u64, Handle) -> Code;
    allocate_host = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint) -> Code;
    free_host = "cuMemFreeHost"(*mut c_void) -> Code;
    to_device = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle) -> Code;
    to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, Handle) -> Code;
    on_device = "cuMemcpyDtoDAsync_v2"(u64, u64, usize, Handle) -> Code;
    fill = "cuMemsetD8Async"(u64, u8, usize, Handle) -> Code;
    create_stream = "cuStreamCreate"(*mut Handle, c_uint) -> Code;
    destroy_stream = "cuStreamDestroy_v2"(Handle) -> Code;
    synchronize = "cuStreamSynchronize"(Handle) -> Code;
    wait_event = "cuStreamWaitEvent"(Handle, Handle, c_uint) -> Code;
    create_event = "cuEventCreate"(*mut Handle, c_uint) -> Code;
    destroy_event = "cuEventDestroy_v2"(Handle) -> Code;
    record_event = "cuEventRecord"(Handle, Handle) -> Code;
    query_event = "cuEventQuery"(Handle) -> Code;
    synchronize_event = "cuEventSynchronize"(Handle) -> Code;
    elapsed = "cuEventElapsedTime"(*mut f32, Handle, Handle) -> Code;
    load_module = "cuModuleLoadData"(*mut Handle, *const c_void) -> Code;
    unload_module = "cuModuleUnload"(Handle) -> Code;
    get_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char) -> Code;
    set_function_attribute = "cuFuncSetAttribute"(Handle, c_int, c_int) -> Code;
    launch = "cuLaunchKernel"(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void) -> Code;
    error_name = "cuGetErrorName"(Code, *mut *const c_char) -> Code;
    error_text = "cuGetErrorString"(Code, *mut *const c_char) -> Code;
}

functions! {
    /// NVRTC's functions (`nvrtc.h` of CUDA 12.0).
    Nvrtc:
    version = "nvrtcVersion"(*mut c_int, *mut c_int) -> Code;
    create = "nvrtcCreateProgram"(*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Code;
    destroy = "nvrtcDestroyProgram"(*mut Handle) -> Code;
    compile = "nvrtcCompileProgram"(Handle, c_int, *const *const c_char) -> Code;
    cubin_size = "nvrtcGetCUBINSize"(Handle, *mut usize) -> Code;
    cubin = "nvrtcGetCUBIN"(Handle, *mut c_char) -> Code;
    ptx_size = "nvrtcGetPTXSize"(Handle, *mut usize) -> Code;
    ptx = "nvrtcGetPTX"(Handle, *mut c_char) -> Code;
    log_size = "nvrtcGetProgramLogSize"(Handle, *mut usize) -> Code;
    log = "nvrtcGetProgramLog"(Handle, *mut c_char) -> Code;
    error_text = "nvrtcGetErrorString"(Code) -> *const c_char;
    count_archs = "nvrtcGetNumSupportedArchs"(*mut c_int) -> Code;
    archs = "nvrtcGetSupportedArchs"(*mut c_int) -> Code;
}

functions! {
    /// cublasLt's functions (`cublasLt.h` of CUDA 12.0).
    CublasLt:
    create = "cublasLtCreate"(*mut Handle) -> Code;
    version = "cublasLtGetVersion"() -> usize;
    matmul = "cublasLtMatmul"(Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, usize, Handle) -> Code;
    create_desc = "cublasLtMatmulDescCreate"(*mut Handle, c_int, c_int) -> Code;
    destroy_desc = "cublasLtMatmulDescDestroy"(Handle) -> Code;
    set_desc = "cublasLtMatmulDescSetAttribute"(Handle, c_int, *const c_void, usize) -> Code;
    create_layout = "cublasLtMatrixLayoutCreate"(*mut Handle, c_int, u64, u64, i64) -> Code;
    destroy_layout = "cublasLtMatrixLayoutDestroy"(Handle) -> Code;
    set_layout = "cublasLtMatrixLayoutSetAttribute"(Handle, c_int, *const c_void, usize) -> Code;
    create_preference = "cublasLtMatmulPreferenceCreate"(*mut Handle) -> Code;
    destroy_preference = "cublasLtMatmulPreferenceDestroy"(Handle) -> Code;
    set_preference = "cublasLtMatmulPreferenceSetAttribute"(Handle, c_int, *const c_void, usize) -> Code;
    heuristic = "cublasLtMatmulAlgoGetHeuristic"(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut c_void, *mut c_int) -> Code;
    error_text = "cublasLtGetStatusString"(Code) -> *const c_char;
}

/// The driver, loaded and initialized at the first call.
pub(super) fn driver() -> Result<&'static Driver> {
    static LOADED: OnceLock<Result<Driver>> = OnceLock::new();
    LOADED.get_or_init(load_driver).as_ref().map_err(Clone::clone)
}

/// Whether the driver's library is installed, even if it cannot be used.
pub fn driver_is_installed() -> bool {
    candidates(DRIVER.files).iter().any(|path| dlopen(path, libc::RTLD_NOW | libc::RTLD_LOCAL).is_ok() || path.exists())
}

fn load_driver() -> Result<Driver> {
    let driver = Driver::find(&open(&DRIVER, only_folder(), None)?)?;
    // SAFETY: `init` takes no flags.
    match unsafe { (driver.init)(0) } {
        NO_DEVICE => {
            return Err(Error::device("the CUDA driver shows no GPU")
                .hint("compare `nvidia-smi -L` with CUDA_VISIBLE_DEVICES, or set model.device: cpu"));
        }
        code => driver.check("cuInit", code).map_err(|error| {
            error.hint("`nvidia-smi` and the system's log (dmesg) say more; model.device: cpu computes without it")
        })?,
    }
    new_enough(driver.version()?)?;
    Ok(driver)
}

fn new_enough(version: c_int) -> Result<()> {
    if version < OLDEST_DRIVER {
        let message = format!("the driver runs CUDA {}, and CUDA {} is needed", dotted(version), dotted(OLDEST_DRIVER));
        return Err(Error::device(message).hint(DRIVER.hint));
    }
    Ok(())
}

/// Opens a toolkit's library that fits the installed driver.
fn open_for_driver(wanted: &Wanted) -> Result<Library> {
    // Without a driver, a compiler still compiles.
    let version = driver().and_then(Driver::version).ok();
    open(wanted, only_folder(), version)
}

/// A CUDA version in its usual form: 12020 is 12.2.
fn dotted(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

impl Driver {
    /// The newest CUDA version that it supports: 12020 is 12.2.
    fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: `version` takes one number.
        self.check("cuDriverGetVersion", unsafe { (self.version)(&raw mut version) })?;
        Ok(version)
    }

    /// The failure of a call, named as CUDA names it.
    pub(super) fn check(&self, call: &str, code: Code) -> Result<()> {
        const OUT_OF_MEMORY: Code = 2;
        if code == 0 {
            return Ok(());
        }
        let text = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: the function writes one pointer, to a constant C string or null.
            unsafe { function(code, &raw mut text) };
            // SAFETY: as above.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(self.error_name).unwrap_or_else(|| format!("error {code}"));
        let what = text(self.error_text).map_or_else(String::new, |text| format!(": {text}"));
        let message = format!("{call} failed with {name}{what}");
        if code == OUT_OF_MEMORY {
            return Err(
                Error::memory(message).hint("use less memory (docs/auto-batch.md), or end other programs on this GPU")
            );
        }
        Err(Error::device(message)
            .hint("`nvidia-smi` and the system's log (dmesg) say more; checkpoints that were written are whole"))
    }
}

/// NVRTC, loaded at the first call.
pub(super) fn nvrtc() -> Result<&'static Nvrtc> {
    static LOADED: OnceLock<Result<Nvrtc>> = OnceLock::new();
    LOADED.get_or_init(|| Nvrtc::find(&open_for_driver(&NVRTC)?)).as_ref().map_err(Clone::clone)
}

/// cublasLt, loaded at the first call.
pub(super) fn cublas_lt() -> Result<&'static CublasLt> {
    static LOADED: OnceLock<Result<CublasLt>> = OnceLock::new();
    LOADED.get_or_init(|| CublasLt::find(&open_for_driver(&CUBLASLT)?)).as_ref().map_err(Clone::clone)
}

/// The state of one of the libraries.
#[derive(Debug, Clone)]
pub struct LibraryReport {
    /// Its name: the driver, NVRTC, or cublasLt.
    pub name: &'static str,
    /// Its version and file, or why it cannot be used, with a hint.
    pub found: Result<(String, PathBuf)>,
}

/// Finds and loads the three libraries.
pub fn report() -> Vec<LibraryReport> {
    let of_driver = || {
        let driver = driver()?;
        Ok((dotted(driver.version()?), driver.path.clone()))
    };
    let of_nvrtc = || {
        let nvrtc = nvrtc()?;
        let (major, minor) = nvrtc.number();
        Ok((format!("{major}.{minor}"), nvrtc.path.clone()))
    };
    let of_cublas = || {
        let cublas = cublas_lt()?;
        // SAFETY: it takes nothing and returns a number.
        let version = unsafe { (cublas.version)() };
        Ok((format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100), cublas.path.clone()))
    };
    vec![
        LibraryReport { name: DRIVER.name, found: of_driver() },
        LibraryReport { name: NVRTC.name, found: of_nvrtc() },
        LibraryReport { name: CUBLASLT.name, found: of_cublas() },
    ]
}

impl Nvrtc {
    /// Its version, as (major, minor).
    pub(super) fn number(&self) -> (c_int, c_int) {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two numbers, and fails only for null pointers.
        unsafe { (self.version)(&raw mut major, &raw mut minor) };
        (major, minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_base::Kind;

    #[test]
    fn a_library_that_does_not_load_is_named_with_the_place_and_what_helps() {
        let folder = std::env::temp_dir().join(format!("tunesmith-libraries-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let missing = open(&NVRTC, Some(folder.clone()), None).unwrap_err();
        assert_eq!(missing.kind(), Kind::Device);
        let (message, hint) = (missing.message(), missing.hint_text().unwrap_or_default());
        assert!(message.contains("the NVRTC cannot be loaded") && message.contains("libnvrtc.so.13"), "{message}");
        assert!(hint.contains("pip install nvidia-cuda-nvrtc-cu12"), "{hint}");
        // What is there and is no library says more than the name that is not there.
        std::fs::write(folder.join("libnvrtc.so.12"), "damaged").unwrap();
        let damaged = open(&NVRTC, Some(folder.clone()), None).unwrap_err();
        let place = folder.join("libnvrtc.so.12");
        assert!(damaged.message().contains(&*place.to_string_lossy()), "{damaged}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn toolkits_conda_and_every_python_are_searched() {
        let root = tempfile::tempdir().unwrap();
        let place = |name: &str| root.path().join(name);
        let wanted = [
            "toolkit/lib64",
            "local/cuda-12.9/lib64",
            "conda/lib",
            "venv/lib/python3.12/site-packages/nvidia/cublas/lib",
            "conda/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib",
            "pyenv/versions/3.10.1/lib/python3.10/site-packages/nvidia/cublas/lib",
            "local/lib/python3.12/dist-packages/nvidia/cu13/lib",
            "home/.local/lib/python3.12/site-packages/nvidia/nccl/lib",
        ];
        for folder in wanted {
            std::fs::create_dir_all(place(folder)).unwrap();
        }
        std::fs::create_dir_all(place("pyenv/shims")).unwrap();
        std::fs::write(place("pyenv/shims/python3"), "").unwrap();
        let variable = |name: &str| {
            let of = ["CUDA_HOME toolkit", "CONDA_PREFIX conda", "VIRTUAL_ENV venv", "PATH pyenv/shims", "HOME home"];
            of.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(place)
        };
        assert_eq!(folders(variable, &place("local")), wanted.map(place));
    }

    #[test]
    fn a_library_without_a_function_is_too_old() {
        let libc = Wanted { name: "CUDA driver", files: &["libc.so.6"], hint: "install a newer one" };
        let error = Driver::find(&open(&libc, None, None).unwrap()).unwrap_err();
        assert!(error.message().contains("lacks cuInit: it is too old"), "{error}");
        assert!(error.message().contains("/libc.so.6"), "{error}");
    }

    #[test]
    fn a_driver_is_as_new_as_what_runs_on_it() {
        let error = new_enough(11_080).unwrap_err();
        assert_eq!(
            (error.kind(), error.message()),
            (Kind::Device, "the driver runs CUDA 11.8, and CUDA 12.0 is needed")
        );
        assert!(new_enough(12_000).is_ok() && new_enough(13_010).is_ok());
        let usable = |driver| NVRTC.files.iter().filter(|file| runs_on(file, driver)).count();
        assert_eq!((usable(None), usable(Some(12_090)), usable(Some(13_000))), (2, 1, 2));
        assert!(runs_on("libnvrtc.so.12", Some(12_090)));
    }
}

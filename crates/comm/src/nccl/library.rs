//! NCCL's functions, loaded at run time, as Gloo's are. NCCL's run-time packages only contain the name `libnccl.so.2`.
//! It is searched for where CUDA's libraries are, such as in PyTorch's wheels.
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use tunesmith_device::cuda::library::candidates;

use tunesmith_base::error::{Error, Result};

/// The variable with NCCL's path, if the system's loader does not find it.
pub const LIBRARY_VARIABLE: &str = "TUNESMITH_NCCL";

/// NCCL's result codes; newer codes are known by their texts.
pub(super) type Code = c_int;
pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;

/// `ncclComm_t`: a communicator.
pub(super) type Comm = *mut c_void;
/// `ncclDataType_t` of bytes, `ncclUint8`, because NCCL only moves data here.
pub(super) const BYTES: c_int = 1;

/// `ncclUniqueId`: the identity that ranks of one communicator share.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` with the fields of 2.18.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// `NCCL_CONFIG_INITIALIZER`, except for `blocking`: calls return before NCCL has finished.
    pub(super) const fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_801,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `cudaStream_t`.
type Stream = *mut c_void;
type Count = unsafe extern "C" fn(*mut c_int) -> Code;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> Code;
type Init = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Code;
type AsyncError = unsafe extern "C" fn(Comm, *mut Code) -> Code;
type OfComm = unsafe extern "C" fn(Comm) -> Code;
type Group = unsafe extern "C" fn() -> Code;
type Send = unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> Code;
type Receive = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
type Broadcast = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
type AllGather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> Code;
type ErrorString = unsafe extern "C" fn(Code) -> *const c_char;

/// The loaded functions. The object is never unloaded: NCCL has threads of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Functions {
    pub get_version: Count,
    pub get_unique_id: GetUniqueId,
    pub init: Init,
    pub async_error: AsyncError,
    pub abort: OfComm,
    pub finalize: OfComm,
    pub destroy: OfComm,
    pub group_start: Group,
    pub group_end: Group,
    pub send: Send,
    pub receive: Receive,
    pub broadcast: Broadcast,
    pub all_gather: AllGather,
    error_string: ErrorString,
}

const INSTALL: &str = "install NCCL's run-time library (`apt-get install libnccl2` from NVIDIA's repository, or `pip install \
                       nvidia-nccl-cu12`; TUNESMITH_NCCL=…/libnccl.so.2 names one elsewhere), or set train.ddp_backend: gloo";

impl Functions {
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: there is no NCCL, or one that is too old.
    pub fn load() -> Result<Self> {
        let named = std::env::var_os(LIBRARY_VARIABLE).filter(|named| !named.is_empty()).map(PathBuf::from);
        let names = named.map_or_else(|| candidates(&["libnccl.so.2", "libnccl.so"]), |named| vec![named]);
        let mut why = String::new();
        for name in names {
            match open(&name.into_os_string().into_encoded_bytes()) {
                Ok(library) => return Self::find(library),
                Err(error) => why = if why.is_empty() { error } else { why },
            }
        }
        Err(Error::config(format!("train.ddp_backend: nccl, but NCCL cannot be loaded: {why}")).hint(INSTALL))
    }

    fn find(library: *mut c_void) -> Result<Self> {
        let find = |name: &CStr| {
            // SAFETY: `library` is open and never closed; `name` is a C string that outlives the call.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            if found.is_null() {
                let message = format!("this NCCL lacks {}: 2.18 or newer is needed", name.to_string_lossy());
                return Err(Error::config(message).hint(INSTALL));
            }
            Ok(found)
        };
        // SAFETY: `find` gives no null pointers, and the signatures are those of nccl.h, unchanged since 2.18; an
        // older library lacks one of them. This one is never closed, so that they stay good.
        unsafe {
            Ok(Self {
                get_version: std::mem::transmute::<*mut c_void, Count>(find(c"ncclGetVersion")?),
                get_unique_id: std::mem::transmute::<*mut c_void, GetUniqueId>(find(c"ncclGetUniqueId")?),
                init: std::mem::transmute::<*mut c_void, Init>(find(c"ncclCommInitRankConfig")?),
                async_error: std::mem::transmute::<*mut c_void, AsyncError>(find(c"ncclCommGetAsyncError")?),
                abort: std::mem::transmute::<*mut c_void, OfComm>(find(c"ncclCommAbort")?),
                finalize: std::mem::transmute::<*mut c_void, OfComm>(find(c"ncclCommFinalize")?),
                destroy: std::mem::transmute::<*mut c_void, OfComm>(find(c"ncclCommDestroy")?),
                group_start: std::mem::transmute::<*mut c_void, Group>(find(c"ncclGroupStart")?),
                group_end: std::mem::transmute::<*mut c_void, Group>(find(c"ncclGroupEnd")?),
                send: std::mem::transmute::<*mut c_void, Send>(find(c"ncclSend")?),
                receive: std::mem::transmute::<*mut c_void, Receive>(find(c"ncclRecv")?),
                broadcast: std::mem::transmute::<*mut c_void, Broadcast>(find(c"ncclBroadcast")?),
                all_gather: std::mem::transmute::<*mut c_void, AllGather>(find(c"ncclAllGather")?),
                error_string: std::mem::transmute::<*mut c_void, ErrorString>(find(c"ncclGetErrorString")?),
            })
        }
    }

    /// NCCL's text for a result code.
    pub fn words(&self, code: Code) -> String {
        // SAFETY: takes a number; any is allowed.
        let words = unsafe { (self.error_string)(code) };
        if words.is_null() {
            return format!("NCCL error {code}");
        }
        // SAFETY: not null, so that it is a C string, which NCCL never frees.
        format!("NCCL: {}", unsafe { CStr::from_ptr(words) }.to_string_lossy())
    }

    /// The library's version, such as `2.27.5`.
    pub fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: writes one int, which outlives the call.
        unsafe { (self.get_version)(&raw mut version) };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }
}

fn open(name: &[u8]) -> std::result::Result<*mut c_void, String> {
    let name = CString::new(name).map_err(|_| "a NUL in its name".to_owned())?;
    // SAFETY: `name` is a C string that outlives the call. Loading runs the object's constructors: NCCL's, or those of
    // what the user has named in TUNESMITH_NCCL.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !library.is_null() {
        return Ok(library);
    }
    // SAFETY: takes nothing; the text is this thread's own.
    let said = unsafe { libc::dlerror() };
    if said.is_null() {
        return Err(format!("{}: cannot be loaded", name.to_string_lossy()));
    }
    // SAFETY: not null, so that it is a C string, good until this thread's next call; it is copied at once.
    Err(unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned())
}

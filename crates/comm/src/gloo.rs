//! Gloo between processes, over TCP: the functions of `shim/gloo/tunesmith_gloo.cpp`, loaded at run time, so that
//! building tunesmith needs no C++ library. All foreign calls are here.
//!
//! Gloo's own connections are neither authenticated nor encrypted; only the addresses travel through the authenticated
//! store. They use each rank's address on the way to the store: loopback if the store is on loopback.
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::gloo_library::{self, BUILD};
use super::rendezvous::Rendezvous;
use super::{Collectives, Group, LOST, Limits, World};
pub use gloo_library::LIBRARY_VARIABLE;
use tunesmith_base::error::{Error, Result};

/// The version of the functions' signatures.
const VERSION: c_int = 1;

type SetValue = unsafe extern "C" fn(*mut c_void, *const c_char, *const u8, usize) -> c_int;
type Take = unsafe extern "C" fn(*mut c_void, *const u8, usize);
type GetValue = unsafe extern "C" fn(*mut c_void, *const c_char, Take, *mut c_void) -> c_int;
type Connect = unsafe extern "C" fn(
    c_int,
    c_int,
    *const c_char,
    i64,
    *mut c_void,
    SetValue,
    GetValue,
    *mut *mut c_void,
    *mut c_char,
    usize,
) -> c_int;
type AllToAll =
    unsafe extern "C" fn(*mut c_void, *const u8, *const i64, *mut u8, *const i64, *mut c_char, usize) -> c_int;
type AllGather = unsafe extern "C" fn(*mut c_void, *mut u8, *const i64, *mut c_char, usize) -> c_int;
type Broadcast = unsafe extern "C" fn(*mut c_void, *mut u8, usize, c_int, *mut c_char, usize) -> c_int;
type Barrier = unsafe extern "C" fn(*mut c_void, *mut c_char, usize) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void);

/// The loaded functions. The object is never unloaded: Gloo has threads of its own.
#[derive(Debug, Clone, Copy)]
struct Functions {
    connect: Connect,
    all_to_all: AllToAll,
    all_gather: AllGather,
    broadcast: Broadcast,
    barrier: Barrier,
    free: Free,
}

/// Gloo's ranks, from its `connect`; used by one thread at a time.
#[derive(Debug)]
struct Ranks(*mut c_void);

// SAFETY: the object behind the pointer belongs to no thread (Gloo's contexts may be used from any); the Mutex around
// it lets one in at a time.
unsafe impl Send for Ranks {}

/// One rank of a world of processes.
#[derive(Debug)]
pub struct Gloo {
    functions: Functions,
    ranks: Mutex<Ranks>,
    rendezvous: Rendezvous,
    /// This engine's ranks: all ranks of the run, or those of this machine.
    world: World,
    limits: Limits,
    /// Whether an operation has failed: peers may be gone, and closing would wait for them.
    failed: Arc<AtomicBool>,
}

/// Whether the engine can be loaded, and where it is.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], with what to do.
pub fn probe() -> Result<PathBuf> {
    let path = gloo_library::find()?;
    Functions::load(&path)?;
    Ok(path)
}

/// As [`probe`], but builds the engine if it is missing and the machine can. Calls `say` before that.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: it cannot be built, and why, or what `TUNESMITH_GLOO` names cannot be loaded.
pub fn provide(say: &dyn Fn(&str)) -> Result<PathBuf> {
    match probe() {
        Err(_) if gloo_library::named().is_none() => {
            gloo_library::build(|| probe().ok(), say)?;
            probe()
        }
        found => found,
    }
}

impl Functions {
    fn load(path: &Path) -> Result<Self> {
        let refuse = |why: String| Error::config(format!("the Gloo engine {}: {why}", path.display())).hint(BUILD);
        let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| refuse("a NUL in its name".into()))?;
        // SAFETY: `name` is a C string that outlives the call. Loading runs the object's constructors: Gloo's and the
        // C++ library's, or those of what the user has named in TUNESMITH_GLOO.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: takes nothing; the text is this thread's own.
            let said = unsafe { libc::dlerror() };
            let why = if said.is_null() {
                "cannot be loaded".to_owned()
            } else {
                // SAFETY: not null, so that it is a C string, good until this thread's next call; it is copied at once.
                unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
            };
            return Err(refuse(why));
        }
        let find = |name: &CStr| {
            // SAFETY: `library` is open and never closed; `name` is a C string that outlives the call.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            if found.is_null() { Err(refuse(format!("lacks {}", name.to_string_lossy()))) } else { Ok(found) }
        };
        let version = find(c"tunesmith_gloo_version")?;
        // SAFETY: the function of that name takes nothing and returns an int, in every version.
        let version = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(version) }();
        if version != VERSION {
            return Err(refuse(format!("is of version {version}, this program needs {VERSION}")));
        }
        // SAFETY: `find` gives no null pointers, and the signatures are those of this version of the shim, which was
        // just compared. The library is never closed, so that they stay good.
        unsafe {
            Ok(Self {
                connect: std::mem::transmute::<*mut c_void, Connect>(find(c"tunesmith_gloo_connect")?),
                all_to_all: std::mem::transmute::<*mut c_void, AllToAll>(find(c"tunesmith_gloo_all_to_all")?),
                all_gather: std::mem::transmute::<*mut c_void, AllGather>(find(c"tunesmith_gloo_all_gather")?),
                broadcast: std::mem::transmute::<*mut c_void, Broadcast>(find(c"tunesmith_gloo_broadcast")?),
                barrier: std::mem::transmute::<*mut c_void, Barrier>(find(c"tunesmith_gloo_barrier")?),
                free: std::mem::transmute::<*mut c_void, Free>(find(c"tunesmith_gloo_free")?),
            })
        }
    }
}

/// State of the store's callbacks.
struct Caller<'a> {
    rendezvous: &'a Rendezvous,
    group: &'a str,
    limit: Duration,
}

/// Writes a value to the store. Returns 0 on success.
///
/// # Safety
/// `user` is the [`Caller`] that was given to `connect`, still alive; `name` is a C string and `value` holds `length`
/// bytes.
unsafe extern "C" fn set_value(user: *mut c_void, name: *const c_char, value: *const u8, length: usize) -> c_int {
    // SAFETY: all three are as the caller says, and live until this returns. No bytes may come with a null pointer,
    // which makes no slice.
    let (caller, name, value) = unsafe {
        let value = if length == 0 { &[] } else { std::slice::from_raw_parts(value, length) };
        (&*user.cast::<Caller<'_>>(), CStr::from_ptr(name), value)
    };
    let name = format!("{}/{}", caller.group, name.to_string_lossy());
    c_int::from(caller.rendezvous.store.set(&name, value).is_err())
}

/// Waits for a value of the store and passes it to `take`, together with `into`. Returns 0 on success.
///
/// # Safety
/// `user` is the [`Caller`] that was given to `connect`, still alive; `name` is a C string, and `take` may be called
/// with `into`.
unsafe extern "C" fn get_value(user: *mut c_void, name: *const c_char, take: Take, into: *mut c_void) -> c_int {
    // SAFETY: both are as the caller says, and live until this returns.
    let (caller, name) = unsafe { (&*user.cast::<Caller<'_>>(), CStr::from_ptr(name)) };
    let name = format!("{}/{}", caller.group, name.to_string_lossy());
    match caller.rendezvous.store.wait(&name, Some(caller.limit)) {
        Ok(value) => {
            // SAFETY: `take` and `into` belong together, as the caller says; it copies the bytes, which live through
            // the call.
            unsafe { take(into, value.as_ptr(), value.len()) };
            0
        }
        Err(_) => 1,
    }
}

/// Calls a foreign function with room for its error text.
fn call(function: impl FnOnce(*mut c_char, usize) -> c_int) -> std::result::Result<(), String> {
    let mut room = [0u8; 1024];
    match function(room.as_mut_ptr().cast(), room.len()) {
        0 => Ok(()),
        _ => {
            Err(CStr::from_bytes_until_nul(&room).map_or_else(|_| String::new(), |text| text.to_string_lossy().into()))
        }
    }
}

impl Gloo {
    /// Connects this rank with every other.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the shared object is missing or does not fit; [`tunesmith_base::Kind::Peer`]: a rank does not come.
    pub fn connect(rendezvous: Rendezvous, limits: Limits) -> Result<Self> {
        let world = rendezvous.world;
        Self::connect_as(rendezvous, world, "gloo", limits, Arc::default())
    }

    /// Connects as a rank of `world`, whose ranks meet in the store under the key `group`. All groups of a rank share
    /// `failed`.
    fn connect_as(
        rendezvous: Rendezvous,
        world: World,
        group: &str,
        limits: Limits,
        failed: Arc<AtomicBool>,
    ) -> Result<Self> {
        let functions = Functions::load(&gloo_library::find()?)?;
        let World { rank, size, .. } = world;
        let here = CString::new(rendezvous.store.here().to_string()).expect("an address has no NUL");
        let timeout = i64::try_from(limits.timeout.as_millis()).unwrap_or(i64::MAX);
        let caller = Caller { rendezvous: &rendezvous, group, limit: limits.timeout };
        let user = std::ptr::from_ref(&caller).cast_mut().cast();
        let mut ranks = std::ptr::null_mut();
        let connected = call(|error, room| {
            // SAFETY: `here`, `caller`, `ranks` and the room for the error's text outlive the call. The callbacks are
            // called on this thread, before the function returns, with `user`, which is `caller`.
            unsafe {
                (functions.connect)(
                    rank as c_int,
                    size as c_int,
                    here.as_ptr(),
                    timeout,
                    user,
                    set_value,
                    get_value,
                    &raw mut ranks,
                    error,
                    room,
                )
            }
        });
        connected.map_err(|why| {
            let cause = rendezvous.find_failed("connect");
            let rank = rendezvous.world.rank;
            Error::peer(format!("rank {rank}: connect: {cause} ({why})")).hint(LOST)
        })?;
        Ok(Self { functions, ranks: Mutex::new(Ranks(ranks)), rendezvous, world, limits, failed })
    }

    fn run(&self, operation: &str, act: impl FnOnce(*mut c_void, *mut c_char, usize) -> c_int) -> Result<()> {
        let began = Instant::now();
        let ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        let done = call(|error, room| act(ranks.0, error, room));
        drop(ranks);
        done.map_err(|why| {
            self.failed.store(true, std::sync::atomic::Ordering::Relaxed);
            let waited = began.elapsed().as_secs_f64();
            let cause = self.rendezvous.find_failed(operation);
            let rank = self.rendezvous.world.rank;
            Error::peer(format!("rank {rank}: {operation}: {cause}, after {waited:.1} s ({})", cut(&why))).hint(LOST)
        })
    }
}

/// Gloo's text without the file and line that it begins with.
fn cut(text: &str) -> &str {
    text.split_once("] ").map_or(text, |(_, rest)| rest).trim()
}

fn lengths(parts: &[Range<usize>]) -> Vec<i64> {
    parts.iter().map(|part| part.len() as i64).collect()
}

impl Collectives for Gloo {
    fn world(&self) -> World {
        self.world
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn name(&self) -> &'static str {
        "gloo"
    }

    fn all_to_all_bytes(&self, send: &[u8], parts: &[Range<usize>], receive: &mut [u8]) -> Result<()> {
        let World { rank, size, .. } = self.world;
        let own = parts[rank].len();
        assert!(parts.len() == size && receive.len() == own * size, "a part for each rank");
        assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), send.len(), "parts cover what is sent");
        let (sends, receives) = (lengths(parts), vec![own as i64; size]);
        self.run("all_to_all", |ranks, error, room| {
            // SAFETY: `run` gives the ranks, which live as long as `self`, and room for the error's text. The lengths,
            // one a rank, add up to those of the buffers, as was just asserted; all live through the call.
            unsafe {
                (self.functions.all_to_all)(
                    ranks,
                    send.as_ptr(),
                    sends.as_ptr(),
                    receive.as_mut_ptr(),
                    receives.as_ptr(),
                    error,
                    room,
                )
            }
        })
    }

    fn all_gather_bytes(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        assert_eq!(parts.len(), self.world.size, "a part for each rank");
        assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), data.len(), "parts cover the data");
        let lengths = lengths(parts);
        self.run("all_gather", |ranks, error, room| {
            // SAFETY: as in `all_to_all_bytes`: the lengths, one a rank, add up to that of the buffer, and both live
            // through the call.
            unsafe { (self.functions.all_gather)(ranks, data.as_mut_ptr(), lengths.as_ptr(), error, room) }
        })
    }

    fn broadcast_bytes(&self, data: &mut [u8], root: usize) -> Result<()> {
        assert!(root < self.world.size, "the root is one of the ranks");
        self.run("broadcast", |ranks, error, room| {
            // SAFETY: as in `all_to_all_bytes`: the buffer holds as many bytes and lives through the call; `root` is a
            // rank.
            unsafe { (self.functions.broadcast)(ranks, data.as_mut_ptr(), data.len(), root as c_int, error, room) }
        })
    }

    fn barrier(&self) -> Result<()> {
        self.run("barrier", |ranks, error, room| {
            // SAFETY: as in `all_to_all_bytes`: Gloo's ranks live as long as `self`, and there is room for the error's
            // text.
            unsafe { (self.functions.barrier)(ranks, error, room) }
        })
    }

    fn new_group(&self, group: Group) -> Result<Box<dyn Collectives>> {
        let World { rank, local_rank, .. } = self.rendezvous.world;
        let key = match group {
            Group::All => "gloo of all".to_owned(),
            Group::Node => format!("gloo of rank {}", rank - local_rank.min(rank)),
        };
        let world = self.rendezvous.world.within(group);
        Ok(Box::new(Self::connect_as(self.rendezvous.clone(), world, &key, self.limits, Arc::clone(&self.failed))?))
    }
}

impl Drop for Gloo {
    fn drop(&mut self) {
        if self.failed.load(std::sync::atomic::Ordering::Relaxed) {
            return;
        }
        let ranks = self.ranks.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the ranks are from `connect`, nobody else uses them (`self` is borrowed for writing), and they are
        // freed once.
        unsafe { (self.functions.free)(ranks.0) }
    }
}

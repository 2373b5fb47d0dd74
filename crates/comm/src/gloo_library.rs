//! Finds the Gloo engine's shared object, or builds it at first use. The program contains the source and the build script, so an
//! installed program needs no checkout.
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::{self, atomic};

/// The file name of the shared object that contains Gloo.
const LIBRARY: &str = "libtunesmith_gloo.so";
/// The variable with its path, if it is not near the program.
pub const LIBRARY_VARIABLE: &str = "TUNESMITH_GLOO";
const SCRIPT: &str = include_str!("../../../shim/gloo/build");
const SOURCE: &str = include_str!("../../../shim/gloo/tunesmith_gloo.cpp");

pub(super) const BUILD: &str =
    "install g++ and libgloo-dev, and the next run builds it; or run the ranks as threads with train.dp_ranks: N";

/// The shared object that the user names.
pub fn named() -> Option<PathBuf> {
    std::env::var_os(LIBRARY_VARIABLE).filter(|named| !named.is_empty()).map(PathBuf::from)
}

fn program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|error| Error::io("find", "this program", &error))
}

/// The path of the object that an installed program builds.
fn cache() -> Option<PathBuf> {
    Some(tunesmith_base::files::user_cache()?.join("gloo"))
}

/// Where the shared object is: as `TUNESMITH_GLOO` says, or beside the program, or in `gloo/` there or up to two folders
/// above (`target/gloo` for a program in `target/release`), or in the user's cache.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: nowhere.
pub fn find() -> Result<PathBuf> {
    if let Some(named) = named() {
        return Ok(named);
    }
    let program = program()?;
    let folders = program.ancestors().skip(1).take(3);
    let beside = folders.flat_map(|folder| [folder.join(LIBRARY), folder.join("gloo").join(LIBRARY)]);
    let mut candidates = beside.chain(cache().map(|folder| folder.join(LIBRARY)));
    candidates.find(|path| path.is_file()).ok_or_else(|| {
        let beside = program.display();
        Error::config(format!("several processes need the Gloo library, and {LIBRARY} is not beside {beside}"))
            .hint(BUILD)
    })
}

/// Where it is built: in cargo's folder if the program is there, else in the user's cache.
fn home() -> Result<PathBuf> {
    let program = program()?;
    let cargo = program.ancestors().skip(1).take(3).find(|folder| folder.join("CACHEDIR.TAG").is_file());
    let nowhere = || Error::config("the Gloo library cannot be built: HOME is not set").hint(BUILD);
    cargo.map(|target| target.join("gloo")).or_else(cache).ok_or_else(nowhere)
}

/// Builds it, unless another process has meanwhile, which `is_there` tells.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the machine cannot, and why; [`tunesmith_base::Kind::Io`].
pub fn build(is_there: impl Fn() -> Option<PathBuf>, say: &dyn Fn(&str)) -> Result<PathBuf> {
    let home = home()?;
    let failed = |doing: &str, path: &Path| {
        let (doing, path) = (doing.to_owned(), path.to_owned());
        move |error: std::io::Error| Error::io(&doing, &path, &error)
    };
    std::fs::create_dir_all(&home).map_err(failed("create", &home))?;
    // Ranks of one machine come at the same time.
    let lock_path = home.join(".lock");
    let lock = files::open_to_write(&lock_path, false).map_err(failed("create", &lock_path))?;
    lock.lock().map_err(failed("lock", &lock_path))?;
    if let Some(path) = is_there() {
        return Ok(path);
    }
    say("building the Gloo library (once; this takes a few seconds)");
    let source = home.join(format!(".source-{}.cpp", std::process::id()));
    atomic::write(&source, SOURCE.as_bytes()).map_err(failed("write", &source))?;
    let mut shell = Command::new("sh");
    shell.args(["-c", SCRIPT, "build"]).arg(&home).arg(&source).stdin(Stdio::null());
    let output = shell.output();
    // What stays is overwritten next time.
    let _ = std::fs::remove_file(&source);
    let output = output.map_err(failed("start", Path::new("sh")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = said.lines().find(|line| !line.trim().is_empty()).unwrap_or("the compiler said nothing");
        return Err(Error::config(format!("the Gloo library cannot be built: {last}")).hint(BUILD));
    }
    Ok(home.join(LIBRARY))
}

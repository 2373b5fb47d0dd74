//! How files are opened and how outputs are written. Every reader and writer uses these functions (a test in
//! `tests/it/tidy.rs` finds others), so that three rules hold everywhere:
//!
//! - **Regular files only.** A FIFO, a device, a socket or a folder in place of a file is refused before it is opened:
//!   reading one may block for ever, or never end.
//! - **An input is never replaced.** [`open`] records each file that is read, by its identity on disk. An output that
//!   is one of these is refused, whatever its spelling, also through links ([`output`]).
//! - **An output is complete or absent.** It is written under a temporary name in its folder, synced and renamed
//!   ([`atomic`]). The next process removes the remains of a killed one ([`temporary`]).
pub mod atomic;
pub mod disk;
pub mod output;
pub mod temporary;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The limit in bytes for files that are read as a whole, such as a configuration or an index. No real one is as long.
pub const SMALL: u64 = 64 << 20;

/// This program's folder in the user's cache: `$XDG_CACHE_HOME/tunesmith` or `~/.cache/tunesmith`; `None` if the system has none.
pub fn user_cache() -> Option<PathBuf> {
    let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    xdg.or_else(home).map(|cache| cache.join("tunesmith"))
}

/// A file's identity: device and inode.
type Identity = (u64, u64);

/// The inputs: each file that was opened with [`open`], and a path to it.
static INPUTS: Mutex<Option<HashMap<Identity, PathBuf>>> = Mutex::new(None);

fn identity(metadata: &Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}

/// Names what is not a regular file, such as `a FIFO`; `None` for a regular file.
fn special(metadata: &Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    if kind.is_file() {
        None
    } else if kind.is_dir() {
        Some("a folder")
    } else if kind.is_fifo() {
        Some("a FIFO")
    } else if kind.is_socket() {
        Some("a socket")
    } else {
        Some("a device")
    }
}

/// Names what is at `path` if it is not a regular file, such as `a folder`. A link is not followed: it is `a link`. `None`
/// for a regular file, and if nothing is there.
pub fn obstacle(path: &Path) -> Option<&'static str> {
    let metadata = fs::symlink_metadata(path).ok()?;
    if metadata.is_symlink() { Some("a link") } else { special(&metadata) }
}

/// Whether anything has this name: a file, or what cannot be read as one, such as a folder, a FIFO, or a link that leads nowhere. An
/// optional file that is there must be read, or refused: it is never passed over because it is of the wrong kind.
pub fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Why a path is refused: it does not lead to a regular file. The type tells this error from those that libraries report as
/// `InvalidInput`.
#[derive(Debug)]
struct NoRegularFile(String);

impl fmt::Display for NoRegularFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoRegularFile {}

fn no_regular_file(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, NoRegularFile(why.into()))
}

/// Whether this module refused a path because it leads to no regular file.
pub(crate) fn is_no_regular_file(error: &io::Error) -> bool {
    error.get_ref().and_then(|inner| inner.downcast_ref::<NoRegularFile>()).is_some()
}

fn regular(metadata: &Metadata) -> io::Result<()> {
    match special(metadata) {
        None => Ok(()),
        Some(_) if metadata.is_dir() => {
            Err(io::Error::new(io::ErrorKind::IsADirectory, "Is a directory, not a regular file"))
        }
        Some(kind) => Err(no_regular_file(format!("{kind}, not a regular file"))),
    }
}

/// Opens a regular file as an input of this process. No output of the process may replace it.
///
/// # Errors
/// The system's, or `InvalidInput` or `IsADirectory` where the path leads to no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    let file = open_own(path)?;
    let found = identity(&file.metadata()?);
    let mut inputs = INPUTS.lock().unwrap_or_else(PoisonError::into_inner);
    inputs.get_or_insert_default().insert(found, path.to_owned());
    Ok(file)
}

/// Opens a regular file that the program itself writes: a cache, a checkpoint, the metrics of a run.
///
/// # Errors
/// As [`open`].
pub fn open_own(path: &Path) -> io::Result<File> {
    match fs::metadata(path) {
        Ok(metadata) => regular(&metadata)?,
        // A link that leads nowhere must not be taken for a missing file.
        Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_symlink() => {
            return Err(no_regular_file("it is a link that leads nowhere"));
        }
        Err(error) => return Err(error),
    }
    // If the path has become a FIFO since the check, the open does not wait for a writer.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

/// Opens an input that belongs to a folder, such as the weights of a model. A link may lead to another place in the
/// folder or, in the cache of the Hugging Face Hub, to `blobs` beside `snapshots`, and nowhere else.
///
/// # Errors
/// As [`open`], and `InvalidInput` where a link leads out of the folder.
pub fn open_member(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    if path.is_symlink() {
        let (place, folder) = (path.canonicalize()?, real(path.parent().unwrap_or(Path::new("")))?);
        let snapshots = folder.ancestors().find(|part| part.file_name().is_some_and(|name| name == "snapshots"));
        let blobs = snapshots.and_then(Path::parent).map(|repository| repository.join("blobs"));
        if !place.starts_with(&folder) && blobs.is_none_or(|blobs| !place.starts_with(blobs)) {
            let why = format!("it is a link out of its folder, to {}", place.display());
            return Err(no_regular_file(why));
        }
    }
    Ok(file)
}

/// Reads an input of at most `limit` bytes.
///
/// # Errors
/// As [`open`], and `InvalidData` where the file is longer.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    bounded(open(path)?, limit)
}

/// Reads an input of at most `limit` bytes that is text.
///
/// # Errors
/// As [`read`], and `InvalidData` where the file is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    text(read(path, limit)?)
}

/// Reads at most `limit` bytes of a file that the program itself writes.
///
/// # Errors
/// As [`read`].
pub fn read_own(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    bounded(open_own(path)?, limit)
}

/// As [`read_own`], for text.
///
/// # Errors
/// As [`read_text`].
pub fn read_own_text(path: &Path, limit: u64) -> io::Result<String> {
    text(read_own(path, limit)?)
}

/// Reads a text file of the system, such as `/proc/meminfo`; `None` if it cannot be read.
pub fn system(path: impl AsRef<Path>) -> Option<String> {
    read_own_text(path.as_ref(), SMALL).ok()
}

fn bounded(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it is longer than {limit} bytes")));
    }
    Ok(bytes)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        io::Error::new(io::ErrorKind::InvalidData, format!("it is not UTF-8 at byte {at}"))
    })
}

/// Opens a file that the program itself writes in place, such as a lock, a log or a partial download, and creates it
/// where it is missing. Links are refused: one might lead to somebody else's file.
///
/// # Errors
/// The system's; the path is a link, has a second name (a hard link), or leads to no regular file.
pub fn open_to_write(path: &Path, append: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(!append).append(append).create(true);
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => return Err(is_link()),
        Ok(metadata) => {
            regular(&metadata)?;
            options.custom_flags(flags).open(path)
        }
        Err(_) => options.custom_flags(flags).open(path),
    };
    let file = file.map_err(|error| if error.raw_os_error() == Some(libc::ELOOP) { is_link() } else { error })?;
    let metadata = file.metadata()?;
    regular(&metadata)?;
    if metadata.nlink() > 1 {
        return Err(no_regular_file("it has a second name (a hard link)"));
    }
    Ok(file)
}

fn is_link() -> io::Error {
    no_regular_file("it is a symbolic link, expected a regular file")
}

/// The folder that holds `path`; `.` for a bare name.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether `path` still names the file that is open as `file`, and was not removed or replaced since.
pub fn is_at(file: &File, path: &Path) -> bool {
    matches!((file.metadata(), fs::metadata(path)), (Ok(held), Ok(named)) if identity(&held) == identity(&named))
}

/// Whether both paths lead to one file or folder on disk.
pub fn is_same(one: &Path, other: &Path) -> bool {
    matches!((fs::metadata(one), fs::metadata(other)), (Ok(one), Ok(other)) if identity(&one) == identity(&other))
}

/// The identities of what lies on the way to `path`, `path` itself among them, as far as it exists.
fn way_to(path: &Path) -> HashSet<Identity> {
    let place = real(path).unwrap_or_else(|_| path.to_owned());
    place.ancestors().filter_map(|part| Some(identity(&fs::metadata(part).ok()?))).collect()
}

/// How many folders below an input or an output are compared. A folder of weights or of a run has few.
const MOST_FOLDERS: usize = 4096;

/// The identities of `path` and of the folders in it. Links are not followed.
fn folders_in(path: &Path) -> HashSet<Identity> {
    let mut found = HashSet::new();
    let mut left = VecDeque::from([path.to_owned()]);
    while let Some(folder) = left.pop_front().filter(|_| found.len() < MOST_FOLDERS) {
        let Ok(metadata) = fs::metadata(&folder) else { continue };
        if !found.insert(identity(&metadata)) || !metadata.is_dir() {
            continue;
        }
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        left.extend(
            entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()),
        );
    }
    found
}

/// Whether `path` is `folder` or lies in it, whatever their spelling. They are compared by their place on disk too,
/// because a mount may show a folder a second time (`mount --bind`).
pub fn is_within(path: &Path, folder: &Path) -> bool {
    let by_name = matches!((real(path), real(folder)), (Ok(path), Ok(folder)) if path.starts_with(&folder));
    by_name || !way_to(path).is_disjoint(&folders_in(folder))
}

/// The path of the input that is the same file on disk as `metadata` describes, if there is one.
fn input_of(metadata: &Metadata) -> Option<PathBuf> {
    let inputs = INPUTS.lock().unwrap_or_else(PoisonError::into_inner);
    let path = inputs.as_ref()?.get(&identity(metadata))?;
    // The input may be gone, and its inode number may belong to another file now.
    fs::metadata(path).is_ok_and(|now| identity(&now) == identity(metadata)).then(|| path.clone())
}

/// Resolves links, `.` and `..` in a path whose last parts need not exist. A `..` behind a part that does not exist leads
/// to where it will lead once the part is created as a folder.
///
/// # Errors
/// The system's.
pub fn real(path: &Path) -> io::Result<PathBuf> {
    let mut place = PathBuf::new();
    for part in std::path::absolute(path)?.components() {
        if part == Component::ParentDir {
            place.pop();
        } else {
            place.push(part);
            if let Ok(real) = place.canonicalize() {
                place = real;
            }
        }
    }
    Ok(place)
}

/// Refuses a path with `..` behind a part that does not exist: it leads to another place as soon as that is created, so
/// that no check of it would hold.
///
/// # Errors
/// [`Kind::Config`](crate::Kind::Config), naming the part.
pub fn check_parents(path: &Path) -> crate::Result<()> {
    let is_missing = |path: &Path| fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    let mut before = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir && !before.as_os_str().is_empty() && is_missing(&before) {
            let message = format!("{}: `..` stands behind {}, which is not there", path.display(), before.display());
            let place = real(path).unwrap_or_else(|_| path.to_owned());
            return Err(crate::Error::config(message).hint(format!("write the path without it: {}", place.display())));
        }
        before.push(part);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn members_of_a_folder_stay_in_it() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for folder in ["repo/blobs", "repo/snapshots/main/sub", "model"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        for file in ["repo/blobs/etag", "secret", "model/real"] {
            fs::write(at(file), "x").unwrap();
        }
        for (link, target, inside) in [
            ("repo/snapshots/main/a", "../../blobs/etag", true),
            ("repo/snapshots/main/sub/b", "../../../blobs/etag", true),
            ("model/link", "real", true),
            ("model/out", "../secret", false),
            ("repo/snapshots/main/out", "../../../secret", false),
        ] {
            symlink(target, at(link)).unwrap();
            let opened = open_member(&at(link));
            assert_eq!(opened.is_ok(), inside, "{link}");
            assert!(inside || opened.unwrap_err().to_string().contains("out of its folder"));
        }
        symlink(at("model"), at("alias")).unwrap();
        open_member(&at("alias/link")).unwrap();
    }

    #[test]
    fn only_regular_files_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink(at("file"), at("link")).unwrap();
        symlink(at("nothing"), at("dangling")).unwrap();
        symlink(at("circle"), at("circle")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
        assert_eq!(read_text(&at("link"), 4).unwrap(), "text");
        assert!(read(&at("file"), 3).unwrap_err().to_string().contains("longer than 3 bytes"));
        for (name, expected) in
            [("fifo", "a FIFO"), ("socket", "a socket"), ("", "Is a directory"), ("circle", "level")]
        {
            let error = open(&at(name)).unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
        assert!(open(Path::new("/dev/zero")).unwrap_err().to_string().contains("a device"));
        assert!(open(&at("dangling")).unwrap_err().to_string().contains("leads nowhere"));
        assert_eq!(open(&at("missing")).unwrap_err().kind(), io::ErrorKind::NotFound);
        for name in ["link", "dangling", "circle"] {
            assert!(open_to_write(&at(name), true).unwrap_err().to_string().contains("symbolic link"), "{name}");
        }
        fs::hard_link(at("file"), at("second")).unwrap();
        assert!(open_to_write(&at("second"), false).unwrap_err().to_string().contains("second name"));
        assert!(open_to_write(&at("fifo"), false).unwrap_err().to_string().contains("a FIFO"));
        let error = crate::Error::io("read", at("fifo"), &open(&at("fifo")).unwrap_err());
        assert!(error.hint_text().is_some_and(|hint| hint.contains("put a regular file in its place")), "{error}");
        let obstacles = ["file", "link", "fifo", "socket", "", "missing"].map(|name| obstacle(&at(name)));
        let there = ["file", "link", "fifo", "dangling", "circle", "missing"].map(|name| is_there(&at(name)));
        assert_eq!(there, [true, true, true, true, true, false]);
        assert_eq!(obstacles, [None, Some("a link"), Some("a FIFO"), Some("a socket"), Some("a folder"), None]);
        assert!(!at("nothing").exists());
        let new = open_to_write(&at("new"), false).unwrap();
        assert!(is_at(&new, &at("new")) && !is_at(&new, &at("file")));
    }
}

//! Files and folders under temporary names: `NAME.tmp-PROCESS-NUMBER.EXTENSION`. Each is locked while its process
//! lives, so that others can tell what a dead process has left. A signal removes those of this process.
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Separates the name of the target from the number of the process that writes it.
const MARK: &str = ".tmp-";

/// Paths of the temporary files and folders of this process.
static OURS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn ours() -> MutexGuard<'static, Vec<PathBuf>> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A temporary file or folder of this process. Dropping it removes it, unless [`Temporary::place`] has moved it.
#[derive(Debug)]
pub struct Temporary {
    path: PathBuf,
    /// Held while it is written, so that no other process takes it for left over.
    _lock: File,
}

impl Temporary {
    /// Makes a new file beside `target`.
    ///
    /// # Errors
    /// The system's.
    pub fn file(target: &Path) -> io::Result<(Self, File)> {
        loop {
            let path = fresh(target);
            // From before the file is there until it is known: a signal comes before or after.
            let mut ours = ours();
            let file = match File::options().read(true).write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                file => file?,
            };
            let lock = file.try_clone().inspect_err(|_| remove(&path))?;
            if held(&lock, &path) {
                ours.push(path.clone());
                return Ok((Self { path, _lock: lock }, file));
            }
        }
    }

    /// Its temporary path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves it to its place with `rename`; a signal is answered before or after, not between.
    ///
    /// # Errors
    /// Those of `rename`, by which it is moved.
    pub fn place(self, rename: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let mut ours = ours();
        rename(&self.path)?;
        ours.retain(|path| *path != self.path);
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let mut ours = ours();
        if let Some(at) = ours.iter().position(|path| *path == self.path) {
            ours.swap_remove(at);
            remove(&self.path);
        }
    }
}

/// A temporary folder that other code creates and removes. While this lives it is locked, and a signal removes it.
#[derive(Debug)]
pub struct Watched {
    path: PathBuf,
    /// Without a lock the next process that writes the same may take it for left over.
    _lock: Option<File>,
}

impl Watched {
    /// Locks the folder at `path`, where the file system can.
    pub fn new(path: PathBuf) -> Self {
        let lock = File::open(&path).ok().filter(|file| file.try_lock().is_ok());
        ours().push(path.clone());
        Self { path, _lock: lock }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        ours().retain(|path| *path != self.path);
    }
}

/// Does `work`, such as two renames that belong together; a signal is answered before or after, not between.
pub fn undisturbed<T>(work: impl FnOnce() -> T) -> T {
    let _ours = ours();
    work()
}

/// A name beside `target` that nothing else of this process has.
fn fresh(target: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // The end of a name says what the file holds, also while it is read again.
    let end = target.extension().map_or_else(String::new, |end| format!(".{}", end.to_string_lossy()));
    let stem = target.file_stem().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!("{stem}{MARK}{}-{number}{end}", std::process::id()))
}

/// Takes the lock of a file that was just made; false where another process took it for left over and removed it.
fn held(file: &File, path: &Path) -> bool {
    match file.try_lock() {
        Ok(()) => super::is_at(file, path),
        Err(TryLockError::WouldBlock) => false,
        // A file system without locks: nobody can tell that it is left over, and nobody removes it.
        Err(TryLockError::Error(_)) => true,
    }
}

fn remove(path: &Path) {
    // What cannot be removed is removed by the next process that writes there.
    let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// Removes all temporary files and folders of this process, which is about to end. Other threads that publish or drop
/// one wait for ever from then on.
pub fn abandon() {
    let mut ours = ours();
    ours.drain(..).for_each(|path| remove(&path));
    // Whoever publishes or removes waits here, until the process has ended.
    std::mem::forget(ours);
}

/// As [`abandon`], but does nothing where another thread holds the list: for a process whose memory or stack is used
/// up, which must not wait.
pub fn try_abandon() {
    if let Ok(ours) = OURS.try_lock() {
        ours.iter().for_each(|path| remove(path));
        std::mem::forget(ours);
    }
}

/// Whether a name is that of a temporary file or folder; with `stem`, of that target.
fn is_temporary(name: &str, stem: Option<&str>) -> bool {
    let Some((before, after)) = name.rsplit_once(MARK) else { return false };
    let numbers = after.split('.').next().unwrap_or_default();
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = numbers.splitn(2, '-');
    parts.next().is_some_and(digits) && parts.next().is_none_or(digits) && stem.is_none_or(|stem| before == stem)
}

/// Removes temporary files and folders that dead processes have left for `target`, in its folder.
pub fn sweep(target: &Path) {
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let stem = target.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // Folders keep their whole name, files have their extension at the end.
    sweep_where(folder, |found| is_temporary(found, Some(&stem)) || is_temporary(found, Some(&name)));
}

/// Removes temporary files and folders that dead processes have left in a folder that belongs to tunesmith.
pub fn sweep_folder(folder: &Path) {
    sweep_where(folder, |found| is_temporary(found, None));
}

fn sweep_where(folder: &Path, is_wanted: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let Ok(kind) = entry.file_type() else { continue };
        if (kind.is_file() || kind.is_dir()) && is_wanted(&name) && is_abandoned(&entry.path()) {
            remove(&entry.path());
        }
    }
}

/// Whether no process, this one included, still holds a temporary file or folder. False where it cannot be opened or
/// locked.
pub fn is_abandoned(path: &Path) -> bool {
    if ours().iter().any(|ours| ours == path) {
        return false;
    }
    // What cannot be read or locked stays: it takes room and does no harm.
    File::open(path).is_ok_and(|file| file.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_dead_have_left_goes_and_what_lives_stays() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let names = || {
            let mut names: Vec<_> =
                fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        for dead in ["rows.tmp-1-0.jsonl", "rows.tmp-4194305.jsonl", "other.tmp-1-0.jsonl", "rows.tmp-mine.jsonl"] {
            fs::write(at(dead), "x").unwrap();
        }
        fs::create_dir(at("rows.jsonl.tmp-12")).unwrap();
        fs::write(at("rows.jsonl.tmp-12/file"), "x").unwrap();
        let (living, _file) = Temporary::file(&at("rows.jsonl")).unwrap();
        sweep(&at("rows.jsonl"));
        let own = living.path().file_name().unwrap().to_str().unwrap().to_owned();
        let mut expected = vec!["other.tmp-1-0.jsonl".to_owned(), own, "rows.tmp-mine.jsonl".to_owned()];
        expected.sort();
        assert_eq!(names(), expected);
        sweep_folder(root.path());
        living.place(|path| fs::rename(path, at("rows.jsonl"))).unwrap();
        assert_eq!(names(), ["rows.jsonl", "rows.tmp-mine.jsonl"]);
        let (given_up, _file) = Temporary::file(&at("rows.jsonl")).unwrap();
        drop(given_up);
        assert_eq!(names(), ["rows.jsonl", "rows.tmp-mine.jsonl"]);
    }
}

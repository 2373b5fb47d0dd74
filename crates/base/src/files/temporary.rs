//! Files and folders under temporary names: `NAME.tmp-PROCESS-NUMBER.EXTENSION`. Each is locked while its process
//! lives, so that other processes recognize the remains of a dead one. A signal removes those of this process.
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::disk::{Disk, DiskFile, RealDisk};
use super::parent;

/// Separates the name of the target from the number of the process that writes it.
const MARK: &str = ".tmp-";

/// How often a new file or folder may vanish before it is locked, because another process takes it for a leftover.
const TRIES: usize = 100;

/// The error if each of [`TRIES`] new files was taken away by another process.
fn taken_away() -> io::Error {
    io::Error::other(
        "each new temporary file was removed or replaced at once: another process, or the file system, takes it away",
    )
}

/// Paths of the temporary files and folders of this process.
static OURS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn ours() -> MutexGuard<'static, Vec<PathBuf>> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A temporary file of this process. Dropping it removes it, unless [`Temporary::move_to`] has moved it.
pub(super) struct Temporary<'d> {
    disk: &'d dyn Disk,
    path: PathBuf,
    /// The lock, so that no other process takes the file for a leftover.
    _lock: File,
}

impl<'d> Temporary<'d> {
    /// Creates a new file beside `target`.
    pub fn file(disk: &'d dyn Disk, target: &Path) -> io::Result<(Self, Box<dyn DiskFile>)> {
        for _ in 0..TRIES {
            let path = free(target);
            // Held from before the file exists until it is registered, so that a signal comes before or after, not in between.
            let mut ours = ours();
            let file = match disk.create(&path) {
                // A process of another machine may have this one's number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                file => file?,
            };
            let lock = file.file().try_clone().inspect_err(|_| remove(&path))?;
            if held(&lock, &path) {
                ours.push(path.clone());
                return Ok((Self { disk, path, _lock: lock }, file));
            }
        }
        Err(taken_away())
    }

    /// The temporary path, valid until [`Temporary::move_to`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames it. A signal is handled before or after, not in between.
    pub fn move_to(self, target: &Path) -> io::Result<()> {
        let mut ours = ours();
        self.disk.rename(&self.path, target)?;
        ours.retain(|path| *path != self.path);
        Ok(())
    }
}

impl Temporary<'_> {
    /// As [`Temporary::move_to`], but replaces nothing.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`]: something is there.
    pub fn move_to_free(self, target: &Path) -> io::Result<()> {
        match fs::hard_link(&self.path, target) {
            // Dropping this removes the temporary name.
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) => {}
        }
        // The file system has no links: an empty file takes the place first.
        File::create_new(target)?;
        self.move_to(target).inspect_err(|_| remove(target))
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        let mut ours = ours();
        if let Some(at) = ours.iter().position(|path| *path == self.path) {
            ours.swap_remove(at);
            // What cannot be removed is removed by the next process that writes there.
            let _ = self.disk.remove(&self.path);
        }
    }
}

/// Creates a file without a name in the folder of `target`, so that nothing of it remains however the process ends.
/// Also shows whether the folder is writable.
///
/// # Errors
/// The system's.
pub fn unnamed(target: &Path) -> io::Result<File> {
    let (_removed, file) = Temporary::file(&RealDisk, target)?;
    file.file().try_clone()
}

/// Protects a temporary folder that other code creates and removes: while this lives, the folder is locked, and a signal
/// removes it.
#[derive(Debug)]
pub struct TemporaryFolder {
    path: PathBuf,
    /// Without the lock, the next process that writes the same target may take the folder for a leftover.
    _lock: Option<File>,
}

impl TemporaryFolder {
    /// Creates the folder at `path` and locks it.
    ///
    /// # Errors
    /// The system's; another process removes it each time.
    pub fn create(disk: &dyn Disk, path: &Path) -> io::Result<Self> {
        for _ in 0..TRIES {
            disk.create_dir(path)?;
            if let Some(folder) = Self::new(path.to_owned()) {
                return Ok(folder);
            }
        }
        Err(taken_away())
    }

    /// Locks the folder at `path`, which was just created, if the file system can. `None` if another process has taken
    /// it for a leftover before that and removed it: create it again.
    pub fn new(path: PathBuf) -> Option<Self> {
        let mut ours = ours();
        // Waits for a process that is removing the folder.
        let lock = File::open(&path).ok().filter(|file| file.lock().is_ok());
        let is_there = lock.as_ref().map_or_else(|| path.exists(), |file| super::is_at(file, &path));
        is_there.then(|| {
            ours.push(path.clone());
            Self { path, _lock: lock }
        })
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        ours().retain(|path| *path != self.path);
    }
}

/// Runs `work`, such as two renames that belong together. A signal is handled before or after it, not in between.
pub fn without_signals<T>(work: impl FnOnce() -> T) -> T {
    let _ours = ours();
    work()
}

/// A name in the folder of `target` that this process has not used yet.
fn fresh(target: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // Keeps the extension, because readers of the temporary file tell its format by it.
    let end = target.extension().map_or_else(String::new, |end| format!(".{}", end.to_string_lossy()));
    let stem = target.file_stem().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!("{stem}{MARK}{}-{number}{end}", std::process::id()))
}

/// The first name from [`fresh`] that does not exist yet. An earlier process may have had the same process number.
fn free(target: &Path) -> PathBuf {
    loop {
        let path = fresh(target);
        if !super::is_there(&path) {
            return path;
        }
    }
}

/// Locks a file that was just created. Returns false if another process took it for a leftover and removed it.
fn held(file: &File, path: &Path) -> bool {
    match file.try_lock() {
        Ok(()) => super::is_at(file, path),
        Err(TryLockError::WouldBlock) => false,
        // On a file system without locks, no process can tell whether the file is left over, so none removes it.
        Err(TryLockError::Error(_)) => true,
    }
}

fn remove(path: &Path) {
    // What cannot be removed is removed by the next process that writes there.
    let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// Removes all temporary files and folders of this process, which is about to end. Threads that commit or drop one after
/// this wait forever.
pub fn abandon() {
    let mut ours = ours();
    ours.drain(..).for_each(|path| remove(&path));
    // Whoever publishes or removes waits here, until the process has ended.
    std::mem::forget(ours);
}

/// As [`abandon`], but does nothing if another thread holds the list: for a process that has run out of memory or stack
/// and must not wait.
pub(crate) fn try_abandon() {
    if let Ok(ours) = OURS.try_lock() {
        ours.iter().for_each(|path| remove(path));
        std::mem::forget(ours);
    }
}

/// The final name of a temporary file (`STEM.tmp-PROCESS-NUMBER.EXTENSION`) or folder (`NAME.tmp-PROCESS`); `None` for
/// a name of another form.
pub fn target_name(name: &str) -> Option<String> {
    let (stem, rest) = name.rsplit_once(MARK)?;
    let (numbers, extension) = rest.split_at(rest.find('.').unwrap_or(rest.len()));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut numbers = numbers.splitn(2, '-');
    let is_temporary = numbers.next().is_some_and(is_number) && numbers.next().is_none_or(is_number);
    (is_temporary && !stem.is_empty()).then(|| format!("{stem}{extension}"))
}

/// Whether a name is `NAME.old-PROCESS`: what stood at `NAME` while a process put a new folder there.
pub fn is_replaced(found: &str, name: &str) -> bool {
    let process = found.strip_prefix(name).and_then(|rest| rest.strip_prefix(".old-"));
    process.is_some_and(|process| !process.is_empty() && process.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What to do where nothing is at `target`, but a process that was killed while it replaced the folder there has left the older
/// one beside it; `None` if it has left none.
pub fn how_to_put_back(target: &Path) -> Option<String> {
    let name = target.file_name().filter(|_| !super::is_there(target))?.to_string_lossy();
    let entries = fs::read_dir(parent(target)).into_iter().flatten().flatten();
    let old = entries.map(|entry| entry.path()).find(|path| {
        path.file_name().is_some_and(|found| is_replaced(&found.to_string_lossy(), &name)) && path.is_dir()
    })?;
    let (old, target) = (old.display(), target.display());
    Some(format!(
        "a command was killed while it replaced {target}, and left the older folder as {old}: rename it, or run that command again"
    ))
}

/// Removes temporary files and folders that dead processes have left for `target`, in its folder.
pub fn sweep(target: &Path) {
    let name = target.file_name().unwrap_or_default();
    sweep_where(parent(target), |found| target_name(found).is_some_and(|found| *name == *found));
}

/// Removes temporary files and folders that dead processes have left in a folder that belongs to tunesmith.
pub fn sweep_folder(folder: &Path) {
    sweep_where(folder, |found| target_name(found).is_some());
}

fn sweep_where(folder: &Path, is_wanted: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let Ok(kind) = entry.file_type() else { continue };
        if (kind.is_file() || kind.is_dir()) && is_wanted(&name) {
            remove_abandoned(&entry.path());
        }
    }
}

/// Removes a temporary file or folder if the process that made it has ended.
pub fn remove_abandoned(path: &Path) {
    if !is_ours(path) {
        remove_unlocked(path);
    }
}

fn remove_unlocked(path: &Path) {
    if let Some(_held) = unlocked(path) {
        remove(path);
    }
}

/// The lock of a temporary file or folder whose process has ended; `None` if that process lives, or if the file cannot be
/// opened or locked. Hold it as long as the answer matters: a process that has just created the file locks it next.
pub fn abandoned(path: &Path) -> Option<File> {
    if is_ours(path) { None } else { unlocked(path) }
}

fn is_ours(path: &Path) -> bool {
    ours().iter().any(|ours| ours == path)
}

/// The lock of a file that nobody has locked.
fn unlocked(path: &Path) -> Option<File> {
    // A file that cannot be opened or locked stays: it takes up space, but does no harm.
    File::open(path).ok().filter(|file| file.try_lock().is_ok())
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
        let (living, _file) = Temporary::file(&RealDisk, &at("rows.jsonl")).unwrap();
        sweep(&at("rows.jsonl"));
        let own = living.path().file_name().unwrap().to_str().unwrap().to_owned();
        let mut expected = vec!["other.tmp-1-0.jsonl".to_owned(), own, "rows.tmp-mine.jsonl".to_owned()];
        expected.sort();
        assert_eq!(names(), expected);
        sweep_folder(root.path());
        living.move_to(&at("rows.jsonl")).unwrap();
        assert_eq!(names(), ["rows.jsonl", "rows.tmp-mine.jsonl"]);
        let (given_up, _file) = Temporary::file(&RealDisk, &at("rows.jsonl")).unwrap();
        drop(given_up);
        assert_eq!(names(), ["rows.jsonl", "rows.tmp-mine.jsonl"]);
        unnamed(&at("rows.jsonl")).unwrap();
        assert_eq!(names(), ["rows.jsonl", "rows.tmp-mine.jsonl"]);
    }

    #[test]
    fn writers_who_sweep_a_shared_folder_do_not_take_the_files_of_others() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("rows.jsonl");
        // As another process, which does not know `OURS`.
        let sweep_as_others_do =
            || fs::read_dir(root.path()).unwrap().flatten().for_each(|entry| remove_unlocked(&entry.path()));
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..500 {
                            let (file, _) = Temporary::file(&RealDisk, &target).unwrap();
                            assert!(file.path().exists(), "what is locked is nobody's leftover");
                            let folder = loop {
                                let path = fresh(&target);
                                fs::create_dir(&path).unwrap();
                                if let Some(folder) = TemporaryFolder::new(path) {
                                    break folder;
                                }
                            };
                            assert!(folder.path.is_dir());
                            fs::remove_dir(&folder.path).unwrap();
                        }
                    })
                })
                .collect();
            while writers.iter().any(|writer| !writer.is_finished()) {
                sweep_as_others_do();
            }
        });
    }

    #[test]
    fn a_temporary_name_leads_back_to_its_target() {
        for (name, target) in [
            ("latest.tmp-12-3", Some("latest")),
            ("config.resolved.tmp-12-3.yaml", Some("config.resolved.yaml")),
            ("rows.jsonl.tmp-12", Some("rows.jsonl")),
            ("checkpoint-000200.tmp-", None),
            ("checkpoint-000200.tmp-x", None),
            (".tmp-1-2", None),
            ("latest", None),
        ] {
            assert_eq!(target_name(name).as_deref(), target, "{name}");
        }
        let (made, _file) = Temporary::file(&RealDisk, &std::env::temp_dir().join("a.b.c")).unwrap();
        assert_eq!(target_name(made.path().file_name().unwrap().to_str().unwrap()).as_deref(), Some("a.b.c"));
    }
}

//! The rules for outputs: an input is never replaced, and an existing file only if the user asked for it.
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::atomic::AtomicFile;
use super::{check_parents, input_of, is_within, special, temporary};
use crate::{Error, Kind, Result};

/// What happens to an existing file.
#[derive(Debug, Clone, Copy)]
pub enum Existing {
    /// Refuses to write; the hint names the flag that replaces the file.
    Keep(&'static str),
    /// Replaces the file: the user gave the flag.
    Replace,
    /// Replaces the file if the function returns true: an earlier run of the same command wrote it. Otherwise refuses,
    /// and the hint names the flag that replaces it, unless that is empty.
    Ours(fn(&Path) -> bool, &'static str),
}

impl Existing {
    /// [`Existing::Replace`] where `flag` was given, else [`Existing::Keep`].
    pub const fn unless(flag: &'static str, given: bool) -> Self {
        if given { Self::Replace } else { Self::Keep(flag) }
    }
}

/// Decides whether the file `path` may be written. `inputs` are files and folders that will be read; those that
/// [`super::open`] has opened are known. Returns where to write: `path`, or the file that it is a link to.
///
/// # Errors
/// [`Kind::Config`]: an input, a file that stays, or a `..` behind a part that does not exist. [`Kind::Io`]: no regular file, a link that leads nowhere, a file
/// in place of a folder.
pub fn check_output_file(path: &Path, existing: Existing, inputs: &[PathBuf]) -> Result<PathBuf> {
    let refuse = |why: &str| {
        let message = format!("cannot write {}: {why}", path.display());
        Err(Error::new(Kind::Io, message).hint("name a file that is new, or a regular one"))
    };
    if path.file_name().is_none() {
        return refuse("it is no name of a file");
    }
    check_parents(path)?;
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if path.is_symlink() {
                return refuse("it is a link that leads nowhere");
            }
            return Ok(path.to_owned());
        }
        Err(error) => return Err(Error::io("write", path, &error)),
    };
    if let Some(kind) = special(&metadata) {
        return refuse(&format!("it is {kind}, expected a file"));
    }
    let place = path.canonicalize().map_err(|error| Error::io("write", path, &error))?;
    let inside = |folder: &Path| folder.is_dir() && is_within(&place, folder);
    let read = input_of(&metadata)
        .or_else(|| inputs.iter().find(|input| super::is_same(input, path) || inside(input)).cloned());
    if let Some(read) = read {
        let same = if read == path { String::new() } else { format!(" ({})", read.display()) };
        return Err(Error::config(format!("cannot write {}: it is an input of this command{same}", path.display()))
            .hint("name another file: what is read is never replaced"));
    }
    let stays = || Error::config(format!("{} is there already", path.display()));
    match existing {
        Existing::Replace => Ok(place),
        Existing::Ours(is_ours, _) if is_ours(&place) => Ok(place),
        Existing::Ours(_, "") => Err(stays().hint("tunesmith did not write it: move it away, or name another place")),
        Existing::Ours(_, flag) => Err(stays().hint(format!(
            "tunesmith did not write it, or it was changed since: name another file, or replace it with {flag}"
        ))),
        Existing::Keep(flag) => Err(stays().hint(format!("name another file, or replace it with {flag}"))),
    }
}

/// An output that the user has named, under a temporary name until it is [published](Self::publish). Dropping it removes
/// the file.
pub struct OutputFile {
    file: AtomicFile<'static>,
    target: PathBuf,
    existing: Existing,
    inputs: Vec<PathBuf>,
}

impl OutputFile {
    /// Starts the file and creates its folder. `inputs` are files and folders that will be read.
    ///
    /// # Errors
    /// Those of [`check_output_file`]; [`Kind::Io`]: its folder cannot be written to.
    pub fn create(target: &Path, existing: Existing, inputs: &[PathBuf]) -> Result<Self> {
        let place = check_output_file(target, existing, inputs)?;
        temporary::sweep(&place);
        let file = AtomicFile::create(&place).map_err(|error| Error::io("write", target, &error))?;
        Ok(Self { file, target: target.to_owned(), existing, inputs: inputs.to_vec() })
    }

    /// The temporary path, where a reader finds what is [synced](Self::sync).
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The path that the user gave.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Writes everything to the disk (`fsync`).
    ///
    /// # Errors
    /// [`Kind::Io`].
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync().map_err(|error| Error::io("write", &self.target, &error))
    }

    /// Renames the file to its target, after checking again that it may be written there.
    ///
    /// # Errors
    /// As [`OutputFile::create`].
    pub fn publish(self) -> Result<()> {
        // What was read since is known by now, and others may have written meanwhile.
        let Self { file, target, existing, inputs } = self;
        // What appears after the check is not replaced, unless the user asked for it.
        let replaces = match existing {
            Existing::Replace => true,
            Existing::Keep(_) => false,
            Existing::Ours(..) => super::is_there(&target),
        };
        let place = check_output_file(&target, existing, &inputs)?;
        file.commit_as(&place, replaces).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                Error::config(format!("{} is there already: it was written while this command ran", target.display()))
                    .hint("name another file, or run the command again")
            }
            _ => Error::io("write", &target, &error),
        })
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Refuses an output folder that is, contains, or lies in one of `inputs`: writing it would destroy what is read.
///
/// # Errors
/// [`Kind::Config`], about `--output`, or a `..` behind a part that does not exist.
pub fn check_no_overlap(output: &Path, inputs: &[PathBuf]) -> Result<()> {
    check_parents(output)?;
    for input in inputs {
        if is_within(output, input) || is_within(input, output) {
            return Err(Error::config(format!("--output {}: {} is read from", output.display(), input.display()))
                .hint("name a place apart from the base and the adapters"));
        }
    }
    Ok(())
}

/// Decides whether the folder `path` may be created or replaced. A folder is replaced as a whole, so that every file in
/// it must be one that tunesmith wrote: `written` returns the names in its manifest, if it has one.
///
/// # Errors
/// As [`check_output_file`].
pub fn check_output_folder(
    path: &Path,
    overwrite: bool,
    inputs: &[PathBuf],
    written: impl FnOnce(&Path) -> Option<Vec<String>>,
) -> Result<()> {
    check_no_overlap(path, inputs)?;
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound && !path.is_symlink() => return Ok(()),
        Err(error) => return Err(Error::io("write", path, &error)),
    };
    let there = || Error::config(format!("{} is there already", path.display()));
    if let Some(kind) = special(&metadata).filter(|kind| *kind != "a folder") {
        let message = format!("cannot write {}: it is {kind}, expected a folder", path.display());
        return Err(Error::new(Kind::Io, message).hint("name another folder with --output"));
    }
    if metadata.is_file() {
        return Err(there().hint("it is a file: name a folder with --output"));
    }
    if path.is_symlink() {
        return Err(there().hint("it is a link to a folder: name the folder itself with --output"));
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(|error| Error::io("read", path, &error))? {
        let entry = entry.map_err(|error| Error::io("read", path, &error))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    if names.is_empty() {
        return Ok(());
    }
    if !overwrite {
        return Err(there().hint("name another with --output, or replace it with --overwrite"));
    }
    let Some(written) = written(path) else {
        let message = format!("{} is not a folder that tunesmith wrote: it is not replaced", path.display());
        return Err(Error::config(message).hint("name another with --output"));
    };
    names.sort();
    if let Some(other) = names.into_iter().find(|name| !written.contains(name)) {
        let message =
            format!("{} holds {other:?}, which tunesmith did not write: the folder is not replaced", path.display());
        return Err(Error::config(message).hint("move it away, or name another folder with --output"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn an_input_is_refused_by_every_name_that_it_has() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("folder/inner")).unwrap();
        fs::write(at("rows"), "rows").unwrap();
        fs::write(at("folder/config.json"), "{}").unwrap();
        symlink(at("rows"), at("link")).unwrap();
        symlink(at("link"), at("link-to-link")).unwrap();
        symlink(at("folder"), at("alias")).unwrap();
        fs::hard_link(at("rows"), at("hard")).unwrap();
        let inputs = [at("rows"), at("folder")];
        let names = ["rows", "./rows", "folder/../rows", "link", "link-to-link", "hard", "folder/config.json"];
        for name in names.into_iter().chain(["alias/config.json", "alias/inner/../config.json"]) {
            for existing in [Existing::Replace, Existing::Keep("--overwrite"), Existing::Ours(|_| true, "")] {
                let error = check_output_file(&at(name), existing, &inputs).unwrap_err();
                assert!(error.kind() == Kind::Config && error.message().contains("is an input"), "{name}: {error}");
            }
        }
        // What was read is an input without being named.
        super::super::open(&at("rows")).unwrap();
        assert!(check_output_file(&at("hard"), Existing::Replace, &[]).unwrap_err().message().contains("is an input"));
        // A new file beside inputs replaces nothing.
        assert_eq!(check_output_file(&at("folder/new"), Existing::Keep("-f"), &inputs).unwrap(), at("folder/new"));
    }

    #[test]
    fn what_is_there_stays_unless_it_is_ours_or_replacing_was_asked_for() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::write(at("mine"), "mine").unwrap();
        symlink(at("mine"), at("link")).unwrap();
        symlink(at("nothing"), at("dangling")).unwrap();
        symlink(at("circle"), at("circle")).unwrap();
        let error = check_output_file(&at("mine"), Existing::Keep("--force"), &[]).unwrap_err();
        assert!(error.kind() == Kind::Config && error.hint_text().unwrap().contains("--force"), "{error}");
        assert!(check_output_file(&at("mine"), Existing::Ours(|_| false, ""), &[]).is_err());
        let real = at("mine").canonicalize().unwrap();
        assert_eq!(check_output_file(&at("link"), Existing::Replace, &[]).unwrap(), real);
        assert_eq!(check_output_file(&at("mine"), Existing::Ours(|_| true, ""), &[]).unwrap(), real);
        for name in ["dangling", "circle", ""] {
            let error = check_output_file(&at(name), Existing::Replace, &[]).unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{name}: {error}");
        }
        assert_eq!(check_output_file(Path::new("/dev/null"), Existing::Replace, &[]).unwrap_err().kind(), Kind::Io);
    }

    #[test]
    fn a_step_back_behind_a_missing_folder_is_refused_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("base")).unwrap();
        fs::write(at("rows"), "rows").unwrap();
        for name in ["new/../rows", "new/../other", "base/new/../../rows"] {
            for existing in [Existing::Replace, Existing::Keep("--overwrite")] {
                let error = OutputFile::create(&at(name), existing, &[at("rows")]).err().expect(name);
                assert!(error.kind() == Kind::Config && error.message().contains("`..` stands behind"), "{error}");
            }
        }
        for name in ["new/../base", "new/../base/inner", "new/.."] {
            let error = check_output_folder(&at(name), true, &[at("base")], |_| None).unwrap_err();
            assert!(error.kind() == Kind::Config && error.message().contains("`..` stands behind"), "{error}");
            let place = super::super::real(&at(name)).unwrap();
            assert!(error.hint_text().unwrap().ends_with(&place.display().to_string()), "{error}");
            check_no_overlap(&place, &[at("base")]).unwrap_err();
        }
        assert_eq!(fs::read_dir(&root).unwrap().count(), 2);
        // Behind a folder that exists, it leads where it says.
        check_output_folder(&at("base/../other"), false, &[at("base")], |_| None).unwrap();
    }

    #[test]
    fn of_outputs_that_are_published_at_once_the_first_stays() {
        const ROUNDS: usize = 20;
        let root = tempfile::tempdir().unwrap();
        for round in 0..ROUNDS {
            let target = root.path().join(format!("rows-{round}.jsonl"));
            let start = |text: &str| {
                let mut file = OutputFile::create(&target, Existing::Keep("--overwrite"), &[]).unwrap();
                file.write_all(text.as_bytes()).unwrap();
                file
            };
            let files = ["one", "two"].map(|text| (text, start(text)));
            let done: Vec<_> = std::thread::scope(|scope| {
                files
                    .map(|(text, file)| scope.spawn(move || (text, file.publish())))
                    .map(|it| it.join().unwrap())
                    .into()
            });
            let [first] = done.iter().filter(|(_, done)| done.is_ok()).collect::<Vec<_>>()[..] else {
                panic!("one of them is published");
            };
            assert_eq!(fs::read_to_string(&target).unwrap(), first.0);
            let error = done.iter().find_map(|(_, done)| done.as_ref().err()).unwrap();
            assert!(error.kind() == Kind::Config && error.message().contains("is there already"), "{error}");
        }
        assert_eq!(fs::read_dir(&root).unwrap().count(), ROUNDS, "no temporary file is left");
    }

    #[test]
    fn an_output_looks_again_before_it_is_published() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("rows.jsonl");
        let mut late = OutputFile::create(&target, Existing::Keep("--overwrite"), &[]).unwrap();
        late.write_all(b"late").unwrap();
        fs::write(&target, "first").unwrap();
        assert!(late.publish().unwrap_err().message().contains("is there already"));
        assert_eq!(fs::read_to_string(&target).unwrap(), "first");
        assert_eq!(fs::read_dir(&root).unwrap().count(), 1);
    }

    #[test]
    fn an_output_folder_that_is_holds_or_lies_in_what_is_read_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("base/inner")).unwrap();
        fs::create_dir_all(at("other")).unwrap();
        symlink(at("base"), at("link")).unwrap();
        let reads = [at("base"), at("adapter-of-the-hub")];
        let claim = |name: &str, overwrite, written: Option<&str>| {
            check_output_folder(&at(name), overwrite, &reads, |_| written.map(|name| vec![name.to_owned()]))
        };
        for output in ["base", "base/inner", "base/new/deeper", "link", "link/new", "other/../base", "."] {
            let error = claim(output, true, Some("file")).expect_err(output);
            assert!(error.kind() == Kind::Config && error.message().contains("is read from"), "{error}");
        }
        for output in ["base-merged", "other", "other/base", "new/deeper/still"] {
            claim(output, false, None).unwrap();
        }
        fs::write(at("other/file"), "mine").unwrap();
        let refused = |overwrite, written| claim("other", overwrite, written).unwrap_err().message().to_owned();
        assert!(refused(false, Some("file")).contains("is there already"));
        assert!(refused(true, None).contains("not a folder that tunesmith wrote"));
        claim("other", true, Some("file")).unwrap();
        fs::write(at("other/notes"), "mine").unwrap();
        assert!(refused(true, Some("file")).contains("\"notes\", which tunesmith did not write"));
    }
}

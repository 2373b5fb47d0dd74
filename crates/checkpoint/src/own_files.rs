//! Protects the user's files: the program removes or replaces a folder only if it has written every file in it. The
//! rule holds for `--overwrite`, for removing old checkpoints, for leftovers of killed runs, and for folders that are
//! replaced.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::layout::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST, MODEL_WEIGHTS, OPTIMIZER, PART, STAMP, STATE};
use super::manifest::Manifest;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::Disk;
use tunesmith_base::files::{self, atomic};
use tunesmith_config::arch::COMPANIONS;
use tunesmith_config::vision::ENCODER_FILES;

/// The default folder for TensorBoard's event files.
pub const EVENTS: &str = "tb";
/// How the name of an event file begins.
const EVENT_FILE: &str = "events.out.tfevents.";
/// Names of files that the program writes, besides [`COMPANIONS`] and shards of a model.
const NAMES: [&str; 11] = [
    MANIFEST,
    OPTIMIZER,
    PART,
    STAMP,
    STATE,
    MODEL_WEIGHTS,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "config.json",
    "model.safetensors.index.json",
    "README.md",
];

/// Whether the program writes files of this name.
fn is_written(name: &str) -> bool {
    let is_shard = name.starts_with("model-") && name.ends_with(".safetensors");
    is_shard || NAMES.contains(&name) || COMPANIONS.contains(&name) || ENCODER_FILES.as_flattened().contains(&name)
}

/// The first file in the folder `dir` that the program did not write, or `dir` itself if it is a file or a link. `None` if all
/// files are the program's, or if `dir` does not exist.
///
/// The manifest lists the program's files. Without a readable manifest, names decide: a folder with a temporary name, a stamp
/// or a damaged manifest may hold files of the known names, and the folder `tb` event files of `TensorBoard`.
///
/// # Errors
/// The errors of the file system.
pub fn foreign_in(dir: &Path) -> io::Result<Option<PathBuf>> {
    match fs::symlink_metadata(dir) {
        Ok(metadata) if !metadata.is_dir() => return Ok(Some(dir.to_owned())),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let own = dir.file_name().unwrap_or_default().to_string_lossy();
    let listed = Manifest::read(dir).ok().map(|manifest| manifest.names());
    let temporary = [".tmp-", ".old-", ".del-"].iter().any(|mark| own.contains(mark));
    let signed = temporary || [MANIFEST, STAMP].iter().any(|name| dir.join(name).is_file());
    let is_ours = |name: &str| match &listed {
        Some(names) => names.iter().any(|listed| listed == name),
        None => (signed && is_written(name)) || (own == EVENTS && name.starts_with(EVENT_FILE)),
    };
    let mut entries = fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if entry.file_type()?.is_dir() || !entry.file_name().to_str().is_some_and(is_ours) {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

/// The first free name `NAME.kept-N` next to `path`, to which a file or folder of someone else is moved.
pub fn kept_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let named = |number: u32| {
        let mut name = name.to_owned();
        name.push(format!(".kept-{number}"));
        path.with_file_name(name)
    };
    let mut number = 1;
    while fs::symlink_metadata(named(number)).is_ok() {
        number += 1;
    }
    named(number)
}

/// Removes the folder `dir`, whose proper place is `place`. If it has a file that the program did not write, the folder
/// is renamed to [`kept_name`] of `place` instead, and the new name is returned.
///
/// # Errors
/// The errors of the file system.
pub fn discard(disk: &dyn Disk, dir: &Path, place: &Path) -> io::Result<Option<PathBuf>> {
    if foreign_in(dir)?.is_none() {
        return disk.remove(dir).map(|()| None);
    }
    let kept = kept_name(place);
    disk.rename(dir, &kept).map(|()| Some(kept))
}

/// Replaces a small text file of a run in one step ([`atomic::write_on`]). Refuses to replace a folder, a link or a
/// device: the program did not put it there.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn replace_file(disk: &dyn Disk, path: &Path, text: &str) -> Result<()> {
    if let Some(found) = files::obstacle(path) {
        let message = format!("cannot write {}: {found} stands there, expected a regular file", path.display());
        return Err(Error::new(tunesmith_base::Kind::Io, message).hint("move it away, or set another train.output_dir"));
    }
    atomic::write_on(disk, path, text.as_bytes()).map_err(|error| Error::io("write", path, &error))
}

#[cfg(test)]
mod tests {
    use super::super::publish::publish_folder;
    use super::*;
    use tunesmith_base::files::disk::RealDisk;

    #[test]
    fn a_folder_is_ours_only_with_every_file_in_it() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let foreign = |name: &str| foreign_in(&at(name)).unwrap();
        assert_eq!(foreign("no such"), None);
        publish_folder(&RealDisk, &at("adapter"), |staging| staging.write_json("state.json", &1)).unwrap();
        assert_eq!(foreign("adapter"), None);
        for (file, shown) in [("mine.txt", "mine.txt"), ("sub/mine", "sub")] {
            fs::create_dir_all(at("adapter/sub")).unwrap();
            fs::write(at("adapter").join(file), "mine").unwrap();
            assert_eq!(foreign("adapter"), Some(at("adapter").join(shown)));
            fs::remove_file(at("adapter").join(file)).unwrap();
        }
        fs::remove_dir(at("adapter/sub")).unwrap();
        // A manifest that cannot be read: known names only.
        fs::write(at("adapter/manifest.json"), "").unwrap();
        assert_eq!(foreign("adapter"), None);
        // Of another program.
        fs::create_dir(at("checkpoint-9")).unwrap();
        assert_eq!(foreign("checkpoint-9"), None, "an empty folder holds nothing");
        fs::write(at("checkpoint-9/adapter_config.json"), "{}").unwrap();
        assert_eq!(foreign("checkpoint-9"), Some(at("checkpoint-9/adapter_config.json")));
        fs::create_dir(at("tb")).unwrap();
        fs::write(at("tb/events.out.tfevents.1.host.2.0"), "").unwrap();
        assert_eq!(foreign("tb"), None);
        fs::write(at("plain"), "").unwrap();
        std::os::unix::fs::symlink(at("adapter"), at("link")).unwrap();
        assert_eq!((foreign("plain"), foreign("link")), (Some(at("plain")), Some(at("link"))));
    }

    #[test]
    fn what_is_foreign_stays_beside_what_takes_its_place() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let save =
            || publish_folder(&RealDisk, &at("adapter"), |staging| staging.write_json("state.json", &1)).unwrap();
        assert_eq!(save().kept, None);
        assert_eq!(save().kept, None);
        for number in 1..3 {
            fs::write(at("adapter/mine"), "mine").unwrap();
            let kept = at(&format!("adapter.kept-{number}"));
            assert_eq!(save().kept.as_ref(), Some(&kept));
            assert_eq!(fs::read_to_string(kept.join("mine")).unwrap(), "mine");
            assert_eq!(foreign_in(&at("adapter")).unwrap(), None);
        }
        fs::remove_dir_all(at("adapter")).unwrap();
        fs::write(at("adapter"), "a plain file").unwrap();
        assert_eq!(fs::read_to_string(save().kept.unwrap()).unwrap(), "a plain file");
        fs::remove_dir_all(at("adapter")).unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("adapter")).unwrap();
        assert!(save().kept.unwrap().is_symlink());
    }
}

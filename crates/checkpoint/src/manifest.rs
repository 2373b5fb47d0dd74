//! The manifest of a folder: size and BLAKE3 hash of every file. A folder is complete if all of them match.
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::layout::{MANIFEST, OPTIMIZER, STAMP, STATE};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::files;

/// The largest manifest that is read, in bytes. The manifest of a checkpoint is smaller.
const MANIFEST_BYTES: u64 = 1 << 20;
const VERSION: u32 = 1;

/// The list of files of a complete folder, `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    version: u32,
    files: BTreeMap<String, FileSum>,
}

/// For which files of a model [`Manifest::check_model`] computes the hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hashed {
    /// All files except the weights, which are read later anyway.
    Small,
    /// All files.
    All,
}

/// Size and BLAKE3 hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileSum {
    pub bytes: u64,
    /// The BLAKE3 hash in hexadecimal digits.
    pub blake3: String,
}

/// Writes `value` as indented JSON with a line end.
pub(crate) fn write_json(writer: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    writer.write_all(&text)
}

impl Manifest {
    /// The manifest of these files.
    pub(crate) const fn of(files: BTreeMap<String, FileSum>) -> Self {
        Self { version: VERSION, files }
    }

    /// Reads `dir/manifest.json`. A manifest that is valid but formatted differently counts as damaged.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: there is none, or it is damaged.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        let text = read_text(&path).map_err(|error| unreadable(&path, &error))?;
        let parsed = serde_json::from_slice(&text);
        Self::checked(&path, &text, parsed)
    }

    /// Checks what was parsed of `text`.
    fn checked(path: &Path, text: &[u8], parsed: serde_json::Result<Self>) -> Result<Self> {
        let damaged = |reason: String| damaged(path, reason);
        let manifest = parsed.map_err(|error| damaged("not valid".to_owned()).caused_by(error))?;
        if manifest.version != VERSION {
            return Err(damaged(format!("version {}, expected {VERSION}", manifest.version)));
        }
        if let Some(name) =
            manifest.files.keys().find(|name| name.is_empty() || name.starts_with('.') || name.contains(['/', '\\']))
        {
            return Err(damaged(format!("lists {name:?}, expected plain file names")));
        }
        let mut written = Vec::with_capacity(text.len());
        write_json(&mut written, &manifest).map_err(|error| damaged("not valid".to_owned()).caused_by(error))?;
        if written == text { Ok(manifest) } else { Err(damaged("not in the form in which it was written".to_owned())) }
    }

    /// The BLAKE3 hash of `dir/manifest.json`, in hexadecimal digits. It tells two trainings apart, because the manifest has
    /// the hash of every weights file. `None` if there is no manifest, or it cannot be read.
    pub fn fingerprint(dir: &Path) -> Option<String> {
        let text = read_text(&dir.join(MANIFEST)).ok()?;
        Some(blake3::hash(&text).to_hex().to_string())
    }

    /// As [`Manifest::read`]. `None` for a folder without a manifest, or with the manifest of another program, which
    /// lists no files by hash.
    fn read_if_any(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(MANIFEST);
        if !files::is_there(&path) {
            return Ok(None);
        }
        let text = read_text(&path).map_err(|error| unreadable(&path, &error))?;
        let parsed = serde_json::from_slice::<serde_json::Value>(&text);
        // A value with nothing in it is what damage leaves, not another program's manifest.
        let is_foreign = |value: &serde_json::Value| {
            let holds = value.as_object().map(|map| !map.is_empty()).or_else(|| Some(!value.as_array()?.is_empty()));
            holds == Some(true) && value.get("version").is_none() && value.get("files").is_none()
        };
        if parsed.as_ref().is_ok_and(is_foreign) {
            return Ok(None);
        }
        Self::checked(&path, &text, parsed.and_then(serde_json::from_value)).map(Some)
    }

    /// Checks the sizes and hashes of those of `names` that the manifest in `dir` lists. A folder without a manifest of
    /// this program passes, such as one that PEFT wrote.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: a file is not as it was written, or the manifest is damaged.
    pub fn check_if_any(dir: &Path, names: &[&str]) -> Result<()> {
        let all = |_: &str| true;
        Self::check_written(dir, &|name| names.contains(&name), &all)
    }

    /// As [`Manifest::check_if_any`], for a whole model: checks the sizes of all files, and the hashes that `hashed`
    /// selects. Leaves out files that people edit (`README.md`) and files that only a resume reads.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: a file is not as it was written, or the manifest is damaged.
    pub fn check_model(dir: &Path, hashed: Hashed) -> Result<()> {
        let of_model = |name: &str| !["README.md", OPTIMIZER, STATE, STAMP].contains(&name);
        let hashes = |name: &str| hashed == Hashed::All || !name.ends_with(".safetensors");
        Self::check_written(dir, &of_model, &hashes).map_err(|error| error.with_kind(Kind::Model))
    }

    fn check_written(dir: &Path, names: &dyn Fn(&str) -> bool, hashes: &dyn Fn(&str) -> bool) -> Result<()> {
        let checked = Self::read_if_any(dir).and_then(|manifest| {
            let Some(mut manifest) = manifest else { return Ok(()) };
            manifest.files.retain(|name, _| names(name));
            manifest.check_sizes(dir)?;
            manifest.files.retain(|name, _| hashes(name));
            manifest.check_hashes(dir)
        });
        checked.map_err(|error| {
            let path = dir.join(MANIFEST);
            error
                .context("the folder is not as tunesmith wrote it")
                .hint(format!("copy the folder again; if you changed a file on purpose, remove {}", path.display()))
        })
    }

    /// Whether a file is listed.
    pub fn lists(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    /// The names of the listed files, and `manifest.json`.
    pub fn names(&self) -> Vec<String> {
        self.files.keys().cloned().chain([MANIFEST.to_owned()]).collect()
    }

    /// The sum of the listed sizes, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|sum| sum.bytes).fold(0, u64::saturating_add)
    }

    /// Checks that every listed file exists with the listed size.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`], naming the file.
    pub fn check_sizes(&self, dir: &Path) -> Result<()> {
        self.files.iter().try_for_each(|(name, sum)| {
            let path = dir.join(name);
            let metadata = fs::metadata(&path).map_err(|error| unreadable(&path, &error))?;
            if !metadata.is_file() {
                return Err(damaged(&path, "not a regular file"));
            }
            if metadata.len() != sum.bytes {
                return Err(damaged(&path, format!("{} bytes, expected {}", metadata.len(), sum.bytes)));
            }
            Ok(())
        })
    }

    /// Checks the hash of every listed file, in parallel.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`], naming the file.
    pub fn check_hashes(&self, dir: &Path) -> Result<()> {
        self.files.par_iter().try_for_each(|(name, sum)| {
            let path = dir.join(name);
            let found = hash_file(&path).map_err(|error| unreadable(&path, &error))?;
            if found == sum.blake3 {
                Ok(())
            } else {
                Err(damaged(&path, format!("BLAKE3 {found}, expected {}", sum.blake3)))
            }
        })
    }
}

/// The text of a manifest, cut off if it is longer than any manifest.
fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    files::open_own(path)?.take(MANIFEST_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

fn hash_file(path: &Path) -> io::Result<String> {
    let (mut file, mut hasher) = (files::open_own(path)?, blake3::Hasher::new());
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            read => hasher.update(&buffer[..read]),
        };
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    damaged(path, "cannot be read").unless_of_machine(path, error)
}

fn damaged(path: &Path, reason: impl std::fmt::Display) -> Error {
    Error::checkpoint(format!("{}: {reason}", path.display()))
        .hint("the checkpoint is incomplete or damaged; resume from an earlier one")
}

/// A folder that passed [`verify`].
#[derive(Debug)]
pub struct Complete {
    /// The folder of the checkpoint.
    pub dir: PathBuf,
    /// The files with sizes and hashes.
    pub manifest: Manifest,
    /// Time spent on checking hashes.
    pub hashing: Duration,
}

/// Checks that every file in the manifest of `dir` exists with its size and hash.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`], naming the file, what was found and what was expected.
pub fn verify(dir: &Path) -> Result<Complete> {
    let manifest = Manifest::read(dir)?;
    manifest.check_sizes(dir)?;
    // Weights are read only from their folder: such a checkpoint could not be resumed.
    for name in manifest.files.keys().filter(|name| name.ends_with(".safetensors")) {
        let path = dir.join(name);
        if path.is_symlink() {
            files::open_member(&path).map_err(|error| damaged(&path, error))?;
        }
    }
    let began = Instant::now();
    manifest.check_hashes(dir)?;
    Ok(Complete { dir: dir.to_owned(), manifest, hashing: began.elapsed() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publish::publish_folder;
    use tunesmith_base::files::disk::RealDisk;

    fn folder(root: &Path) -> PathBuf {
        let dir = root.join("checkpoint-000001");
        publish_folder(&RealDisk, &dir, |staging| {
            staging.write("model.safetensors", |file| file.write_all(b"numbers"))
        })
        .unwrap();
        dir
    }

    #[test]
    fn a_manifest_with_nothing_in_it_is_damaged_and_one_of_another_program_is_not_ours() {
        let root = tempfile::tempdir().unwrap();
        let dir = folder(root.path());
        let check = || Manifest::check_if_any(&dir, &["model.safetensors"]);
        check().unwrap();
        for text in ["null", "[]", "{}", "", "0", "\"x\""] {
            fs::write(dir.join(MANIFEST), text).unwrap();
            assert_eq!(check().unwrap_err().kind(), Kind::Checkpoint, "{text}");
        }
        for text in [r#"{"name": "app", "icons": []}"#, r#"["model.safetensors"]"#] {
            fs::write(dir.join(MANIFEST), text).unwrap();
            check().unwrap();
        }
    }

    #[test]
    fn weights_that_are_a_link_out_of_their_folder_make_a_checkpoint_incomplete() {
        let root = tempfile::tempdir().unwrap();
        let dir = folder(root.path());
        let weights = dir.join("model.safetensors");
        verify(&dir).unwrap();
        fs::rename(&weights, root.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(root.path().join("elsewhere"), &weights).unwrap();
        let error = verify(&dir).unwrap_err();
        assert!(error.kind() == Kind::Checkpoint && error.to_string().contains("out of its folder"), "{error}");
        // The same within the folder, as by a tool that removes copies.
        fs::remove_file(&weights).unwrap();
        fs::rename(root.path().join("elsewhere"), dir.join("blob")).unwrap();
        std::os::unix::fs::symlink("blob", &weights).unwrap();
        verify(&dir).unwrap();
    }
}

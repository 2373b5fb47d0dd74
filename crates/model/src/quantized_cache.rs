//! A cache on disk for quantized matrices, so that a large checkpoint is read and quantized once. Each matrix is a file
//! in bitsandbytes' form with a digest. Complete files are used, and damaged ones are made again.
//!
//! The folder's name is a hash of the source's content and of the settings. Hashing reads the whole source. So the
//! source's hash is stored too, under the names, sizes and modification times of its files. While these stay the same,
//! the source counts as unchanged.
//!
//! Runs may share the folder, because a file is written under a temporary name and renamed. The next run removes what a
//! killed run has left ([`temporary`]).
use super::quantized_form::How;
use super::weights::{Numbers, Parts, WeightFiles, write_numbers_to};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::atomic::AtomicFile;
use tunesmith_base::files::{self, temporary};
use tunesmith_ops::quant::{Quantized, Scales};

/// Part of the key. It changes when the form of the files does, so that older files are not read.
const VERSION: &str = "tunesmith quantized 1";
const DIGEST: &str = "digest";

/// The cached matrices of one source in one format.
#[derive(Debug)]
pub struct Cache<'a> {
    dir: PathBuf,
    source: &'a WeightFiles,
}

/// The outcome of [`Cache::read`].
#[derive(Debug)]
pub(super) enum Kept {
    Whole(Quantized),
    /// A file that cannot be used, and why.
    Damaged(String),
    Nothing,
}

impl<'a> Cache<'a> {
    /// The place below `root` for matrices of `source` quantized as `how` says.
    ///
    /// # Errors
    /// The source cannot be read.
    pub fn new(root: &Path, source: &'a WeightFiles, how: How) -> Result<Self> {
        let root = root.join("quantized");
        let hash = source_hash(&root, source)?;
        let key = blake3::hash(format!("{VERSION} {hash} {}", how.describe()).as_bytes());
        let dir = root.join(&key.to_hex()[..32]);
        temporary::sweep_folder(&root);
        temporary::sweep_folder(&dir);
        Ok(Self { dir, source })
    }

    /// The folder that holds the matrices of this source in this format.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.safetensors"))
    }

    /// Whether there is a copy of a matrix, whole or not.
    pub(super) fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    pub(super) fn read(&self, name: &str, shape: &[usize], how: How) -> Kept {
        let path = self.path(name);
        if !path.exists() {
            return Kept::Nothing;
        }
        let read = || -> Result<Quantized> {
            let files = WeightFiles::open_quantized(&path)?;
            let wrong = |what: &str| Error::model(format!("{}: {what}", path.display()));
            if files.format_of(name) != Some(how.format) || files.shape(name) != Some(shape) {
                return Err(wrong("holds another matrix"));
            }
            let matrix = files.read_quantized(name)?;
            let mut stored = [0u8; 32];
            files.read_bytes_into(DIGEST, &mut stored)?;
            if stored != *digest(name, shape, &matrix).as_bytes() {
                return Err(wrong("its digest does not fit"));
            }
            Ok(matrix)
        };
        match read() {
            Ok(matrix) => Kept::Whole(matrix),
            Err(error) => Kept::Damaged(error.message().to_owned()),
        }
    }

    /// Writes a matrix under a temporary name, syncs it, and renames it.
    pub(super) fn write(&self, name: &str, shape: &[usize], matrix: &Quantized) -> Result<()> {
        debug_assert!(self.source.shape(name).is_some());
        let (path, digest) = (self.path(name), digest(name, shape, matrix));
        let parts = Parts::new(name, shape, "float32", matrix)?;
        let mut tensors = parts.tensors();
        tensors.push((DIGEST.into(), vec![32], Numbers::U8(digest.as_bytes()[..].into())));
        write_whole(&path, |file| write_numbers_to(file, &tensors, &[]))
            .map_err(|error| Error::io("write", &path, &error))
    }
}

fn write_whole(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut staged = AtomicFile::create(path)?;
    fill(&mut staged)?;
    staged.commit()
}

/// The digest of everything that the matrix consists of.
fn digest(name: &str, shape: &[usize], matrix: &Quantized) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{name:?} {shape:?} {}\n", matrix.format().name()).as_bytes());
    let floats = |hasher: &mut blake3::Hasher, values: &[f32]| {
        for value in values {
            hasher.update(&value.to_le_bytes());
        }
    };
    match matrix {
        Quantized::Four(four) => {
            hasher.update(four.codes()).update(&(four.block() as u64).to_le_bytes());
            floats(&mut hasher, four.table());
            match four.scales() {
                Scales::Plain(scales) => floats(&mut hasher, scales),
                Scales::Nested(nested) => {
                    hasher.update(&nested.codes).update(&(nested.block as u64).to_le_bytes());
                    floats(&mut hasher, &nested.map[..]);
                    floats(&mut hasher, &nested.absmax);
                    floats(&mut hasher, &[nested.offset]);
                }
            }
        }
        Quantized::Eight(eight) => {
            hasher.update(eight.codes());
            floats(&mut hasher, eight.scales());
        }
        // Such matrices are never cached: the checkpoint has them.
        Quantized::Tiled(tiled) => {
            hasher.update(tiled.codes());
            floats(&mut hasher, tiled.scales());
        }
    }
    hasher.finalize()
}

/// The hash of the source's content. It is read from a note of an earlier run if the files have not changed since.
fn source_hash(root: &Path, source: &WeightFiles) -> Result<String> {
    let mut about = blake3::Hasher::new();
    about.update(VERSION.as_bytes());
    for path in source.paths() {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let metadata = fs::metadata(&path).map_err(|error| Error::io("read", &path, &error))?;
        let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        about.update(format!("{} {} {changed:?}\n", path.display(), metadata.len()).as_bytes());
    }
    let note = root.join(format!("{}.source", &about.finalize().to_hex()[..32]));
    if let Ok(hash) = files::read_own_text(&note, files::SMALL)
        && hash.len() == 64
        && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        return Ok(hash);
    }
    let hash = source.fingerprint()?;
    // Without the note the source is hashed again next time.
    let _ = write_whole(&note, |file| file.write_all(hash.as_bytes()));
    Ok(hash)
}
